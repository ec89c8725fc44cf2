"""From logits to tokens: penalty, temperature, filters, and one draw a request."""
# Shapes: N = requests that are drawn alike, V = vocabulary, K = likeliest tokens that are looked at.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import GenerationConfig

_LIKELIEST = 512
"""Tokens among which top-p is looked for before the whole vocabulary is sorted."""


def penalize_repetition(logits_NV: Tensor, seen_NV: Tensor, penalty: float) -> Tensor:
    """Makes tokens that were seen less likely (Keskar et al. 2019, arXiv:1909.05858).

    Args:
        logits_NV: Logits, or log-probabilities.
        seen_NV: bool, the tokens of prompt and text.
        penalty: What is positive is divided by it, what is negative multiplied.
    """
    lowered_NV = torch.where(logits_NV < 0, logits_NV * penalty, logits_NV / penalty)
    return torch.where(seen_NV, lowered_NV, logits_NV)


def filter_logits(logits_NV: Tensor, config: GenerationConfig) -> Tensor:
    """Divides by the temperature and excludes what ``top_k``, ``top_p`` and ``min_p`` exclude, in this order.

    Args:
        logits_NV: float32 or wider.
        config: With a temperature above 0.

    Returns:
        (N, V), minus infinity where a token is excluded; the likeliest token always stays.
    """
    # The maximum goes first: divided by a tiny temperature it would be infinite.
    logits_NV = (logits_NV - logits_NV.amax(dim=-1, keepdim=True)) / config.temperature
    if config.top_k is not None and config.top_k < logits_NV.size(-1):
        least_N1 = logits_NV.topk(config.top_k, dim=-1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < least_N1, -torch.inf)
    if config.top_p < 1:
        logits_NV = _keep_top_p(logits_NV, config.top_p)
    if config.min_p > 0:
        # Against the likeliest token, whose logit is 0 here.
        logits_NV = logits_NV.masked_fill(logits_NV.exp() < config.min_p, -torch.inf)
    return logits_NV


def _keep_top_p(logits_NV: Tensor, top_p: float) -> Tensor:
    """Keeps every token before which less than ``top_p`` has been gathered; so always the first."""
    total_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    for count in (min(_LIKELIEST, logits_NV.size(-1)), logits_NV.size(-1)):
        values_NK, ids_NK = logits_NV.topk(count, dim=-1)
        probabilities_NK = (values_NK - total_N1).exp()
        reached_NK = probabilities_NK.cumsum(dim=-1)
        if count == logits_NV.size(-1) or bool((reached_NK[:, -1] >= top_p).all()):
            break
    values_NK = values_NK.masked_fill(reached_NK - probabilities_NK >= top_p, -torch.inf)
    return torch.full_like(logits_NV, -torch.inf).scatter(-1, ids_NK, values_NK)


def draw_tokens(logits_NV: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
    """Draws one token a row, each with exactly one random number of its own generator.

    Args:
        logits_NV: Filtered; what is minus infinity is never drawn.
        generators: One a row, on the CPU, so that a device changes nothing but rounding.
    """
    draws = [torch.rand((), dtype=torch.float64, generator=it) for it in generators]
    reached_NV = logits_NV.double().softmax(dim=-1).cumsum(dim=-1)
    draw_N1 = torch.stack(draws).unsqueeze(1).to(reached_NV.device) * reached_NV[:, -1:]
    # The first token beyond the draw: one without probability does not move the sum and is never the first.
    ids_N1 = torch.searchsorted(reached_NV, draw_N1, right=True)
    last = logits_NV.size(-1) - 1
    ids: list[int] = ids_N1[:, 0].clamp(max=last).tolist()
    return ids
