"""Whether memory grows and grows: robust against jumps, noise and a start that takes what it needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_WINDOW = 100  # readings
# At least as many, or a slope is a matter of chance.
_FEWEST = 24
# A leak shows in most pairs of readings. Where memory jumped once, at least half of the pairs lie on one level; where
# it jumped twice, a third. Pairs on one level have slope 0, so this quantile of the slopes is 0 for up to two jumps
# anywhere, and for three that are evenly spread.
_QUANTILE = 0.24


@dataclass(frozen=True)
class Leak:
    """Growth without an end."""

    mb_per_step: float
    """1e6 bytes."""
    since: int
    """Step at which it began, as far as the readings tell."""
    grown_mb: float
    """What it has come to."""


class LeakDetector:
    """Watches the memory of one process.

    It looks at the last readings, for a leak that has just begun, and at the whole run (ever more thinly), for one that
    is slow.

    Args:
        warmup_steps: Steps at the beginning in which caches and pools fill, not looked at.
        smallest_mb: Growth that is worth a word, 1e6 bytes.
    """

    def __init__(self, *, warmup_steps: int = 20, smallest_mb: float = 64.0) -> None:
        self.warmup_steps, self.smallest_mb = warmup_steps, smallest_mb
        self._recent: list[tuple[int, float]] = []
        self._whole: list[tuple[int, float]] = []
        self._first_step: int | None = None
        self._stride, self._count = 1, 0

    def add(self, step: int, mb: float) -> None:
        """Takes a reading.

        Args:
            step: Optimizer steps done, rising.
            mb: Memory, 1e6 bytes.
        """
        if self._first_step is None:
            self._first_step = step
        if step < self._first_step + self.warmup_steps:
            return
        self._recent = [*self._recent[-_WINDOW + 1 :], (step, mb)]
        if self._count % self._stride == 0:
            self._whole.append((step, mb))
        self._count += 1
        if len(self._whole) > _WINDOW:
            self._whole = self._whole[::2]
            self._stride *= 2

    def compute_growth(self) -> float | None:
        """Growth over the last readings, MB a step; None before there are enough.

        The median of the slopes of all pairs (Theil 1950, Sen 1968): up to 29 % of the readings may lie anywhere.
        """
        if len(self._recent) < _FEWEST:
            return None
        return float(np.median(_compute_slopes(self._recent)))

    def find(self) -> Leak | None:
        """The leak, if there is one now."""
        for readings in (self._recent, self._whole):
            if len(readings) < _FEWEST:
                continue
            span = readings[-1][0] - readings[0][0]
            slopes = _compute_slopes(readings)
            if np.quantile(slopes, _QUANTILE) * span < self.smallest_mb / 2:
                continue
            slope = float(np.median(slopes))
            if slope * span >= self.smallest_mb:
                since, before = self._find_begin(slope)
                return Leak(slope, since, readings[-1][1] - before)
        return None

    def _find_begin(self, slope: float) -> tuple[int, float]:
        """Step and memory of the first reading from which on memory grew at about this slope."""
        readings = sorted({*self._whole, *self._recent})
        last_step, last_mb = readings[-1]
        return next(
            (step, mb) for step, mb in readings if last_mb - mb >= 0.8 * slope * (last_step - step)
        )


def _compute_slopes(readings: list[tuple[int, float]]) -> np.ndarray:
    """Of all pairs."""
    steps, values = np.array(readings, dtype=np.float64).T
    first, second = np.triu_indices(len(readings), 1)
    slopes: np.ndarray = (values[second] - values[first]) / (steps[second] - steps[first])
    return slopes
