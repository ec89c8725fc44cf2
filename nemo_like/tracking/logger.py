"""Metrics as lines of JSON: what a run writes while it works, and how it is read again."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_only

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"

_RESERVED = ("step", "time")


class JsonlLogger(pl.loggers.Logger):
    """Appends metrics to ``<folder>/metrics.jsonl``, one object a line.

    ``{"step": 20, "time": 1767225600.25, "train/loss": 3.1, "train/lr": 0.0003}``: ``step`` counts optimizer steps
    done, ``time`` is in seconds since 1970, and the numbers that JSON lacks are the strings ``"NaN"``,
    ``"Infinity"`` and ``"-Infinity"``. A line is whole before the next step starts. Only rank zero writes.

    Args:
        folder: The run folder; made when the first line is written.
    """

    def __init__(self, *, folder: str | Path) -> None:
        super().__init__()
        self.path = Path(folder) / METRICS_FILE
        self._is_ready = False

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.path.parent.name

    @property
    def version(self) -> str:
        """None is kept: a run folder is one run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self.path.parent)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes one line.

        Args:
            metrics: Name -> number; ``<stage>/<metric>[_<unit>]``.
            step: Optimizer steps done.

        Raises:
            ValueError: No step, or a metric with the name of a field of the line.
        """
        if step is None:
            raise ValueError(f"{self.path}: metrics {sorted(metrics)} came without a step")
        if taken := sorted(set(metrics).intersection(_RESERVED)):
            raise ValueError(
                f"{self.path}: a metric cannot be called {taken[0]!r}, each line has that field already"
            )
        line: dict[str, float | str] = {"step": int(step), "time": round(time.time(), 3)}
        line |= {name: _to_json(float(value)) for name, value in metrics.items()}
        if not self._is_ready:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _close_last_line(self.path)
            self._is_ready = True
        # Opened anew for each line: nothing is held back, and nothing is left open when a run dies.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @rank_zero_only
    def drop_after(self, step: int) -> None:
        """Removes what was written after a step: a resumed run takes these steps again.

        Args:
            step: Optimizer steps done by the restored checkpoint; 0 at the start of a run.
        """
        if not self.path.is_file():
            return
        kept, dropped = [], 0
        for line in _read_lines(self.path):
            if line["step"] <= step:
                kept.append(json.dumps(line) + "\n")
            else:
                dropped += 1
        if dropped:
            hidden = self.path.with_name(f".{self.path.name}.new")
            hidden.write_text("".join(kept), encoding="utf-8")
            os.replace(hidden, self.path)
            logger.info("dropped %d lines after step %d from %s", dropped, step, self.path)

    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: the configuration of the run stands beside the metrics."""


def read_metrics(path: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Reads the curves of a run, also while it is running.

    A last line that is not finished yet is left out. Where a metric was written twice for one step, the later stays.

    Args:
        path: A ``metrics.jsonl``, or the run folder that holds one.

    Returns:
        Name -> (steps, int64, rising; values, float64). Nothing at all where there is no file.
    """
    path = Path(path)
    if path.is_dir():
        path /= METRICS_FILE
    curves: dict[str, dict[int, float]] = {}
    if path.is_file():
        for line in _read_lines(path):
            for name, value in line.items():
                if name not in _RESERVED:
                    curves.setdefault(name, {})[line["step"]] = float(value)
    return {
        name: (
            np.array(sorted(points), dtype=np.int64),
            np.array([points[step] for step in sorted(points)]),
        )
        for name, points in curves.items()
    }


def _to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    # float() reads these back.
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; one that a crash cut in two is reported and left out."""
    rows = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, row in enumerate(rows, start=1):
        try:
            line = json.loads(row)
            line["step"] = int(line["step"])
        except (ValueError, TypeError, KeyError):
            # What stands behind the last line feed is empty, or being written just now.
            if number < len(rows):
                logger.warning("%s:%d is no line of metrics and left out: %.60r", path, number, row)
            continue
        yield line


def _close_last_line(path: Path) -> None:
    """Ends a last line that a crash has cut, so that the next one stands alone."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
