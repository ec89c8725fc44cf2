"""From the figures that a model leaves behind to the loggers."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from nemo_like.callbacks.throughput import StepClock
from nemo_like.tracking.logger import JsonlLogger


class MetricsWriter(pl.Callback):
    """Sends ``model.step_metrics`` every n steps and ``model.val_metrics`` after validations to all loggers.

    Steps are counted from 1: what stands at step 20 was computed by the twentieth optimizer step. Figures that the
    model keeps as tensors are read only when they are sent. Adds ``perf/<unit>_per_s`` and ``perf/step_s``, means over
    the last steps without validation and saving (see :class:`~nemo_like.callbacks.throughput.StepClock`). The last step
    is always sent.

    Args:
        every_n_steps: None takes ``trainer.log_every_n_steps``.
        window: Steps over which the throughput is averaged.

    Raises:
        ValueError: A count is below 1.
    """

    def __init__(self, *, every_n_steps: int | None = None, window: int = 50) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("window", window)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.every_n_steps = every_n_steps
        self._clock = StepClock(window)
        self._interval = 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes back what was logged after the step that the run resumes from."""
        # Lightning sets it without declaring it; its 0 (never) is no interval here.
        self._interval = self.every_n_steps or getattr(trainer, "log_every_n_steps", 0) or 1
        self._clock.interrupt()
        for logger in trainer.loggers:
            if isinstance(logger, JsonlLogger):
                logger.drop_after(trainer.global_step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock."""
        self._clock.start_step(time.perf_counter())

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Sends the figures of a step if it is its turn."""
        metrics: dict[str, Any] = pl_module.step_metrics  # type: ignore[assignment]
        self._clock.end_step(time.perf_counter(), metrics.get("train/units", 0))
        step = trainer.global_step
        if step % self._interval and step != trainer.max_steps:
            return
        unit = getattr(pl_module, "unit", "targets")
        for name, value in (
            (f"perf/{unit}_per_s", self._clock.compute_units_per_s()),
            ("perf/step_s", self._clock.compute_step_s()),
        ):
            if value is not None:
                metrics[name] = value
        _send(trainer, metrics, step)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        self._clock.interrupt()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Stops the clock."""
        self._clock.interrupt()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sends the figures of a validation that belongs to a training run."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            metrics: dict[str, Any] = getattr(pl_module, "val_metrics", {})
            _send(trainer, metrics, trainer.global_step)


def _send(trainer: pl.Trainer, metrics: dict[str, Any], step: int) -> None:
    if not metrics or not trainer.is_global_zero:
        return
    values = {name: float(value) for name, value in metrics.items()}
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)
