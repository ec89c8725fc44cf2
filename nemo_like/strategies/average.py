"""The moving average of the weights in a strategy: moved after each step, validated in the place of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nemo_like.core.errors import ConfigError
from nemo_like.core.model import Model
from nemo_like.optim.ema import exchange_ema, forget_ema, update_ema

if TYPE_CHECKING:
    from nemo_like.strategies.strategy import StepStrategy


class WeightAverage:
    """The average that ``optim.ema_decay`` asks for; without it all methods do nothing.

    Args:
        strategy: Says what the optimizer updates on this rank.
    """

    def __init__(self, strategy: StepStrategy) -> None:
        self.strategy = strategy
        self.is_in_place = False
        """Whether the average stands where the weights are."""

    def check(self) -> None:
        """Refuses to validate an average that is not there, or lies elsewhere than the weights.

        Raises:
            ConfigError: With the remedy.
        """
        if self.strategy.module.val_weights != "ema":
            return
        if _read_decay(self.strategy.module) is None:
            raise ConfigError(
                [
                    "trainer.val_weights=ema: there is no average of the weights; set optim.ema_decay=0.999"
                ]
            )
        if not self.strategy.exchanges_weights:
            raise ConfigError(
                [
                    f"trainer.val_weights=ema: {type(self.strategy).__name__} keeps the average in pieces; take "
                    "val_weights=model and evaluate checkpoints with weights=ema, or strategy=fsdp"
                ]
            )

    def update(self) -> None:
        """Moves it, after a step that changed the weights."""
        decay = _read_decay(self.strategy.module)
        if decay is not None:
            step = self.strategy.module.trainer.global_step
            tensors = self.strategy.trained_tensors()
            update_ema(self.strategy.optimizers[0], tensors, decay=decay, step=step)

    def forget_unused(self) -> None:
        """Drops what a checkpoint brought into a run that keeps no average."""
        if _read_decay(self.strategy.module) is None:
            forget_ema(self.strategy.optimizers[0])

    def start_validation(self) -> None:
        """Takes the place of the weights, where it is what the run validates."""
        model = self.strategy.module
        if model.val_weights == "ema" and model.trainer.state.fn == "fit":
            self._exchange()

    def end_validation(self) -> None:
        """Puts the weights back, bit for bit; also after a validation that was interrupted."""
        if self.is_in_place:
            self._exchange()

    @contextmanager
    def out_of_place(self) -> Iterator[None]:
        """A context in which the weights are those that are trained, also in the middle of a validation."""
        was_in_place = self.is_in_place
        self.end_validation()
        try:
            yield
        finally:
            if was_in_place:
                self._exchange()

    def _exchange(self) -> None:
        exchange_ema(self.strategy.optimizers[0], self.strategy.trained_tensors())
        self.is_in_place = not self.is_in_place
        self.strategy.publish_weights()


def _read_decay(model: Model) -> float | None:
    decay: float | None = getattr(model.optim, "ema_decay", None)
    return decay
