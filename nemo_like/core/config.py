"""The configuration of a training run: what its keys mean, their defaults, and what makes sense.

A run file under ``conf`` holds the differences. A *component* is a mapping with ``_target_:
package.Class``; its keys are described by ``ClassConfig`` in the module ``config`` of that package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_like.core.units import parse_duration


class Component(dict[str, Any]):
    """A mapping with ``_target_``: the class to build, and its keyword arguments."""


@dataclass(kw_only=True)
class TrainerConfig:
    """How long, on what, how precisely; no science besides ``max_steps`` and the clipping."""

    max_steps: int
    """Optimizer steps of the whole run, counted from its beginning, wherever it is resumed."""
    max_time: str | None = None
    """Time after which a run saves and stops with exit code 75, counted from the start of its process: ``HH:MM:SS`` or
    ``DD:HH:MM:SS``; null has no limit."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """``auto`` takes the GPUs where there are any."""
    devices: int | Literal["auto"] = "auto"
    """Processes per node; ``auto`` is one per GPU, or one on a CPU."""
    num_nodes: int = 1
    """Machines."""
    precision: Literal["fp32", "bf16-mixed", "fp16-mixed", "fp8-mixed"] = "fp32"
    """Of the forward and backward pass; weights and optimizer state stay in fp32.
    ``fp16-mixed`` scales the loss; ``fp8-mixed`` is ``bf16-mixed`` with the linear layers of the
    blocks in FP8, on GPUs that have it."""
    gradient_clip_norm: float | None = 1.0
    """Largest norm of the gradient over all parameters; null clips nothing."""
    log_every_n_steps: int = 10
    """Optimizer steps between two records of the training metrics."""
    val_every_n_steps: int | None = None
    """Optimizer steps between two validations; null never validates while it trains."""
    val_batches: int | None = None
    """Batches per validation; null takes all."""
    val_weights: Literal["model", "ema"] = "model"
    """What is validated: the weights, or their moving average (``optim.ema_decay``)."""
    max_nonfinite_steps: int | None = 10
    """Steps in a row with a loss or gradient that is not finite after which the run stops, saved as it was before
    them; each of them changes nothing. null never stops."""
    deterministic: bool = False
    """Same bits every time on the same hardware; slower on a GPU."""
    threads: int | None = None
    """CPU threads of one operation; null: all cores, or ``OMP_NUM_THREADS``."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        counts = ["max_steps", "devices", "num_nodes", "log_every_n_steps", "threads"]
        counts += ["val_every_n_steps", "val_batches", "max_nonfinite_steps"]
        for name in counts:
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                yield f"{name}={value}: must be at least 1"
        if self.max_time is not None:
            try:
                parse_duration(self.max_time)
            except ValueError as error:
                yield f"max_time={error}"
        if self.gradient_clip_norm is not None and not self.gradient_clip_norm > 0:
            hint = "must be above 0, or null to clip nothing"
            yield f"gradient_clip_norm={self.gradient_clip_norm}: {hint}"


@dataclass(kw_only=True)
class CheckpointConfig:
    """When a run is saved and which saves stay; the last step is always saved."""

    every_n_steps: int | None = None
    """Optimizer steps between two checkpoints; null saves after the last step only."""
    every_minutes: float | None = None
    """Minutes between two checkpoints, besides; null saves by steps alone."""
    asynchronous: bool = True
    """Write behind the next steps, from a copy in the memory of the host; else a step that saves lasts until all is on
    the disk."""
    keep_last: int = 2
    """Newest checkpoints that stay."""
    keep_best: int = 1
    """Checkpoints with the best ``monitor`` that stay besides."""
    keep_every_hours: float | None = None
    """Hours between two checkpoints that stay for good, by the clock; null keeps none."""
    verify: bool = True
    """Compare the SHA-256 of every file of a checkpoint before a run goes on from it; about a second a gigabyte."""
    monitor: str = "val/loss"
    """Metric that says which is best; one that is logged by a validation."""
    mode: Literal["min", "max"] = "min"
    """Whether a small or a large ``monitor`` is good."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        if self.every_n_steps is not None and self.every_n_steps < 1:
            hint = "must be at least 1, or null to save after the last step"
            yield f"every_n_steps={self.every_n_steps}: {hint}"
        if self.keep_last < 1:
            hint = "must be at least 1, or a run could not be resumed"
            yield f"keep_last={self.keep_last}: {hint}"
        if self.keep_best < 0:
            yield f"keep_best={self.keep_best}: must be at least 0"
        for name in ("every_minutes", "keep_every_hours"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield f"{name}={value}: must be above 0, or null"


@dataclass(kw_only=True)
class RunConfig:
    """Everything a training run is made of."""

    name: str
    """What the run is called; the name of its folder."""
    seed: int = 0
    """Seed of weights, dropout and sample order."""
    run_dir: str = "runs/${name}"
    """Folder that receives the configuration, metrics, checkpoints and the report."""
    resume: Literal["auto", "never"] = "auto"
    """``auto`` continues what lies in ``run_dir``; ``never`` starts anew in a folder beside it."""
    model: Component
    """The model: network, loss and metrics."""
    data: Component
    """The data module."""
    optim: Component
    """Makes the optimizer."""
    schedule: Component
    """Factor on the learning rate at each optimizer step."""
    strategy: Component
    """How a step is spread over micro-batches and devices."""
    trainer: TrainerConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: dict[str, Component | None] = field(default_factory=dict)
    """By a name of your choice; null switches one off that a lower layer brought."""
    loggers: dict[str, Component | None] = field(default_factory=dict)
    """Where metrics go, by a name of your choice; null switches one off."""
    allow_targets: list[str] = field(default_factory=list)
    """Packages of your own whose classes the configuration may name: ``[my_pkg.]``."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        if not self.name or "/" in self.name or self.name.startswith("."):
            hint = "must be usable as the name of a folder: not empty, no '/', no '.' in front"
            yield f"name={self.name!r}: {hint}"
        if not 0 <= self.seed < 2**32:
            yield f"seed={self.seed}: must be between 0 and {2**32 - 1}"
        if self.trainer.val_weights == "ema" and self.optim.get("ema_decay") is None:
            hint = "keeps no average of the weights; set optim.ema_decay=0.999"
            yield f"trainer.val_weights=ema: {self.optim['_target_']} {hint}"
