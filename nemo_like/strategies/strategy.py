"""What all our strategies share: whole optimizer steps, checkpoint folders, and the questions of model and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_like.core import notice
from nemo_like.core.agreement import Agreement, Flag
from nemo_like.core.checkpoint import Checkpoint
from nemo_like.core.checkpoint_writer import CheckpointWriter
from nemo_like.core.datamodule import DataModule, StepBatch
from nemo_like.core.launch import outlast_gloo
from nemo_like.core.model import Model
from nemo_like.core.nonfinite import read_together
from nemo_like.strategies.activation import checkpoint_activations, offload_activations
from nemo_like.strategies.average import WeightAverage
from nemo_like.strategies.config import NOT_ALONE
from nemo_like.strategies.micro_batch import explain_out_of_memory, find_micro_batch_size
from nemo_like.strategies.nonfinite import judge_step, report_left_out, update_scale
from nemo_like.strategies.resume import (
    checkpoint_of,
    collect_optimizer_tensors,
    load_run,
    restore_optimizer,
    restore_progress,
    save_run,
)
from nemo_like.strategies.step import run_step

_HOOKS = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")


class StepStrategy(pl.strategies.DDPStrategy):
    """A process group in which each batch is an optimizer step; one process is a group of size 1.

    Lightning's launchers, ranks and collectives are used as they are. The step is Lightning's *manual optimization*:
    :meth:`training_step` clears the gradients, runs all micro-batches, clips, and steps optimizer and schedule. A
    subclass says how the model is spread (:meth:`wrap_model`), and what follows from it.

    Args:
        micro_batch_size: Samples that are computed at once; a matter of memory, not of the result. ``auto`` tries what
            fits when training starts.
        activation_checkpointing: What the backward pass computes again instead of keeping it: ``none``, ``selective``
            (all but the results of matrix products) or ``full`` (all but the inputs of the blocks).
        activation_offload: Keep what the backward pass needs in the memory of the host.
        timeout_s: How long a collective waits for the other ranks.
        options: Of Lightning's ``DDPStrategy``.

    Raises:
        ValueError: ``micro_batch_size`` is below 1, or ``auto`` where no rank can try alone.
    """

    handles_gradient_accumulation = True
    spreads_weights = False
    """Whether no rank holds all weights, so that :meth:`gather_weights` has to communicate."""

    tries_alone = False
    """Whether the passes of a micro-batch need no other rank, so that ``micro_batch_size=auto`` can try sizes."""

    fills_weights = False
    """Whether :meth:`wrap_model` takes a model without weights (on the meta device), drawing each rank's part."""

    exchanges_weights = True
    """Whether validation can see the moving average of the weights: they lie where the optimizer has them."""

    def __init__(
        self,
        *,
        micro_batch_size: int | Literal["auto"] = 1,
        activation_checkpointing: Literal["none", "selective", "full"] = "none",
        activation_offload: bool = False,
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        self.finds_micro_batch = micro_batch_size == "auto"
        if micro_batch_size == "auto":
            if not self.tries_alone:
                raise ValueError(f"micro_batch_size=auto: {NOT_ALONE}")
            micro_batch_size = 1
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size}: must be at least 1, or 'auto'")
        self.micro_batch_size = micro_batch_size
        self.activation_checkpointing = activation_checkpointing
        self.activation_offload = activation_offload
        self._parameters: list[nn.Parameter] | None = None
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        self._is_left_out = False
        self.agreement = Agreement()
        self.checkpoint_writer = CheckpointWriter(
            on_failure=lambda: self.agreement.raise_flag(Flag.FAILED)
        )
        self.verify_checkpoints = True
        self.average = WeightAverage(self)
        super().__init__(timeout=timedelta(seconds=timeout_s), **options)

    # What the data module asks (core.datamodule.DataParallel).

    @property
    def data_parallel_rank(self) -> int:
        """Which share of each global batch this process reads."""
        return self.global_rank

    @property
    def data_parallel_size(self) -> int:
        """How many shares there are."""
        return self.world_size

    # Setting up.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are read after :meth:`wrap_model`: a model without weights has no room for them before."""
        return self.fills_weights

    @property
    def module(self) -> Model:
        """The model, not wrapped."""
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

    def setup(self, trainer: pl.Trainer) -> None:
        """Spreads the model, then makes the optimizer of what lies on this rank."""
        assert self.accelerator is not None
        if self.world_size > 1:
            outlast_gloo()
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.module)
        checkpoint_activations(self.module, self.activation_checkpointing)
        self.wrap_model()
        if trainer.training:
            self.agreement = Agreement.among_ranks(self._timeout)
            self.setup_optimizers(trainer)
            self.average.check()
            if self.root_device.type == "cpu":
                _forget_gpus(self.optimizers)
        self.setup_precision_plugin()
        self._hooks = _find_hooks(trainer, self.module)
        if trainer.training and self.finds_micro_batch:
            self.micro_batch_size = find_micro_batch_size(self, trainer)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for the other ranks; takes signals back first, as Lightning has just put its handlers over ours."""
        notice.reclaim()
        super().barrier(*args, **kwargs)

    def teardown(self) -> None:
        """Waits for the last agreement and the last save, then gives back what the run held."""
        self.checkpoint_writer.close()
        self.agreement.close()
        super().teardown()

    def wrap_model(self) -> None:
        """Spreads the model over the ranks; before the optimizer is made."""
        raise NotImplementedError(f"{type(self).__name__} must define wrap_model")

    def read_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that training starts from, whole, one after the other, the same on all ranks.

        Those of the module; where it was made without any, they are drawn now.
        """
        if any(parameter.is_meta for parameter in self.module.parameters()):
            yield from self.module.draw_weights()
            return
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()

    def share_weights(self) -> None:
        """Gives rank zero's weights to all ranks, in case they were drawn differently."""
        if self.world_size > 1:
            for tensor in self.module.state_dict().values():
                dist.broadcast(tensor, 0)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Moves a batch to the device of this rank; on a CPU it is there already."""
        if (device or self.root_device).type == "cpu":
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    # A step.

    def training_step(self, batch: StepBatch, *args: Any, **kwargs: Any) -> Tensor:
        """Runs an optimizer step and gives the mean loss over all targets of all ranks."""
        model = self.module
        optimizer = self.optimizers[0]
        self._call_hooks("on_before_zero_grad", optimizer)
        self.zero_grad()
        self._is_left_out = False
        with explain_out_of_memory(self):
            loss = self.run_micro_batches(batch)
        self._call_hooks("on_after_backward")
        model.step_metrics["train/lr"] = optimizer.param_groups[0]["lr"]
        # Through Lightning's wrapper, which counts the step and comes back to optimizer_step() below.
        with explain_out_of_memory(self):
            model.optimizers().step()  # type: ignore[union-attr]
        for config in self.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            scheduler.step()
        datamodule = getattr(model.trainer, "datamodule", None)
        if isinstance(datamodule, DataModule):
            datamodule.position = batch.position
        if self._is_left_out:
            report_left_out(model, batch, rank=self.data_parallel_rank)
        self.agreement.exchange()
        return loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Clips the gradients and changes the weights, if loss and gradient are finite; else nothing, on any rank."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler.unscale_(optimizer)
        self._call_hooks("on_before_optimizer_step", optimizer)
        loss, norm = read_together(
            self.module.step_metrics["train/loss"],  # type: ignore[arg-type]
            self.clip_grad_norm(self.module.gradient_clip_norm),
        )
        scale = None if scaler is None else scaler.get_scale
        is_finite, self._is_left_out = judge_step(self.module, loss, norm, scale=scale)
        output = optimizer.step() if is_finite else None
        if is_finite:
            self.average.update()
        if scaler is not None:
            update_scale(scaler, is_finite=is_finite, is_left_out=self._is_left_out)
        return output

    def trained_tensors(self) -> list[Tensor]:
        """What the optimizer updates on this rank."""
        return [it for group in self.optimizers[0].param_groups for it in group["params"]]

    def publish_weights(self) -> None:
        """Brings what the model computes with up to date with :meth:`trained_tensors`; here they are the same."""

    def on_validation_start(self) -> None:
        """Puts the average of the weights in their place, where it is what the run validates."""
        super().on_validation_start()
        self.average.start_validation()

    def on_validation_end(self) -> None:
        """Puts the weights back."""
        super().on_validation_end()
        self.average.end_validation()

    def on_exception(self, exception: BaseException) -> None:
        """Puts the weights back, if a validation was interrupted."""
        super().on_exception(exception)
        self.agreement.abandon()
        self.average.end_validation()

    def zero_grad(self) -> None:
        """Forgets the gradients of the last step."""
        self.optimizers[0].zero_grad()

    def run_micro_batches(self, batch: StepBatch) -> Tensor:
        """Runs forward and backward over all micro-batches; leaves the gradients of the mean loss, gives that loss."""
        return run_step(
            self.module,
            batch,
            precision=self.step_precision,
            compute_loss_sum=self.compute_training_loss_sum,
            without_sync=self.without_sync,
            rank=self.data_parallel_rank,
            size=self.data_parallel_size,
            device=self.root_device,
        )

    @property
    def step_precision(self) -> Precision:
        """What enters autocast, scales losses and runs backward passes."""
        return self.precision_plugin

    def compute_training_loss_sum(self, micro_batch: Any) -> Tensor:
        """The loss of a micro-batch with gradient, through the wrapper if there is one."""
        with self.activation_context():
            return self.compute_loss_sum(micro_batch)

    def activation_context(self) -> AbstractContextManager[Any]:
        """A context for forward passes in training: where to keep what the backward pass needs."""
        return offload_activations(self.root_device) if self.activation_offload else nullcontext()

    def compute_loss_sum(self, micro_batch: Any) -> Tensor:
        """The sum of the loss over the targets of a micro-batch, on every rank that reads it; a scalar."""
        return self.module.compute_loss_sum(micro_batch)

    def without_sync(self) -> AbstractContextManager[Any]:
        """A context in which a backward pass leaves its gradients on this rank; entered for all but the last."""
        return nullcontext()

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clips the gradients by their global norm and gives the norm before clipping; a scalar.

        Args:
            max_norm: None only measures.
        """
        # Walking the tree of modules takes longer than clipping a small one: the list is made once.
        if self._parameters is None:
            self._parameters = list(self.module.parameters())
        parameters = [parameter for parameter in self._parameters if parameter.grad is not None]
        norm = self.measure_norm([it.grad for it in parameters if it.grad is not None])
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def measure_norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm over all ranks of gradients that this one holds, or holds its part of; a scalar."""
        return torch.nn.utils.get_total_norm(gradients)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on the bare model: without gradients there is nothing to average."""
        with self.precision_plugin.val_step_context():
            return self.module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on the bare model."""
        with self.precision_plugin.test_step_context():
            return self.module.test_step(*args, **kwargs)

    def _call_hooks(self, name: str, *arguments: Any) -> None:
        for hook in self._hooks[name]:
            hook(*arguments)

    # Saving and loading.

    def collect_tensors(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Weights and optimizer state of this rank under the names of the single-device model.

        A slice is a DTensor; no rank holds the whole of what is spread.
        """
        return self.module.checkpoint_tensors(), collect_optimizer_tensors(
            self.optimizers[0], self.module
        )

    def fill_weights(self, checkpoint: Checkpoint) -> None:
        """Reads this rank's part of the weights in place."""
        checkpoint.load_tensors("model", self.module.checkpoint_tensors())

    def fill_optimizer(self, checkpoint: Checkpoint) -> None:
        """Reads this rank's part of the optimizer state."""
        restore_optimizer(self.optimizers[0], self.module, checkpoint)

    def gather_weights(self) -> dict[str, Tensor]:
        """All weights, whole, on every rank, by canonical name; for models that fit."""
        return dict(self.module.state_dict())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: tensors do not pass through Lightning's checkpoint dict."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing, likewise."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint folder; called on all ranks.

        Args:
            checkpoint: What Lightning collected.
            filepath: The folder.
            storage_options: ``core.checkpoint_writer.SaveOptions``; None returns when it is whole.
        """
        with self.average.out_of_place():
            model, optimizer = self.collect_tensors()
            save_run(
                checkpoint,
                Path(filepath),
                writer=self.checkpoint_writer,
                model=model,
                optimizer=optimizer,
                options=storage_options,
            )

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Opens a checkpoint folder; tensors are read by the two methods below."""
        return load_run(Path(checkpoint_path), verify=self.verify_checkpoints)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fills the weights."""
        self.fill_weights(checkpoint_of(checkpoint))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Fills the optimizer and sets step and learning rate."""
        opened = checkpoint_of(checkpoint)
        self.fill_optimizer(opened)
        self.average.forget_unused()
        restore_progress(opened, self.module)


def _forget_gpus(optimizers: list[Optimizer]) -> None:
    """Keeps torch's optimizers on CPUs from looking for a GPU at every step, which loads a library: 0.1 ms."""
    name = "_accelerator_graph_capture_health_check"
    for optimizer in optimizers:
        if hasattr(optimizer, name):
            setattr(optimizer, name, _do_nothing)


def _do_nothing() -> None:
    pass


def _find_hooks(trainer: pl.Trainer, model: Model) -> dict[str, list[Callable[..., Any]]]:
    """The hooks within a step that somebody has defined, so that the others cost nothing."""
    hooks: dict[str, list[Callable[..., Any]]] = {}
    for name in _HOOKS:
        hooks[name] = [
            _bind(getattr(callback, name), trainer, model)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if getattr(type(callback), name) is not getattr(pl.Callback, name)
        ]
        if getattr(type(model), name) is not getattr(pl.LightningModule, name):
            hooks[name].append(getattr(model, name))
    return hooks


def _bind(hook: Callable[..., Any], trainer: pl.Trainer, model: Model) -> Callable[..., Any]:
    return lambda *arguments: hook(trainer, model, *arguments)
