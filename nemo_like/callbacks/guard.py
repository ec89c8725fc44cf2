"""The end of a run that only has steps left whose loss or gradient is not finite."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl

from nemo_like.callbacks.checkpointing import Checkpointing
from nemo_like.core.errors import NonfiniteError
from nemo_like.core.model import Model

logger = logging.getLogger(__name__)


class NonfiniteGuard(pl.Callback):
    """Stops a run, saved, after too many steps in a row that changed nothing.

    A step whose loss or gradient is not finite changes nothing under all strategies of ``nemo_like``, with or without
    this callback, which judges them at step boundaries. The weights that it has saved are those before the first of
    these steps; the position in the data lies behind them, so that the same command goes on with other samples.

    Args:
        max_nonfinite_steps: How many in a row; None never stops.

    Raises:
        ValueError: It is below 1.
    """

    def __init__(self, *, max_nonfinite_steps: int | None = 10) -> None:
        if max_nonfinite_steps is not None and max_nonfinite_steps < 1:
            raise ValueError(
                f"max_nonfinite_steps={max_nonfinite_steps}: must be at least 1, or None to never stop"
            )
        self.max_nonfinite_steps = max_nonfinite_steps

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Looks at the count, which is the same on all ranks.

        Raises:
            NonfiniteError: It is reached.
        """
        assert isinstance(pl_module, Model), "checked by the strategy"
        steps, most = pl_module.nonfinite, self.max_nonfinite_steps
        if most is None or steps.in_a_row < most:
            return
        first, last = steps.first, steps.last
        # The next start has as many tries again.
        steps.in_a_row = 0
        saved = _save(trainer)
        where = (
            f"Saved as {saved}"
            if saved
            else "Nothing was saved, because this run has no Checkpointing"
        )
        raise NonfiniteError(
            f"stopped after step {last}: the last {most} steps in a row (since step {first}) had a loss or gradient "
            f"that is not finite, and changed nothing. {where}, with the weights of step {first - 1}. The same command "
            "goes on behind the data of these steps; the log names their samples. If it happens again: a lower "
            "optim.lr, a longer schedule.warmup_steps, a smaller trainer.gradient_clip_norm, or trainer.precision="
            "bf16-mixed or fp32. trainer.max_nonfinite_steps=null never stops."
        )


def _save(trainer: pl.Trainer) -> str | None:
    """Saves through the run's own checkpointing, on all ranks, and waits until it is whole."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Checkpointing):
            path = callback.save(trainer)
            callback.flush()
            return str(path)
    return None
