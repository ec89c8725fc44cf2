"""Configuration of optimizers and schedules; it owns the rules for their values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from nemo_like.core.errors import ConfigError

LrAdjustment = Literal["original", "match_rms_adamw", "spectral_unclamped"]


class Checked(Protocol):
    """A configuration that knows its faults."""

    def check(self) -> Iterator[str]:
        """One line for each value that cannot be."""
        ...


def refuse_faults(config: Checked) -> None:
    """Raises all faults of a configuration at once, so that a constructor has the rules of its schema.

    Raises:
        ConfigError: There is at least one.
    """
    if faults := list(config.check()):
        raise ConfigError(faults)


def _check_at_least_zero(**values: float) -> Iterator[str]:
    for name, value in values.items():
        if not (value >= 0 and math.isfinite(value)):
            yield f"{name}={value}: must be a finite number, at least 0"


def _check_above_zero(**values: float) -> Iterator[str]:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            yield f"{name}={value}: must be a finite number above 0"


def _check_betas(betas: Sequence[float]) -> Iterator[str]:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"betas={list(betas)}: must be two numbers, each at least 0 and below 1, such as [0.9, 0.95]"


@dataclass(kw_only=True)
class AdamWConfig:
    """AdamW with weight decay on matrices only."""

    lr: float
    """Peak learning rate; the schedule multiplies it."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """How much of the running mean of the gradient, and of its square, is kept each step."""
    eps: float = 1e-8
    """Added to the root of the running mean square."""
    weight_decay: float = 0.1
    """Decoupled decay, times the learning rate each step; not on norms, biases and embeddings."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights, of which each step leaves this share (0.999 is usual;
    less at first); null keeps none. It is 4 bytes a parameter, saved with the optimizer."""

    def check(self) -> Iterator[str]:
        """Faults of the values."""
        yield from _check_at_least_zero(lr=self.lr, weight_decay=self.weight_decay)
        yield from _check_above_zero(eps=self.eps)
        yield from _check_betas(self.betas)
        yield from _check_ema_decay(self.ema_decay)


@dataclass(kw_only=True)
class AdamW8bitConfig(AdamWConfig):
    """AdamW that keeps its two running means in eight bits: two bytes of state a parameter instead of eight."""

    NOT_CUT: ClassVar[str] = (
        "its state cannot be cut over ranks; take optim=adamw, whose state strategies cut, or strategy=ddp"
    )

    def check_run(self, run: Any) -> Iterator[str]:
        """What does not fit the rest of a run.

        Args:
            run: The ``RunConfig``.
        """
        strategy = str(run.strategy["_target_"]).rpartition(".")[2]
        if strategy in ("FSDPStrategy", "DeepSpeedStrategy", "MegatronStrategy"):
            yield f"strategy._target_={strategy}: with optim=adamw_8bit {self.NOT_CUT}"


@dataclass(kw_only=True)
class MuonConfig:
    """Muon for the matrices inside the network, AdamW for embeddings, output head, norms and biases."""

    lr: float = 0.02
    """Peak learning rate of Muon; the schedule multiplies it."""
    momentum: float = 0.95
    """How much of the running mean of the gradient is kept each step."""
    nesterov: bool = True
    """Look ahead by one more step of momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations that make an update near orthogonal."""
    adjust_lr_fn: LrAdjustment = "original"
    """How the step depends on the shape of a matrix (names as in ``torch.optim.Muon``): ``original`` times
    sqrt(max(1, rows / columns)); ``match_rms_adamw`` times 0.2 sqrt(max(rows, columns)), for learning rates that
    were tuned for AdamW; ``spectral_unclamped`` times sqrt(rows / columns)."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices, of Muon's and of AdamW's, times the learning rate of each, every step."""
    adamw_lr: float = 3e-3
    """Peak learning rate of AdamW; the schedule multiplies it."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Of AdamW: how much of the running mean of the gradient, and of its square, is kept each step."""
    eps: float = 1e-8
    """Of AdamW: added to the root of the running mean square."""
    adamw_parameters: list[str] = field(default_factory=list)
    """Globs of names of further parameters that AdamW shall have, such as ``*.classifier.weight``."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights, of which each step leaves this share (0.999 is usual;
    less at first); null keeps none. It is 4 bytes a parameter, saved with the optimizer."""

    def check(self) -> Iterator[str]:
        """Faults of the values."""
        yield from _check_at_least_zero(
            lr=self.lr, weight_decay=self.weight_decay, adamw_lr=self.adamw_lr
        )
        yield from _check_above_zero(eps=self.eps)
        yield from _check_betas(self.betas)
        if not 0 <= self.momentum < 1:
            yield f"momentum={self.momentum}: must be at least 0 and below 1"
        if not 1 <= self.ns_steps < 100:
            yield f"ns_steps={self.ns_steps}: must be at least 1 and below 100; 5 is usual"
        yield from _check_ema_decay(self.ema_decay)


def _check_ema_decay(decay: float | None) -> Iterator[str]:
    if decay is not None and not 0 < decay < 1:
        yield f"ema_decay={decay}: must be above 0 and below 1, such as 0.999; null keeps no average"


def _check_schedule(*, total_steps: int, warmup_steps: int, min_ratio: float) -> Iterator[str]:
    if total_steps < 1:
        yield f"total_steps={total_steps}: must be at least 1, usually ${{trainer.max_steps}}"
    if warmup_steps < 0:
        yield f"warmup_steps={warmup_steps}: must be at least 0"
    if not 0 <= min_ratio <= 1:
        yield f"min_ratio={min_ratio}: is a share of the peak learning rate, 0 to 1"


@dataclass(kw_only=True)
class CosineScheduleConfig:
    """Linear warm-up, then half a cosine down to a share of the peak."""

    total_steps: int
    """Optimizer steps after which the lowest learning rate is reached, usually ``${trainer.max_steps}``."""
    warmup_steps: int = 0
    """Steps below the peak at the start; 0 starts at the peak."""
    min_ratio: float = 0.1
    """Learning rate at the end, as a share of the peak."""

    def check(self) -> Iterator[str]:
        """Faults of the values."""
        yield from _check_schedule(
            total_steps=self.total_steps, warmup_steps=self.warmup_steps, min_ratio=self.min_ratio
        )


@dataclass(kw_only=True)
class LinearScheduleConfig:
    """Linear warm-up, then a straight line down to a share of the peak."""

    total_steps: int
    """Optimizer steps after which the lowest learning rate is reached, usually ``${trainer.max_steps}``."""
    warmup_steps: int = 0
    """Steps below the peak at the start; 0 starts at the peak."""
    min_ratio: float = 0.0
    """Learning rate at the end, as a share of the peak."""

    def check(self) -> Iterator[str]:
        """Faults of the values."""
        yield from _check_schedule(
            total_steps=self.total_steps, warmup_steps=self.warmup_steps, min_ratio=self.min_ratio
        )


@dataclass(kw_only=True)
class ConstantScheduleConfig:
    """Linear warm-up, then the peak for ever."""

    warmup_steps: int = 0
    """Steps below the peak at the start; 0 starts at the peak."""

    def check(self) -> Iterator[str]:
        """Faults of the values."""
        yield from _check_schedule(total_steps=1, warmup_steps=self.warmup_steps, min_ratio=1.0)
