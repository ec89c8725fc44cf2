"""Batches of pairs, and the log-probabilities of the answers in them."""
# Shapes: P = pairs, R = 2 P rows, T = tokens, D = model width, N = scored tokens of all rows.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import IGNORE_INDEX, TextBatch
from ..decoder.network import DecoderNetwork
from ..losses import token_log_probs


@dataclass
class PreferenceBatch(TextBatch):
    """Pairs that are computed at once: first the rows with the better answers, then, in the same order, the worse."""

    pair_ids_P: Tensor | None = None
    """int64, number of each pair among all pairs of training and validation; None where nothing is looked up by it."""

    @property
    def better(self) -> TextBatch:
        """The better answers alone."""
        half = len(self.tokens_BT) // 2
        segments_BT = None if self.segments_BT is None else self.segments_BT[:half]
        return TextBatch(self.tokens_BT[:half], self.targets_BT[:half], segments_BT)


def count_scored(batch: TextBatch) -> Tensor:
    """Tokens of each answer, int64 (2, P): first row the better ones; 0 in blank pairs."""
    return (batch.targets_BT != IGNORE_INDEX).sum(dim=1).view(2, -1)


def compute_log_probs(network: DecoderNetwork, batch: TextBatch) -> Tensor:
    """Log-probabilities of the answers, each the sum over its scored tokens.

    Logits are made of scored tokens only, and for a few of them at a time.

    Args:
        network: Computes both answers of all pairs in one pass.
        batch: P pairs.

    Returns:
        float64 (2, P), with gradient where the network has one: first row the better answers; 0 in blank pairs.
    """
    hidden_RTD = network.compute_hidden(batch.tokens_BT, segments_BT=batch.segments_BT)
    is_scored_RT = batch.targets_BT != IGNORE_INDEX
    log_probs_N = token_log_probs(
        hidden_RTD[is_scored_RT], network.output_weight_VD, batch.targets_BT[is_scored_RT]
    )
    # Placed, then added up along a row: adding at an index would hang on the order of threads.
    log_probs_RT = log_probs_N.new_zeros(is_scored_RT.shape).index_put((is_scored_RT,), log_probs_N)
    return log_probs_RT.sum(dim=1, dtype=torch.float64).view(2, -1)
