"""Loss spikes: a training loss far above what it has lately been."""

from __future__ import annotations

import bisect
import logging
import math
from collections import deque
from typing import Any

import lightning.pytorch as pl

from nemo_like.core.model import Model
from nemo_like.core.nonfinite import describe_ids

logger = logging.getLogger(__name__)

_TO_DEVIATION = 1.4826
"""From a median absolute deviation to the standard deviation of a normal distribution: 1 / 0.6745."""

_LEAST_SPREAD = 0.001
"""Of the median: a loss that hardly moves has no spikes in its last digits."""


class SpikeDetector:
    """Tells a spike from the noise of a loss: above median + ``factor`` x spread of the last values.

    The spread is the median absolute deviation from the median, scaled to a standard deviation; like the median it does
    not follow a few values that are far off. A spike lasts until the loss is below that bound again, and is one.

    Args:
        factor: Spreads above the median.
        window: Values that are looked back on.
    """

    def __init__(self, *, factor: float, window: int) -> None:
        self.factor = factor
        self._values: deque[float] = deque(maxlen=window)
        self._sorted: list[float] = []
        self._is_in_spike = False

    def note(self, value: float) -> float | None:
        """Takes the loss of a step.

        Args:
            value: What is not finite is passed over.

        Returns:
            The median before it, if a spike begins; else None.
        """
        if not math.isfinite(value):
            return None
        usual = self._find_usual(value)
        has_begun = usual is not None and not self._is_in_spike
        self._is_in_spike = usual is not None
        self._add(value)
        return usual if has_begun else None

    def _find_usual(self, value: float) -> float | None:
        """The median, if the value is a spike above it."""
        window = self._values.maxlen or 0
        if len(self._values) < max(2, window // 2):
            return None
        median = self._sorted[len(self._sorted) // 2]
        # Most values end here, before anything is sorted.
        if value <= median * (1 + _LEAST_SPREAD * self.factor):
            return None
        deviations = sorted(abs(it - median) for it in self._sorted)
        spread = _TO_DEVIATION * deviations[len(deviations) // 2]
        bound = median + self.factor * max(spread, _LEAST_SPREAD * abs(median))
        return median if value > bound else None

    def _add(self, value: float) -> None:
        if len(self._values) == self._values.maxlen:
            del self._sorted[bisect.bisect_left(self._sorted, self._values[0])]
        self._values.append(value)
        bisect.insort(self._sorted, value)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"values": list(self._values), "is_in_spike": self._is_in_spike}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint; of a longer window the newest values are kept."""
        self._values = deque(state["values"], maxlen=self._values.maxlen)
        self._sorted = sorted(self._values)
        self._is_in_spike = state["is_in_spike"]


class LossSpikes(pl.Callback):
    """Reports loss spikes: a warning with step and samples, and ``train/loss_spike`` in the metrics.

    It changes nothing. See :class:`SpikeDetector` for what a spike is.

    Args:
        factor: Spreads above the usual loss that make a spike.
        window: Steps that are looked back on; reports begin when half of them are done.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(self, *, factor: float = 5.0, window: int = 100) -> None:
        if not factor > 0:
            raise ValueError(f"factor={factor}: must be above 0")
        if window < 4:
            raise ValueError(f"window={window}: must be at least 4 steps")
        self._detector = SpikeDetector(factor=factor, window=window)

    def state_dict(self) -> dict[str, Any]:
        """The losses that are looked back on."""
        return self._detector.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes them from a checkpoint."""
        self._detector.load_state_dict(state_dict)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Judges the loss of a step."""
        assert isinstance(pl_module, Model), "checked by the strategy"
        loss = float(pl_module.step_metrics["train/loss"])
        usual = self._detector.note(loss)
        if usual is None:
            return
        step = trainer.global_step
        logger.warning(
            "loss spike at step %d: %.4f, usually %.4f; data position %d, samples of rank 0: %s",
            step,
            loss,
            usual,
            batch.position,
            describe_ids(batch.sample_ids),
        )
        if trainer.is_global_zero:
            for each in trainer.loggers:
                each.log_metrics({"train/loss_spike": loss}, step=step)
