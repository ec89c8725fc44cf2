"""Who sees whom: causal attention within segments and within a window."""
# Shapes: B = blocks, T = tokens; in B1TT the rows look at the columns.

from __future__ import annotations

import torch
from torch import Tensor


def build_positions(segments_BT: Tensor) -> Tensor:
    """Counts from 0 in each segment.

    Args:
        segments_BT: int, equal within a segment and different from one segment to the next.

    Returns:
        (B, T) int64.
    """
    index_T = torch.arange(segments_BT.size(1), device=segments_BT.device)
    starts_BT = torch.zeros_like(segments_BT, dtype=torch.bool)
    starts_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    start_index_BT = torch.where(starts_BT, index_T, 0).cummax(dim=1).values
    return index_T - start_index_BT


def build_mask(
    num_tokens: int,
    *,
    segments_BT: Tensor | None = None,
    window: int | None = None,
    device: torch.device | None = None,
) -> Tensor | None:
    """The attention mask of a block, or None where plain causal attention is the same.

    Args:
        num_tokens: T.
        segments_BT: int, the segment of each token; tokens see their own segment only. None is one segment.
        window: How many tokens a token sees at most, itself included; None is all.
        device: Where the mask is made; the device of ``segments_BT`` if there is one.

    Returns:
        (B or 1, 1, T, T) bool, true where the row sees the column, or None.
    """
    if window is not None and window >= num_tokens:
        window = None
    if segments_BT is None and window is None:
        return None
    if segments_BT is not None:
        device = segments_BT.device
    seen_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    if window is not None:
        seen_TT = seen_TT.triu(diagonal=1 - window)
    if segments_BT is None:
        return seen_TT[None, None]
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    return (same_BTT & seen_TT).unsqueeze(1)
