"""Configuration of the callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class ProgressBarConfig:
    """One line that says how a run is doing."""

    refresh_s: float = 0.25
    """Seconds between two refreshes on a terminal."""
    line_every_s: float = 15.0
    """Seconds between two plain lines where the output is no terminal."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        for name in ("refresh_s", "line_every_s"):
            if getattr(self, name) < 0:
                yield f"{name}={getattr(self, name)}: must be at least 0 seconds"


@dataclass(kw_only=True)
class MetricsWriterConfig:
    """From the figures that a model leaves behind to the loggers."""

    every_n_steps: int | None = None
    """Optimizer steps between two records; null takes ``trainer.log_every_n_steps``."""
    window: int = 50
    """Optimizer steps over which the throughput is averaged."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        if self.every_n_steps is not None and self.every_n_steps < 1:
            yield f"every_n_steps={self.every_n_steps}: must be at least 1, or null for that of the trainer"
        if self.window < 1:
            yield f"window={self.window}: must be at least 1"


@dataclass(kw_only=True)
class ReportConfig:
    """What a run shows for itself when it is done."""

    run_dir: str | None = None
    """Folder that receives the report; null is the folder of the run."""
    name: str | None = None
    """Shown at the top of the page; null is the name of the folder."""


@dataclass(kw_only=True)
class CheckpointingConfig:
    """When a run saves and what it keeps; the values are those of the run's ``checkpoint`` section."""

    folder: str
    """Where the checkpoints go."""
    every_n_steps: int | None = None
    """Optimizer steps between two checkpoints; null saves after the last step only."""
    keep_last: int = 2
    """Newest checkpoints that stay."""
    keep_best: int = 1
    """Checkpoints with the best ``monitor`` that stay besides."""
    monitor: str = "val/loss"
    """Figure of a validation that says which is best."""
    mode: Literal["min", "max"] = "min"
    """Whether a small or a large figure is good."""
    include: list[str] = field(default_factory=list)
    """Files that every checkpoint holds a copy of."""
