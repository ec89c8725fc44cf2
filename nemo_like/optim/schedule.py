"""Learning-rate schedules: optimizer step (0 is the first) -> factor on every peak learning rate.

Warm-up is a straight line that reaches the peak at step ``warmup_steps``: step i before it has the factor
(i + 1) / (warmup_steps + 1), so that the first step already moves the weights. What follows depends on the progress
(step - warmup_steps) / (total_steps - warmup_steps), which reaches 1 at ``total_steps`` and stays there.
"""

from __future__ import annotations

import logging
import math

from nemo_like.optim.config import (
    ConstantScheduleConfig,
    CosineScheduleConfig,
    LinearScheduleConfig,
    refuse_faults,
)

logger = logging.getLogger(__name__)


def _compute_warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _compute_progress(step: int, *, total_steps: int, warmup_steps: int) -> float:
    return min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))


def _warn_if_cut(*, total_steps: int, warmup_steps: int) -> None:
    # No error: a trial of a few steps with the warm-up of the real run is a common thing to do.
    if warmup_steps >= total_steps:
        logger.warning(
            "warmup_steps=%d is not below total_steps=%d: the peak learning rate is never reached",
            warmup_steps,
            total_steps,
        )


class ConstantSchedule:
    """Linear warm-up, then the peak for ever.

    Args:
        warmup_steps: Steps below the peak at the start.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(self, *, warmup_steps: int = 0) -> None:
        refuse_faults(ConstantScheduleConfig(warmup_steps=warmup_steps))
        self.warmup_steps = warmup_steps

    def __call__(self, step: int) -> float:
        """Factor of an optimizer step, 0 being the first."""
        return _compute_warmup(step, self.warmup_steps)


class CosineSchedule:
    """Linear warm-up, then half a cosine down to ``min_ratio`` of the peak (Loshchilov and Hutter 2017, eq. 5).

    Args:
        total_steps: Steps after which the lowest learning rate is reached.
        warmup_steps: Steps below the peak at the start.
        min_ratio: Learning rate at the end, as a share of the peak.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(self, *, total_steps: int, warmup_steps: int = 0, min_ratio: float = 0.1) -> None:
        refuse_faults(
            CosineScheduleConfig(
                total_steps=total_steps, warmup_steps=warmup_steps, min_ratio=min_ratio
            )
        )
        _warn_if_cut(total_steps=total_steps, warmup_steps=warmup_steps)
        self.total_steps, self.warmup_steps, self.min_ratio = total_steps, warmup_steps, min_ratio

    def __call__(self, step: int) -> float:
        """Factor of an optimizer step, 0 being the first."""
        if step < self.warmup_steps:
            return _compute_warmup(step, self.warmup_steps)
        progress = _compute_progress(
            step, total_steps=self.total_steps, warmup_steps=self.warmup_steps
        )
        height = (1 + math.cos(math.pi * progress)) / 2
        return self.min_ratio + (1 - self.min_ratio) * height


class LinearSchedule:
    """Linear warm-up, then a straight line down to ``min_ratio`` of the peak.

    Args:
        total_steps: Steps after which the lowest learning rate is reached.
        warmup_steps: Steps below the peak at the start.
        min_ratio: Learning rate at the end, as a share of the peak.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(self, *, total_steps: int, warmup_steps: int = 0, min_ratio: float = 0.0) -> None:
        refuse_faults(
            LinearScheduleConfig(
                total_steps=total_steps, warmup_steps=warmup_steps, min_ratio=min_ratio
            )
        )
        _warn_if_cut(total_steps=total_steps, warmup_steps=warmup_steps)
        self.total_steps, self.warmup_steps, self.min_ratio = total_steps, warmup_steps, min_ratio

    def __call__(self, step: int) -> float:
        """Factor of an optimizer step, 0 being the first."""
        if step < self.warmup_steps:
            return _compute_warmup(step, self.warmup_steps)
        progress = _compute_progress(
            step, total_steps=self.total_steps, warmup_steps=self.warmup_steps
        )
        return self.min_ratio + (1 - self.min_ratio) * (1 - progress)
