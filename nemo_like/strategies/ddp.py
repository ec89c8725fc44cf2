"""Data parallelism by replicas: one process, or many that average their gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nemo_like.core.model import Model
from nemo_like.strategies.strategy import StepStrategy


class _LossModule(nn.Module):
    """A model seen as the function that data parallelism wraps: micro-batch in, loss sum out."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro_batch: Any) -> Tensor:
        return self.model.compute_loss_sum(micro_batch)


class DDPStrategy(StepStrategy):
    """A whole copy of the model on every rank; gradients are averaged once an optimizer step.

    Args:
        options: Of :class:`StepStrategy`, and of torch's ``DistributedDataParallel``.
    """

    def __init__(self, **options: Any) -> None:
        # Buffers (tables of angles, masks) follow from the configuration; broadcasting them costs and changes nothing.
        super().__init__(
            **{"forward_sync_buffers": False, "gradient_as_bucket_view": True, **options}
        )
        self._wrapped: DistributedDataParallel | None = None

    def wrap_model(self) -> None:
        """Wraps the loss, not the LightningModule, so that each forward through the wrapper is one micro-batch."""
        self.model_to_device()
        if self.world_size > 1 and any(p.requires_grad for p in self.module.parameters()):
            self._wrapped = DistributedDataParallel(
                _LossModule(self.module),
                device_ids=self.determine_ddp_device_ids(),
                **self._ddp_kwargs,
            )

    def compute_training_loss_sum(self, micro_batch: Any) -> Tensor:
        """Runs through the wrapper, whose backward pass averages."""
        if self._wrapped is None:
            return super().compute_training_loss_sum(micro_batch)
        with self.activation_context():
            loss_sum: Tensor = self._wrapped(micro_batch)
        return loss_sum

    def without_sync(self) -> AbstractContextManager[Any]:
        """Keeps a backward pass from averaging."""
        return super().without_sync() if self._wrapped is None else self._wrapped.no_sync()
