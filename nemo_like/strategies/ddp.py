"""Data parallelism by replicas: one process, or many that average their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nemo_like.core.datamodule import StepBatch
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

    tries_alone = True

    def __init__(self, **options: Any) -> None:
        # Buffers (tables of angles, masks) follow from the configuration; broadcasting them costs and changes nothing.
        super().__init__(
            **{"forward_sync_buffers": False, "gradient_as_bucket_view": True, **options}
        )
        self._wrapped: DistributedDataParallel | None = None
        self._must_settle = False

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

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Fills the optimizer; a run that goes on also has to add gradients up in the order that it had."""
        super().load_optimizer_state_dict(checkpoint)
        self._must_settle = self._wrapped is not None

    def run_micro_batches(self, batch: StepBatch) -> Tensor:
        """Runs forward and backward over all micro-batches."""
        if self._must_settle:
            self._settle_buckets(batch.micro_batches[0])
        return super().run_micro_batches(batch)

    def _settle_buckets(self, micro_batch: Any) -> None:
        """Runs a backward pass for nothing, behind which torch lays out its buckets as after the first step of a run.

        With more than two ranks the order in which a gradient is added up depends on its place in a bucket, so without
        this the first step of a run that goes on would differ in the last bit.
        """
        self._must_settle = False
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        devices = [] if self.root_device.type == "cpu" else [self.root_device]
        with torch.random.fork_rng(devices):
            with self.precision_plugin.train_step_context():
                loss_sum = self.compute_training_loss_sum(micro_batch)
            (loss_sum * 0).backward()
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[name])
        self.zero_grad()
