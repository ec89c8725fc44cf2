"""ZeRO by DeepSpeed's engine, driven directly: a whole optimizer step at once, on GPUs and on CPUs."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import SGD, Adam, AdamW, Optimizer

from nemo_like.core.checkpoint import Checkpoint
from nemo_like.core.datamodule import StepBatch
from nemo_like.core.errors import ConfigError
from nemo_like.core.extras import require
from nemo_like.core.model import Model
from nemo_like.strategies.deepspeed.scaling import StepLossScaler
from nemo_like.strategies.deepspeed.tensors import (
    Layout,
    collect_states,
    collect_weights,
    is_partitioned,
    join_weights,
    leave_out,
    read_layout,
    restore_states,
)
from nemo_like.strategies.nonfinite import judge_step
from nemo_like.strategies.strategy import StepStrategy

_ELEMENTWISE = (AdamW, Adam, SGD)
"""Optimizers that give the same result on a parameter that is cut anywhere."""

_LARGEST_BUCKET = 50_000_000
"""Elements that are reduced at once, 200 MB; DeepSpeed's own default would take 2 GB."""


class _LossModule(nn.Module):
    """A model seen as the function that the engine wraps: micro-batch in, loss sum out."""

    def __init__(self, model: Model, precision: Precision) -> None:
        super().__init__()
        self.model = model
        self.precision = precision

    def forward(self, micro_batch: Any) -> Tensor:
        # Autocast is entered here because the engine would leave one that was entered around it.
        with self.precision.forward_context():
            return self.model.compute_loss_sum(micro_batch)


class _EngineBackward(Precision):
    """What a step needs of a precision plugin, when the engine runs the backward pass and scales the loss."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._engine.backward(tensor, scale_wrt_gas=False)


class DeepSpeedStrategy(StepStrategy):
    """DeepSpeed's ZeRO: what each data-parallel rank would hold again is cut over the ranks instead.

    Weights are FP32 with autocast around the loss, as under all strategies. ``fp16-mixed`` is scaled by DeepSpeed's
    dynamic loss scaler. Optimizers are those that treat each element on its own.

    Args:
        stage: What is cut: 1 the optimizer state, 2 the gradients as well, 3 the parameters as well. Stage 1 reduces
            gradients once a step; 2 and 3 once a micro-batch, because nobody keeps a whole gradient.
        offload_optimizer: Keep the optimizer state in the memory of the host; the optimizer runs there.
        offload_parameters: Keep the parameters there, too; only with stage 3.
        options: Of :class:`StepStrategy`.

    Raises:
        MissingExtraError: DeepSpeed is not installed.
        ValueError: There is no such stage, or it has no parameters to offload.
    """

    exchanges_weights = False

    def __init__(
        self,
        *,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        **options: Any,
    ) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"stage={stage}: must be 1, 2 or 3")
        if offload_parameters and stage != 3:
            raise ValueError(
                f"offload_parameters=True: needs stage=3, got stage={stage}, which keeps parameters whole"
            )
        if importlib.util.find_spec("deepspeed") is None:
            require("deepspeed")  # before any process starts
        self.stage = stage
        self.spreads_weights = stage == 3
        self.offload_optimizer, self.offload_parameters = offload_optimizer, offload_parameters
        self._engine: Any = None
        self._layout: Layout | None = None
        self._mesh: DeviceMesh | None = None
        self._loss_scaler: StepLossScaler | None = None
        self._linear = nn.functional.linear
        super().__init__(**options)

    # Setting up.

    def setup_distributed(self) -> None:
        """Starts the process group, for one process too: the engine asks it for its size."""
        super(StepStrategy, self).setup_distributed()

    def wrap_model(self) -> None:
        """Moves the model; it is spread when there is an optimizer, and stays whole where nothing is trained.

        Raises:
            RuntimeError: It lies in pieces since an earlier training.
        """
        if any(is_partitioned(parameter) for parameter in self.module.parameters()):
            raise RuntimeError(
                f"this {type(self.module).__name__} was cut into pieces by an earlier training with stage=3: "
                "make a new one, and read a checkpoint into it (ckpt_path=...)"
            )
        self.model_to_device()
        self.share_weights()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Makes the optimizer of the whole parameters, then cuts both.

        Raises:
            ConfigError: The optimizer needs whole matrices.
        """
        super().setup_optimizers(trainer)
        (optimizer,) = self.optimizers
        if not isinstance(optimizer, _ELEMENTWISE):
            raise ConfigError(
                [
                    f"optim: {type(optimizer).__name__} needs whole matrices, which strategy=deepspeed cuts into flat "
                    "pieces; take strategy=fsdp or optim=adamw"
                ]
            )
        deepspeed = self._import_deepspeed()
        with _tell_local_rank(self.local_rank):
            self._engine, *_ = deepspeed.initialize(
                model=_LossModule(self.module, self.precision_plugin),
                optimizer=optimizer,
                config=self._make_config(),
            )
        self._engine.set_gradient_accumulation_boundary(True)
        self._layout = read_layout(self._engine, self.module)
        self._mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            self._loss_scaler = StepLossScaler(scaler)
            self._engine.optimizer.loss_scaler = self._loss_scaler

    def _import_deepspeed(self) -> Any:
        """DeepSpeed, on the device of this run, and without a word."""
        # Read at the first import, which would take any GPU that it finds.
        os.environ["DS_ACCELERATOR"] = self.root_device.type
        # Its handler writes to the terminal, on every rank.
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed = require("deepspeed")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # An extension for CPUs that it would compile now, and that training does not use.
        deepspeed.ops.__compatible_ops__.pop("deepspeed_shm_comm", None)
        # Names of collectives that torch 2.14 calls otherwise.
        warnings.filterwarnings(
            "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
        )
        return deepspeed

    def _make_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration of this run."""
        num_elements = sum(it.numel() for it in self.module.parameters())
        pin = self.root_device.type == "cuda"
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": min(_LARGEST_BUCKET, num_elements),
            # Small parameters stay whole; what is small depends on the model.
            "stage3_param_persistence_threshold": min(100_000, num_elements // 1000),
        }
        if self.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
        if self.offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": pin}
        return {
            "zero_optimization": zero,
            "gradient_clipping": self.module.gradient_clip_norm or 0.0,
            # The engine does no bookkeeping of micro-batches: see without_sync().
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "steps_per_print": 2**31,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    # A step.

    def zero_grad(self) -> None:
        """Nothing: the engine forgets gradients when it has taken them."""

    def run_micro_batches(self, batch: StepBatch) -> Tensor:
        """Runs all micro-batches through the engine; gives the mean loss."""
        if self._loss_scaler is not None:
            self._loss_scaler.load()
        with _keep_module_stack():
            return super().run_micro_batches(batch)

    @property
    def step_precision(self) -> Precision:
        """The engine runs the backward pass and scales the loss; autocast is entered inside of it."""
        return _EngineBackward(self._engine)

    def compute_training_loss_sum(self, micro_batch: Any) -> Tensor:
        """Runs through the engine."""
        with self.activation_context():
            loss_sum: Tensor = self._engine(micro_batch)
        return loss_sum

    def compute_loss_sum(self, micro_batch: Any) -> Tensor:
        """Runs through what the engine wraps, whose hooks gather parameters."""
        if self._engine is None:
            return super().compute_loss_sum(micro_batch)
        loss_sum: Tensor = self._engine.module(micro_batch)
        return loss_sum

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Tells the engine that more micro-batches follow."""
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Clips and steps through the engine, which knows where the gradients are and leaves out those not finite."""
        self._call_hooks("on_before_optimizer_step", optimizer)
        loss = float(self.module.step_metrics["train/loss"])
        with nullcontext() if math.isfinite(loss) else leave_out(self._engine):
            self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        scaler = self._loss_scaler
        scale = None if scaler is None else lambda: scaler.cur_scale
        is_finite, self._is_left_out = judge_step(self.module, loss, norm, scale=scale)
        assert is_finite == self._engine.was_step_applied(), "both judge by the same norm"
        if is_finite:
            self.average.update()
        if scaler is not None and not self._is_left_out:
            scaler.store()

    def trained_tensors(self) -> list[Tensor]:
        """The stretches of this rank, which hold FP32 weights."""
        assert self._layout is not None, "made with the engine"
        return self._layout.flats

    # Saving and loading. Weights are read before the engine cuts them: by the base class.

    def collect_tensors(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Weights and optimizer state under canonical names; what is cut becomes slices of rows."""
        if self._layout is None or self._mesh is None:
            return super().collect_tensors()
        weights: Mapping[str, Tensor] = (
            collect_weights(self.module, self._mesh)
            if self.stage == 3
            else self.module.state_dict()
        )
        states = collect_states(self._layout, self.optimizers[0], self.module, self._mesh)
        return weights, states

    def fill_optimizer(self, checkpoint: Checkpoint) -> None:
        """Reads this rank's part of the optimizer state."""
        assert self._layout is not None, "made with the engine"
        assert self._mesh is not None, "made with the engine"
        restore_states(self._layout, self.optimizers[0], self.module, self._mesh, checkpoint)

    def gather_weights(self) -> dict[str, Tensor]:
        """All weights, whole, on every rank; what was cut lies in the memory of the host."""
        if self.stage != 3:
            return super().gather_weights()
        return {name: it.cpu() for name, it in join_weights(self.module, self.root_device)}

    def teardown(self) -> None:
        """Takes the hooks off the parameters, and back what stage 3 did to torch itself."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
        nn.functional.linear = self._linear
        super().teardown()


@contextmanager
def _keep_module_stack() -> Iterator[None]:
    """Forgets modules that never ended: a recomputation stops where it has what it needs.

    Stage 3 keeps a stack of the modules that are running, which would grow by one or more a block and micro-batch.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    depth = len(FWD_MODULE_STACK)
    yield
    del FWD_MODULE_STACK[depth:]


@contextmanager
def _tell_local_rank(rank: int) -> Iterator[None]:
    """Sets the variable that DeepSpeed reads, which some launchers do not set (SLURM's); Lightning's would see it."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
