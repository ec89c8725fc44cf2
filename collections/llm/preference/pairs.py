"""Which tokenised pairs are used, and how they are read."""
# Shapes: P = pairs, R = 2 P rows, T = tokens.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..data import IGNORE_INDEX
from ..finetune.store import SampleShard
from .batch import PreferenceBatch


@dataclass(frozen=True)
class Pairs:
    """The pairs of one split.

    Attributes:
        shard: Tokenised answers with their prompts: those of pair i are its samples 2 i (better) and 2 i + 1.
        numbers_P: int64: the pairs that are used.
        seq_len: Most inputs of a row; what is behind is cut off.
        counts: Pairs that were too long, that cutting left without an answer, and without a difference.
    """

    shard: SampleShard
    numbers_P: NDArray[np.int64]
    seq_len: int
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.numbers_P)


def select_pairs(
    shard: SampleShard, *, seq_len: int, too_long: Literal["keep_start", "drop"]
) -> Pairs:
    """Leaves out pairs that do not fit, or that say nothing once they are cut.

    Args:
        shard: As in :class:`Pairs`.
        seq_len: Most inputs of a row; a sample of n + 1 tokens is n inputs.
        too_long: What becomes of longer pairs.
    """
    longest_P = shard.lengths.astype(np.int64).reshape(-1, 2).max(axis=1, initial=0) - 1
    is_used_P = np.ones(len(longest_P), dtype=np.bool_)
    long = np.flatnonzero(longest_P > seq_len)
    counts = {"too long": len(long), "without an answer": 0, "the same": 0}
    for pair in long.tolist():
        fault = "too long" if too_long == "drop" else _find_fault(shard, pair, seq_len)
        if fault is not None:
            is_used_P[pair] = False
            counts[fault] += fault != "too long"
    return Pairs(shard, np.flatnonzero(is_used_P), seq_len, counts)


def _find_fault(shard: SampleShard, pair: int, seq_len: int) -> str | None:
    """Why a pair that is cut cannot be used."""
    (better, is_learnt), (worse, is_learnt_too) = shard[2 * pair], shard[2 * pair + 1]
    kept = slice(1, seq_len + 1)
    if not (is_learnt[kept].any() and is_learnt_too[kept].any()):
        return "without an answer"
    return "the same" if np.array_equal(better[: seq_len + 1], worse[: seq_len + 1]) else None


class PairReader:
    """Pairs by number.

    Args:
        pairs: Of one split.
        first_id: Number of the first of them among all pairs of the data.
        pad_id: Fills rows on the right; never a target, whatever the token.
        is_fixed: Rows have ``seq_len`` tokens always, instead of those of the longest.
    """

    def __init__(self, pairs: Pairs, *, first_id: int, pad_id: int, is_fixed: bool) -> None:
        self.pairs, self.first_id, self.pad_id, self.is_fixed = pairs, first_id, pad_id, is_fixed

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, sample_ids: Sequence[int]) -> PreferenceBatch:
        """A batch of pairs.

        Args:
            sample_ids: P numbers, 0 to ``len(self) - 1``.
        """
        numbers = self.pairs.numbers_P[list(sample_ids)].tolist()
        seq_len = self.pairs.seq_len
        rows = [self.pairs.shard[2 * number + worse] for worse in (0, 1) for number in numbers]
        lengths = [min(len(ids) - 1, seq_len) for ids, _ in rows]
        shape = (len(rows), seq_len if self.is_fixed else max(lengths))
        tokens_RT = np.full(shape, self.pad_id, dtype=np.int64)
        targets_RT = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        for row, ((ids, is_learnt), length) in enumerate(zip(rows, lengths, strict=True)):
            tokens_RT[row, :length] = ids[:length]
            targets = ids[1 : length + 1].astype(np.int64)
            targets[is_learnt[1 : length + 1] == 0] = IGNORE_INDEX
            targets_RT[row, :length] = targets
        return PreferenceBatch(
            torch.from_numpy(tokens_RT),
            torch.from_numpy(targets_RT),
            pair_ids_P=torch.tensor(sample_ids, dtype=torch.int64) + self.first_id,
        )
