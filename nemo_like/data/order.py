"""The order of samples: a function of (seed, epoch, position) that is computed where it is asked
for.

No list is shuffled and none is stored, so any position costs the same and a run resumes where it
stopped, at once.
"""

# U64 arrays are uint64; numpy wraps their sums and products modulo 2**64, which the mixing wants.

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

# Even, so that the halves come back to their places. Four rounds are enough for large sizes (Luby
# and Rackoff 1988); with 8 rounds over at least 6 bits all 24 orders of 4 samples are equally
# likely, which 4 bits or 4 rounds did not give.
ROUNDS = 8
MIN_BITS = 6
# Increment and multipliers of SplitMix64 (Steele, Lea, Flood 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_ONE = np.uint64(1)
_WORD = np.uint64(64)


def permute(index: U64, size: U64, key: U64) -> U64:
    """Where a keyed pseudorandom permutation of 0 to ``size - 1`` puts ``index``.

    A Feistel network permutes the next power of two (64 at least); what falls outside is sent on
    until it falls inside (cycle walking, Black and Rogaway 2002), which from 33 on takes less than
    one more round trip on average.

    Args:
        index: (n,), below ``size``.
        size: (n,) or (1,), at least 1.
        key: (n,) or (1,); each key is another permutation.

    Returns:
        (n,), below ``size``.
    """
    index, size, key = (
        np.ascontiguousarray(part) for part in np.broadcast_arrays(index, size, key)
    )
    bits = np.maximum(np.frexp((size - _ONE).astype(np.float64))[1], MIN_BITS).astype(np.uint64)
    low = bits // np.uint64(2)
    out = _encrypt(index, bits - low, low, key)
    outside = np.flatnonzero(out >= size)
    while len(outside):
        out[outside] = _encrypt(out[outside], (bits - low)[outside], low[outside], key[outside])
        outside = outside[out[outside] >= size[outside]]
    return out


def derive_key(*parts: object) -> np.uint64:
    """64 bits that stand for the parts."""
    digest = hashlib.blake2b(
        "\0".join(str(part) for part in parts).encode(), digest_size=8
    ).digest()
    return np.uint64(int.from_bytes(digest, "little"))


class SampleOrder:
    """Which sample stands at which position of a run.

    An epoch has one slot for each draw that the mixture grants; a permutation of the slots says
    which comes when, and the j-th draw of a subset, counted over all epochs, takes its blocks in
    another permutation each time round. A subset that is drawn less than once an epoch so shows all
    its blocks before it repeats one.

    Args:
        names: Subsets; a subset's permutation hangs on its name, not on its neighbours.
        num_blocks: Blocks in each.
        draws: Slots of each in an epoch; 0 leaves a subset out.
        seed: Another seed is another order.

    Raises:
        ValueError: There is nothing to draw, or a subset without blocks is to be drawn.
    """

    def __init__(
        self, *, names: Sequence[str], num_blocks: Sequence[int], draws: Sequence[int], seed: int
    ) -> None:
        for name, blocks, number in zip(names, num_blocks, draws, strict=True):
            if number and not blocks:
                raise ValueError(
                    f"subset {name!r} has no blocks, {number} draws an epoch were asked for"
                )
        self.names, self.num_blocks, self.draws = list(names), list(num_blocks), list(draws)
        self.epoch_size = sum(draws)
        """Samples in an epoch."""
        if not self.epoch_size:
            raise ValueError(f"no samples: no subset of {', '.join(names) or 'none'} is drawn")
        self._epoch_key = derive_key("epoch", seed)
        self._subset_keys = np.array(
            [derive_key("subset", seed, name) for name in names], dtype=np.uint64
        )
        self._slot_starts = np.concatenate([[0], np.cumsum(draws)]).astype(np.uint64)
        self._id_starts = np.concatenate([[0], np.cumsum(num_blocks)]).astype(np.uint64)
        self._draws = np.array(draws, dtype=np.uint64)
        self._num_blocks = np.array(num_blocks, dtype=np.uint64)

    def sample_ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ids of the samples at positions ``start`` to ``stop - 1``; an id is the subset's offset +
        the block."""
        epoch, slot, subset = self._find_slots(start, stop)
        draw = epoch * self._draws[subset] + slot - self._slot_starts[subset]
        size = self._num_blocks[subset]
        turn = draw // size
        block = permute(draw % size, size, _mix(self._subset_keys[subset] + turn * _STEP))
        return (self._id_starts[subset] + block).astype(np.int64)

    def count_draws(self, stop: int) -> list[int]:
        """How many samples of each subset stand at positions 0 to ``stop - 1``.

        Exact while the part of an epoch at the end has at most 4 Mi samples; of a longer part the
        rest is in proportion.
        """
        epochs, rest = divmod(stop, self.epoch_size)
        counts = epochs * np.array(self.draws, dtype=np.float64)
        exact = min(rest, 1 << 22)
        for start in range(stop - rest, stop - rest + exact, 1 << 18):
            subset = self._find_slots(start, min(start + (1 << 18), stop - rest + exact))[2]
            counts += np.bincount(subset, minlength=len(self.names))
        counts += np.array(self.draws) * ((rest - exact) / self.epoch_size)
        return [int(count) for count in np.rint(counts)]

    def _find_slots(self, start: int, stop: int) -> tuple[U64, U64, NDArray[np.int64]]:
        """Epoch, slot in the epoch and subset of each position."""
        position = np.arange(start, stop, dtype=np.uint64)
        size = np.array([self.epoch_size], dtype=np.uint64)
        epoch = position // size
        slot = permute(position % size, size, _mix(self._epoch_key + epoch * _STEP))
        subset = np.searchsorted(self._slot_starts, slot, side="right").astype(np.int64) - 1
        return epoch, slot, subset


def _mix(word: U64) -> U64:
    """SplitMix64's finalizer: every bit of the word moves about half of the bits of the result."""
    word = (word ^ (word >> _SHIFTS[0])) * _MULTIPLIERS[0]
    word = (word ^ (word >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return word ^ (word >> _SHIFTS[2])


def _encrypt(word: U64, high: U64, low: U64, key: U64) -> U64:
    """A Feistel network over ``high + low`` bits whose halves change places in every round."""
    left, right = word >> low, word & ((_ONE << low) - _ONE)
    left_bits, right_bits = high, low
    for _ in range(ROUNDS):
        key = key + _STEP
        left, right = right, left ^ (_mix(right ^ _mix(key)) >> (_WORD - left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << low) | right
