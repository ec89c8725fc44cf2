"""The loss scale of FP16: DeepSpeed's dynamic scaler, kept in the state of Lightning's precision plugin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_like.strategies.nonfinite import LOWEST_SCALE

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Finite steps after which the scale is doubled; both are torch's own values."""


class StepLossScaler:
    """DeepSpeed's dynamic loss scaler, as the attribute ``loss_scaler`` of one of its optimizers.

    DeepSpeed changes the scale in the middle of a step, before the gradients are unscaled, which halves them in a step
    that doubles the scale. Here it changes between two steps.

    Args:
        scaler: Of the precision plugin. It scales nothing here, but is what checkpoints save and restore.
    """

    dynamic = True

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        self._saved = scaler
        self._scaler: Any = DynamicLossScaler(
            init_scale=INITIAL_SCALE,
            scale_window=GROWTH_INTERVAL,
            min_scale=LOWEST_SCALE,
            delayed_shift=1,
            consecutive_hysteresis=False,
        )
        self._overflow = False

    @property
    def cur_scale(self) -> float:
        """What the loss is multiplied by."""
        return float(self._scaler.cur_scale)

    loss_scale = cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss, scaled."""
        return loss * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Notes whether the gradients of this step are finite; DeepSpeed calls it."""
        self._overflow = overflow

    def load(self) -> None:
        """Takes scale and count of finite steps from the plugin, before a step."""
        state = self._saved.state_dict()
        self._scaler.cur_scale = state["scale"]
        self._scaler.cur_iter, self._scaler.last_overflow_iter = state["_growth_tracker"], -1

    def store(self) -> None:
        """Changes the scale after a step, and gives the plugin what it saves."""
        self._scaler.update_scale(self._overflow)
        finite_steps = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
        self._saved.load_state_dict(
            {
                **self._saved.state_dict(),
                "scale": self.cur_scale,
                "_growth_tracker": finite_steps,
            }
        )
