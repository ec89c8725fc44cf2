"""Packing: fixed blocks cut out of the stored documents of a subset, with the borders of documents
kept.

A stored document is ``prefix + tokens``, and the end-of-text token behind it where that is another
one than the prefix. Block k of a subset holds the inputs at places k*T to k*T + T - 1 of its
documents laid end to end, and as targets their successors.
"""

# Shapes: B = blocks, T = tokens of a block.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_like.data.token_shards import TokenShard

IGNORE_INDEX = -100


class PackedBlocks(NamedTuple):
    """Several blocks side by side."""

    tokens_BT: NDArray[np.int64]
    """Inputs; behind the last token of a subset, padding (end of text)."""
    targets_BT: NDArray[np.int64]
    """What comes next; -100 where nothing is to be learnt."""
    segments_BT: NDArray[np.int32] | None
    """Number of the document inside its block, padding being one more; None when each block lies in
    one document."""


class BlockReader:
    """Blocks of several subsets, numbered through.

    Args:
        shards: One for each subset; the blocks of the first come first.
        seq_len: T.
        prefix_id: The token before every document.
        eos_id: End of text. Where it is the prefix too, a document's last token has the next prefix
            as its target, which then means the end; else the stored end of text has none.
    """

    def __init__(
        self, shards: Sequence[TokenShard], *, seq_len: int, prefix_id: int, eos_id: int
    ) -> None:
        self.shards = list(shards)
        self.seq_len, self.prefix_id, self.eos_id = seq_len, prefix_id, eos_id
        # The last token of a subset has no successor, so it is no input; the rest is covered whole.
        self.num_blocks = [max(-(-(shard.num_tokens - 1) // seq_len), 0) for shard in self.shards]
        self._first_ids = [sum(self.num_blocks[:number]) for number in range(len(shards))]

    def __len__(self) -> int:
        return sum(self.num_blocks)

    def find_subset(self, sample_id: int) -> int:
        """Number of the subset that a block belongs to."""
        return bisect_right(self._first_ids, sample_id) - 1

    def read(self, sample_ids: Sequence[int]) -> PackedBlocks:
        """Cuts blocks.

        Args:
            sample_ids: B numbers of blocks, 0 to ``len(self) - 1``.
        """
        seq_len = self.seq_len
        stored = np.full((len(sample_ids), seq_len + 1), self.eos_id, dtype=np.int64)
        border_rows: list[int] = []
        border_columns: list[int] = []
        short_rows: list[tuple[int, int]] = []
        for row, sample_id in enumerate(sample_ids):
            # bisect_right finds the last of several subsets that start here; those before it are
            # empty.
            subset = bisect_right(self._first_ids, sample_id) - 1
            shard = self.shards[subset]
            start = (sample_id - self._first_ids[subset]) * seq_len
            tokens = shard.tokens[start : start + seq_len + 1]
            stored[row, : len(tokens)] = tokens
            borders = shard.find_starts(start, start + seq_len + 1)
            if len(tokens) <= seq_len:
                short_rows.append((row, len(tokens)))
                borders.append(len(tokens))
            border_rows += [row] * len(borders)
            border_columns += borders
        tokens_BT, targets_BT = stored[:, :-1].copy(), stored[:, 1:].copy()
        for row, length in short_rows:
            targets_BT[row, length - 1 :] = IGNORE_INDEX
        if not border_rows:
            return PackedBlocks(tokens_BT, targets_BT, None)
        rows, columns = np.array(border_rows), np.array(border_columns)
        if self.prefix_id != self.eos_id:
            targets_BT[rows, columns - 1] = IGNORE_INDEX
        inside = columns < seq_len  # the border may lie right behind the block
        if not inside.any():
            return PackedBlocks(tokens_BT, targets_BT, None)
        borders_BT = np.zeros((len(sample_ids), seq_len), dtype=np.int32)
        borders_BT[rows[inside], columns[inside]] = 1
        return PackedBlocks(tokens_BT, targets_BT, np.cumsum(borders_BT, axis=1, dtype=np.int32))
