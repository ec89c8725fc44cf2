"""Packing: whole pieces into blocks of a fixed number of tokens."""

# Shapes: P = pieces, B = blocks.

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Packing:
    """Which pieces share a block.

    Attributes:
        order_P: int64: pieces, block after block.
        starts_B1: int64: where each block begins in ``order_P``, and its length at the end.
    """

    order_P: NDArray[np.int64]
    starts_B1: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts_B1) - 1

    def __getitem__(self, block: int) -> NDArray[np.int64]:
        """The pieces of a block."""
        return self.order_P[self.starts_B1[block] : self.starts_B1[block + 1]]


def pack_best_fit(lengths_P: Sequence[int] | NDArray[np.int64], *, capacity: int) -> Packing:
    """Packs pieces, the longest first, each into the fullest block that still has room for it.

    Best fit decreasing needs at most 11/9 of the blocks of the best packing, and a few more (Johnson 1973). The
    result hangs on the lengths alone; of pieces of one length the first comes first.

    Args:
        lengths_P: Tokens of each piece, at most ``capacity``.
        capacity: Tokens of a block.

    Raises:
        ValueError: A piece is longer than a block.
    """
    lengths = np.asarray(lengths_P, dtype=np.int64)
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(
            f"a piece of {lengths.max()} tokens does not fit into a block of {capacity}"
        )
    blocks: list[list[int]] = []
    rooms: list[int] = []  # the different rooms that are left in blocks, ascending
    by_room: dict[int, list[int]] = {}  # room -> blocks
    order = np.argsort(-lengths, kind="stable")
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            block, room = len(blocks), capacity
            blocks.append([])
        else:
            room = rooms[place]
            block = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(place)
        blocks[block].append(piece)
        left = room - length
        if left:
            if not by_room.setdefault(left, []):
                insort(rooms, left)
            by_room[left].append(block)
    starts = np.cumsum([0, *map(len, blocks)])
    flat = [piece for block in blocks for piece in block]
    return Packing(np.array(flat, dtype=np.int64), starts.astype(np.int64))


def keep_apart(number: int) -> Packing:
    """Every piece is a block of its own.

    Args:
        number: Pieces.
    """
    return Packing(np.arange(number), np.arange(number + 1))
