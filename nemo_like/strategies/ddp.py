"""Data parallelism by replicas: one process, or many that average their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nemo_like.core.datamodule import DataModule, StepBatch
from nemo_like.core.model import Model
from nemo_like.strategies.resume import load_run, restore_model, restore_progress, save_run
from nemo_like.strategies.step import run_step


class _LossModule(nn.Module):
    """A model seen as the function that data parallelism wraps: micro-batch in, loss sum out."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro_batch: Any) -> Tensor:
        return self.model.compute_loss_sum(micro_batch)


class DDPStrategy(pl.strategies.DDPStrategy):
    """A whole copy of the model on every rank; gradients are averaged once an optimizer step.

    One process is a world of size 1: the same code without a process group.

    Args:
        micro_batch_size: Samples that are computed at once; a matter of memory, not of the result.
        options: Of Lightning's ``DDPStrategy`` and torch's ``DistributedDataParallel``.

    Raises:
        ValueError: ``micro_batch_size`` is below 1.
    """

    # Lightning must call the optimizer for every batch: a batch is an optimizer step.
    handles_gradient_accumulation = True

    def __init__(self, *, micro_batch_size: int = 1, **options: Any) -> None:
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size}: must be at least 1")
        self.micro_batch_size = micro_batch_size
        self._position = 0
        self._parameters: list[nn.Parameter] | None = None
        # Buffers (tables of angles, masks) follow from the configuration; broadcasting them costs and changes nothing.
        super().__init__(**{"broadcast_buffers": False, "gradient_as_bucket_view": True, **options})

    @property
    def data_parallel_rank(self) -> int:
        """Which share of each global batch this process reads."""
        return self.global_rank

    @property
    def data_parallel_size(self) -> int:
        """How many shares there are."""
        return self.world_size

    @property
    def _module(self) -> Model:
        assert isinstance(self.lightning_module, Model), "checked in connect()"
        return self.lightning_module

    def connect(self, model: pl.LightningModule) -> None:
        """Takes the model of the trainer.

        Raises:
            TypeError: It is no ``nemo_like.core.model.Model``, so it cannot say its loss as sum and count.
        """
        if not isinstance(model, Model):
            raise TypeError(
                f"{type(model).__name__} is no nemo_like.core.model.Model: this strategy needs compute_loss_sum() and "
                "count_targets(); use Lightning's own 'ddp' for other modules"
            )
        super().connect(model)

    def setup_distributed(self) -> None:
        """Starts the process group, if there is more than one process."""
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()
        else:
            self.set_world_ranks()

    def configure_ddp(self) -> None:
        """Wraps the loss, not the LightningModule, so that each forward through the wrapper is one micro-batch."""
        if self.world_size > 1:
            self.model = DistributedDataParallel(
                _LossModule(self._module),
                device_ids=self.determine_ddp_device_ids(),
                **self._ddp_kwargs,
            )

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Moves a batch to the device of this rank; on a CPU it is there already."""
        if (device or self.root_device).type == "cpu":
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: StepBatch, *args: Any, **kwargs: Any) -> Tensor:
        """Runs forward and backward over all micro-batches of an optimizer step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._position = batch.position
        model = self._module
        wrapped = self.model
        without_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
        compute_loss_sum: Callable[[Any], Tensor] = model.compute_loss_sum
        if isinstance(wrapped, DistributedDataParallel):
            without_sync, compute_loss_sum = wrapped.no_sync, wrapped
        return run_step(
            model,
            batch,
            precision=self.precision_plugin,
            compute_loss_sum=compute_loss_sum,
            without_sync=without_sync,
            rank=self.data_parallel_rank,
            size=self.data_parallel_size,
            device=self.root_device,
        )

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Steps, and moves the position of the data on with the weights."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        datamodule = getattr(self._module.trainer, "datamodule", None)
        if isinstance(datamodule, DataModule):
            datamodule.position = self._position
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Only tells the callbacks: :meth:`training_step` has done it."""
        return self.precision_plugin.post_backward(closure_loss, self._module)

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clips the gradients by their global norm and gives the norm before clipping; a scalar.

        Args:
            max_norm: None only measures.
        """
        # Walking the tree of modules takes longer than clipping a small one: the list is made once.
        if self._parameters is None:
            self._parameters = list(self._module.parameters())
        parameters = [parameter for parameter in self._parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in parameters if parameter.grad is not None]
        )
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on the bare model: without gradients there is nothing to average."""
        with self.precision_plugin.val_step_context():
            return self._module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on the bare model."""
        with self.precision_plugin.test_step_context():
            return self._module.test_step(*args, **kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint folder; called on all ranks."""
        save_run(checkpoint, Path(filepath), module=self._module, optimizer=self.optimizers[0])

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Opens a checkpoint folder; tensors are read by the two methods below."""
        return load_run(Path(checkpoint_path))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fills the weights in place."""
        restore_model(checkpoint, self._module)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Fills the optimizer and sets step and learning rate."""
        restore_progress(checkpoint, self._module, self.optimizers[0])
