"""Samples to pieces of at most a number of tokens, by a stated policy, with every change counted."""

# Shapes: N = samples, P = pieces.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import TooLong
from .store import SampleShard


@dataclass(frozen=True)
class Pieces:
    """Stretches of samples. A piece of n + 1 tokens is n inputs, of which each has the next as its target.

    Attributes:
        table_P3: int64: sample, its first token, the one behind its last.
        counts: What became of samples that were too long, and of pieces without a target.
    """

    table_P3: NDArray[np.int64]
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.table_P3)

    @property
    def lengths_P(self) -> NDArray[np.int64]:
        """Inputs of each piece."""
        return self.table_P3[:, 2] - self.table_P3[:, 1] - 1


def cut_samples(shard: SampleShard, *, seq_len: int, too_long: TooLong) -> Pieces:
    """Cuts the samples of a shard.

    Split pieces share a token, which is the last target of one and the first input of the next, so that every token but
    the first of a sample is a target once. A piece where nothing is learnt is left out.

    Args:
        shard: Tokenised samples.
        seq_len: Most inputs of a piece.
        too_long: What becomes of longer samples.
    """
    lengths_N = shard.lengths.astype(np.int64)
    long = np.flatnonzero(lengths_N - 1 > seq_len)
    numbers = np.arange(len(lengths_N))
    table = np.stack([numbers, np.zeros_like(numbers), lengths_N], axis=1)
    counts = {"too long": len(long), "without a target": 0}
    table[long, 2] = np.minimum(lengths_N[long], seq_len + 1)
    if too_long == "keep_end":
        table[long, 1] = lengths_N[long] - seq_len - 1
        table[long, 2] = lengths_N[long]
    elif too_long == "drop":
        return Pieces(np.delete(table, long, axis=0), counts)
    elif too_long == "split":
        table = _split(table, lengths_N, seq_len)
    was_cut = np.isin(table[:, 0], long)
    is_empty = np.zeros(len(table), dtype=np.bool_)
    for place in np.flatnonzero(was_cut):
        sample, start, stop = table[place].tolist()
        is_empty[place] = not _has_target(shard, sample, start, stop)
    counts["without a target"] = int(is_empty.sum())
    return Pieces(table[~is_empty], counts)


def _split(
    table: NDArray[np.int64], lengths_N: NDArray[np.int64], seq_len: int
) -> NDArray[np.int64]:
    repeats = np.maximum(-(-(lengths_N - 1) // seq_len), 1)
    result = np.repeat(table, repeats, axis=0)
    firsts = np.repeat(np.cumsum(repeats) - repeats, repeats)
    result[:, 1] = (np.arange(len(result)) - firsts) * seq_len
    result[:, 2] = np.minimum(result[:, 1] + seq_len + 1, np.repeat(lengths_N, repeats))
    return result


def _has_target(shard: SampleShard, sample: int, start: int, stop: int) -> bool:
    learnt: NDArray[Any] = shard.learnt[sample]
    return bool(learnt[start + 1 : stop].any())
