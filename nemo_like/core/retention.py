"""Which checkpoints stay."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_like.core.checkpoint import STATE, find_checkpoints, read_figures, remove_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The newest, the best, and one every so many hours; the rest goes.

    However often a run is stopped and saved, no more folders stay than ``keep_last`` + ``keep_best`` + one for each
    ``keep_every_hours`` that the run has lasted.

    Args:
        keep_last: How many of the newest stay.
        keep_best: How many of the best by ``monitor`` stay besides.
        monitor: A validation figure, e.g. ``val/loss``.
        mode: Whether a smaller or a larger figure is better.
        keep_every_hours: Time between two that stay for good, by the clock that saved them; None keeps none.

    Raises:
        ValueError: A value is out of range.
    """

    keep_last: int = 2
    keep_best: int = 1
    monitor: str = "val/loss"
    mode: Literal["min", "max"] = "min"
    keep_every_hours: float | None = None

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(
                f"keep_last={self.keep_last}: must be at least 1, or there is nothing to resume from"
            )
        if self.keep_best < 0:
            raise ValueError(f"keep_best={self.keep_best}: must be at least 0")
        if self.keep_every_hours is not None and not self.keep_every_hours > 0:
            raise ValueError(
                f"keep_every_hours={self.keep_every_hours}: must be above 0, or None to keep none"
            )

    def choose(self, saved: Sequence[Path]) -> set[Path]:
        """Those that stay.

        Args:
            saved: Whole checkpoints, oldest step first.
        """
        best = self._sort_by_figure(saved)[: self.keep_best] if self.keep_best else []
        return {*saved[-self.keep_last :], *best, *self._find_milestones(saved)}

    def apply(self, folder: Path) -> list[Path]:
        """Removes the others; one that somebody reads stays until the next time.

        Returns:
            What was removed.
        """
        saved = find_checkpoints(folder)
        keep = self.choose(saved)
        removed = []
        for path in saved:
            if path not in keep:
                if remove_checkpoint(path):
                    removed.append(path)
                else:
                    logger.info("%s is being read and stays for now", path)
        return removed

    def _sort_by_figure(self, saved: Sequence[Path]) -> list[Path]:
        """Best first; those without the figure are left out."""
        figures = []
        for path in saved:
            figure = (read_figures(path) or {}).get(self.monitor)
            if figure is not None and not math.isnan(figure):
                figures.append((figure if self.mode == "min" else -figure, path))
        return [path for _, path in sorted(figures)]

    def _find_milestones(self, saved: Sequence[Path]) -> list[Path]:
        """The first, and each one that was saved long enough after the one before."""
        if self.keep_every_hours is None:
            return []
        milestones: list[Path] = []
        last_s = -math.inf
        for path in saved:
            saved_s = _read_time_s(path)
            if saved_s is not None and saved_s - last_s >= 3600 * self.keep_every_hours:
                milestones.append(path)
                last_s = saved_s
        return milestones


def _read_time_s(folder: Path) -> float | None:
    """When it was saved, in seconds since 1970."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return float(json.loads((folder / STATE).read_bytes())["saved_at"])
    return None
