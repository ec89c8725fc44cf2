"""Blocks of pieces: planned once, kept beside the tokenised samples, read by number."""

# Shapes: B = blocks, T = tokens of a block.

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from nemo_like.data.cache import build_once
from nemo_like.data.corpus import hash_key
from nemo_like.data.packing import IGNORE_INDEX

from ..loading import TextBatch
from .config import TooLong
from .cut import Pieces, cut_samples
from .pack import Packing, keep_apart, pack_best_fit
from .store import SampleShard, Split, Store

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Blocks:
    """The blocks of one split of one source."""

    shard: SampleShard
    pieces: Pieces
    packing: Packing
    key: str
    """Names the plan: the same for the same samples, cut and packed in the same way."""

    def __len__(self) -> int:
        return len(self.packing)


def plan_blocks(
    store: Store, split: Split, *, seq_len: int, too_long: TooLong, is_packed: bool, cache_dir: Path
) -> Blocks:
    """Cuts and packs the samples of a store, or finds them so; the tables are mapped, not loaded.

    Args:
        store: A source.
        split: Which samples of it.
        seq_len: Most tokens of a piece, and size of a packed block.
        too_long: What becomes of longer samples.
        is_packed: Whether pieces share blocks.
        cache_dir: Folder that holds the cache folders.
    """
    key = hash_key([FORMAT_VERSION, store.folder.name, split, seq_len, too_long, is_packed])
    folder = cache_dir / "blocks" / key
    shard = store.shards[split]

    def build(part: Path) -> None:
        pieces = cut_samples(shard, seq_len=seq_len, too_long=too_long)
        lengths = pieces.lengths_P
        packing = pack_best_fit(lengths, capacity=seq_len) if is_packed else keep_apart(len(pieces))
        np.save(part / "pieces.npy", pieces.table_P3)
        np.save(part / "order.npy", packing.order_P)
        np.save(part / "starts.npy", packing.starts_B1)
        (part / "counts.json").write_text(json.dumps(pieces.counts))

    build_once(folder, build)
    table, order, starts = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("pieces", "order", "starts")
    )
    pieces = Pieces(table, json.loads((folder / "counts.json").read_bytes()))
    return Blocks(shard, pieces, Packing(order, starts), key)


class BlockReader:
    """Blocks of several sources, numbered through.

    Args:
        sources: The blocks of the first come first.
        seq_len: T of packed blocks.
        pad_id: Fills what is left; never a target, whatever the token.
        is_packed: Whether blocks have segments, and always T tokens.
        pad_to: Length of rows that are not packed.
    """

    def __init__(
        self,
        sources: Sequence[Blocks],
        *,
        seq_len: int,
        pad_id: int,
        is_packed: bool,
        pad_to: Literal["longest", "seq_len"] = "longest",
    ) -> None:
        self.sources = list(sources)
        self.seq_len, self.pad_id = seq_len, pad_id
        self.is_packed, self.is_fixed = is_packed, is_packed or pad_to == "seq_len"
        self.num_blocks = [len(source) for source in sources]
        self._firsts = np.cumsum([0, *self.num_blocks]).tolist()

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def list_pieces(self, sample_id: int) -> tuple[SampleShard, list[list[int]]]:
        """Where the pieces of a block stand: the shard, and for each sample, first token, last token + 1."""
        source = bisect_right(self._firsts, sample_id) - 1
        blocks = self.sources[source]
        numbers = blocks.packing[sample_id - self._firsts[source]]
        return blocks.shard, blocks.pieces.table_P3[numbers].tolist()

    def read(self, sample_ids: Sequence[int]) -> TextBatch:
        """A batch of blocks.

        Args:
            sample_ids: B numbers of blocks, 0 to ``len(self) - 1``.
        """
        found = [self.list_pieces(sample_id) for sample_id in sample_ids]
        longest = max(sum(stop - start - 1 for _, start, stop in rows) for _, rows in found)
        shape = (len(found), self.seq_len if self.is_fixed else longest)
        tokens_BT = np.full(shape, self.pad_id, dtype=np.int64)
        targets_BT = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        segments_BT = np.zeros(shape, dtype=np.int32)
        for row, (shard, pieces) in enumerate(found):
            place = 0
            for number, (sample, start, stop) in enumerate(pieces):
                ids, learnt = shard[sample]
                end = place + stop - start - 1
                tokens_BT[row, place:end] = ids[start : stop - 1]
                targets = ids[start + 1 : stop].astype(np.int64)
                targets[learnt[start + 1 : stop] == 0] = IGNORE_INDEX
                targets_BT[row, place:end] = targets
                segments_BT[row, place:end] = number
                place = end
            segments_BT[row, place:] = len(pieces)  # padding is a sample of its own
        return TextBatch(
            torch.from_numpy(tokens_BT),
            torch.from_numpy(targets_BT),
            # Rows that are padded on the right need none: nothing real looks to its right.
            torch.from_numpy(segments_BT) if self.is_packed else None,
        )
