"""Configuration of the callbacks."""

from __future__ import annotations

import signal
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
    every_minutes: float | None = None
    """Minutes between two checkpoints, besides; null saves by steps alone."""
    asynchronous: bool = True
    """Write behind the next steps; else a step that saves lasts until all is on the disk."""
    keep_last: int = 2
    """Newest checkpoints that stay."""
    keep_best: int = 1
    """Checkpoints with the best ``monitor`` that stay besides."""
    keep_every_hours: float | None = None
    """Hours between two checkpoints that stay for good; null keeps none."""
    monitor: str = "val/loss"
    """Figure of a validation that says which is best."""
    mode: Literal["min", "max"] = "min"
    """Whether a small or a large figure is good."""
    include: list[str] = field(default_factory=list)
    """Files that every checkpoint holds a copy of."""


@dataclass(kw_only=True)
class MachineMonitorConfig:
    """Memory, processor and GPU of every rank."""

    every_n_steps: int | None = None
    """Optimizer steps between two readings; null takes ``trainer.log_every_n_steps``."""
    warmup_steps: int = 20
    """Steps after each start in which memory may grow without a word: caches and pools fill."""
    leak_mb: float = 64.0
    """Steady growth that is worth a warning, in MB (1e6 bytes)."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        if self.every_n_steps is not None and self.every_n_steps < 1:
            yield f"every_n_steps={self.every_n_steps}: must be at least 1, or null for that of the trainer"
        if self.warmup_steps < 0:
            yield f"warmup_steps={self.warmup_steps}: must be at least 0"
        if not self.leak_mb > 0:
            yield f"leak_mb={self.leak_mb}: must be above 0"


@dataclass(kw_only=True)
class NonfiniteGuardConfig:
    """When a run stops whose loss or gradient is not finite any more."""

    max_nonfinite_steps: int | None = 10
    """Steps in a row; null never stops. Its value is that of the run's ``trainer`` section."""


@dataclass(kw_only=True)
class LossSpikesConfig:
    """Reports of a training loss far above what it has lately been."""

    factor: float = 5.0
    """Spreads above the median that make a spike; a spread is 1.48 x the median absolute deviation."""
    window: int = 100
    """Optimizer steps that are looked back on; reports begin when half of them are done."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        if not self.factor > 0:
            yield f"factor={self.factor}: must be above 0"
        if self.window < 4:
            yield f"window={self.window}: must be at least 4 steps"


@dataclass(kw_only=True)
class PreemptionConfig:
    """When a run is told to stop early, and what it does then besides saving."""

    signals: list[str] = field(default_factory=lambda: ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"])
    """Names of the signals that mean to stop; others keep what they did."""
    sentinel: str | None = None
    """A file that means to stop, on any rank; removed when that was done. Null looks for none."""
    max_time: str | None = None
    """``HH:MM:SS`` or ``DD:HH:MM:SS`` since the start of the process; that of the trainer."""
    requeue: bool = True
    """Inside SLURM: have the job started again after a signal or the sentinel file."""
    more_time_minutes: int | None = None
    """At SIGUSR1 and SIGUSR2: ask SLURM for so many minutes first, and stop if they are refused; null asks for none."""
    status: str | None = None
    """File that says how the run stands; null writes none."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        for name in self.signals:
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
                yield f"signals: {name!r} is no signal that can be handled; name them as SIGTERM"
        if self.more_time_minutes is not None and self.more_time_minutes < 1:
            yield f"more_time_minutes={self.more_time_minutes}: must be at least 1, or null"
