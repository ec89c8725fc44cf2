"""How fast training steps are, apart from everything that is no training step."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class StepClock:
    """Time and units of the last training steps.

    A step is timed from the end of the one before it, so waiting for data counts. Validation and saving do not: the
    step after them is timed from its own start, and one that was interrupted by a save is left out. On a GPU the clock
    reads when work was handed over; over a window that evens out.

    Args:
        window: Steps over which the figures are means.
    """

    def __init__(self, window: int = 50) -> None:
        self._durations: deque[float] = deque(maxlen=window)
        self._units: deque[Tensor | float] = deque(maxlen=window)
        self._since = 0.0
        self._is_interrupted = True

    def interrupt(self) -> None:
        """Something else than training begins: a validation, a save."""
        self._is_interrupted = True

    def start_step(self, now: float) -> None:
        """A step begins.

        Args:
            now: Seconds of a monotonic clock, here and below.
        """
        if self._is_interrupted:
            self._is_interrupted = False
            self._since = now

    def end_step(self, now: float, units: Tensor | float) -> None:
        """A step is done.

        Args:
            now: Seconds.
            units: What it processed over all ranks; a tensor is read only when somebody asks for a figure.
        """
        if not self._is_interrupted:
            self._durations.append(now - self._since)
            self._units.append(units)
        self._since = now

    def compute_step_s(self) -> float | None:
        """Mean seconds per step; None before the first one."""
        return sum(self._durations) / len(self._durations) if self._durations else None

    def compute_units_per_s(self) -> float | None:
        """Units per second; None before the first step."""
        duration = sum(self._durations)
        if duration <= 0:
            return None
        tensors = [units for units in self._units if isinstance(units, Tensor)]
        total = float(torch.stack(tensors).sum()) if tensors else 0.0
        return (
            total + sum(units for units in self._units if not isinstance(units, Tensor))
        ) / duration
