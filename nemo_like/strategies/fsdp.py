"""Fully sharded data parallelism (PyTorch's FSDP2): parameters, gradients and optimizer state cut over the ranks."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from nemo_like.core.errors import ConfigError
from nemo_like.strategies.mesh import build_mesh, split_ranks
from nemo_like.strategies.strategy import StepStrategy

_COMPUTE_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class FSDPStrategy(StepStrategy):
    """A slice of every parameter on every rank; each block is gathered when it is its turn.

    With a mixed precision parameters are gathered in the 16-bit type and gradients are added up and reduced in fp32.
    Autocast stays on, so each operation runs in the type that it has under any other strategy.

    Args:
        shard: ``full`` gathers the parameters of a block for each pass; ``gradients`` keeps them whole from the first
            forward pass of a step to its last backward pass.
        accumulate: Where gradients wait for the last micro-batch: ``sharded`` reduces them over the shards after each
            one, so only slices are kept; ``whole`` keeps them whole and reduces once a step.
        replicate: Copies of the sharded model; ranks = ``replicate`` x shards, and neighbouring ranks share a copy.
        cpu_offload: Keep parameters, gradients and optimizer state in the memory of the host; the optimizer runs there.
        options: Of :class:`StepStrategy`.

    Raises:
        TypeError: An option that is not known.
        ConfigError: When it is set up: ``replicate`` does not divide the ranks, or ``cpu_offload`` on CPU devices.
    """

    spreads_weights = True
    fills_weights = True

    def __init__(
        self,
        *,
        shard: Literal["full", "gradients"] = "full",
        accumulate: Literal["sharded", "whole"] = "sharded",
        replicate: int = 1,
        cpu_offload: bool = False,
        **options: Any,
    ) -> None:
        if cpu_offload and options.get("process_group_backend") is None:
            # Gradients in the memory of the host are measured there, so the ranks must be able to talk from there.
            options["process_group_backend"] = "cpu:gloo,cuda:nccl"
        super().__init__(**options)
        if self._ddp_kwargs:
            raise TypeError(f"{type(self).__name__}: there is no option {sorted(self._ddp_kwargs)}")
        self.shard, self.accumulate = shard, accumulate
        self.replicate, self.cpu_offload = replicate, cpu_offload
        self._units: list[FSDPModule] = []

    # Setting up.

    def setup_distributed(self) -> None:
        """Starts the process group; one process is a group of its own, in its own memory.

        Raises:
            ConfigError: ``cpu_offload`` on CPU devices.
        """
        if self.cpu_offload and self.root_device.type == "cpu":
            raise ConfigError(
                [
                    "cpu_offload=true: on CPU devices parameters are in the memory of the host already; "
                    "set strategy.cpu_offload=false"
                ]
            )
        super().setup_distributed()
        if not dist.is_initialized():
            backend = self._get_process_group_backend()
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            atexit.register(_end_group)  # not before: the model stays cut after the run

    def wrap_model(self) -> None:
        """Cuts each block, then what is left, so that no more than one block is whole on a device at once."""
        if isinstance(self.module, FSDPModule):
            return  # by an earlier call of the same trainer
        axes = split_ranks(self.world_size, replicate=self.replicate)
        device_type = self.root_device.type
        mesh = build_mesh(device_type, axes)
        options: dict[str, Any] = {"mesh": mesh if self.replicate > 1 else mesh["shard"]}
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy()
        dtype = self._compute_dtype()
        if dtype is not None:
            # Autocast chooses types of inputs, here as elsewhere.
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
            _widen_embeddings(self.module)
        is_empty = any(parameter.is_meta for parameter in self.module.parameters())
        for unit in (*self.module.blocks(), self.module):
            if not is_empty:
                self._share(unit)
            # The outermost is needed again at once by the backward pass.
            is_freed = self.shard == "full" and unit is not self.module
            fully_shard(unit, reshard_after_forward=is_freed, **options)
        if is_empty:
            self._draw()
        # Gathers what belongs to no block; fully_shard by itself knows forward() only.
        register_fsdp_forward_method(self.module, "compute_loss_sum")
        self._units = [it for it in self.module.modules() if isinstance(it, FSDPModule)]
        if not self.cpu_offload:
            self.model_to_device()  # everything is there; the module takes note of its device

    def _draw(self) -> None:
        """Gives memory to the slices of a model without weights, and keeps of each weight that is drawn a slice."""
        self.module.to_empty(device="cpu" if self.cpu_offload else self.root_device)
        parameters = dict(self.module.named_parameters())
        for name, whole in self.module.draw_weights():
            slices: Any = parameters[name].detach()
            mesh, placements = slices.device_mesh, slices.placements
            here = whole.to(self.root_device)
            drawn = distribute_tensor(here, mesh, placements, src_data_rank=None)
            slices.to_local().copy_(drawn.to_local())

    def _compute_dtype(self) -> torch.dtype | None:
        """The 16-bit type of a mixed precision."""
        plugin = self.precision_plugin
        return _COMPUTE_DTYPES[plugin.precision] if isinstance(plugin, MixedPrecision) else None

    def _share(self, unit: nn.Module) -> None:
        """Brings what is not cut yet to the device and gives rank zero's to all, in case they drew differently."""
        for parameter in unit.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(self.root_device)
        if self.world_size == 1:
            return
        for tensor in unit.state_dict().values():
            if not isinstance(tensor, DTensor):
                here = tensor.to(self.root_device)  # buffers may be elsewhere still
                dist.broadcast(here, 0)
                tensor.copy_(here)

    def teardown(self) -> None:
        """Leaves a model alone that something failed to give weights to, so that the failure is what one sees."""
        model = self.lightning_module
        if model is not None and any(parameter.is_meta for parameter in model.parameters()):
            self._lightning_module = None
        super().teardown()

    # A step.

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Adds gradients up on this rank, as slices or whole; with ``shard=gradients`` parameters stay whole, too."""
        self._set_accumulating(True)
        try:
            yield
        finally:
            self._set_accumulating(False)

    def _set_accumulating(self, on: bool) -> None:
        for unit in self._units:
            if self.accumulate == "whole":
                unit.set_requires_gradient_sync(not on, recurse=False)
            else:
                # Slices are reduced among the shards of a copy; the copies wait for each other once a step.
                unit.set_requires_all_reduce(not on, recurse=False)
            unit.set_reshard_after_backward(
                self.shard == "full" or not on,
                recurse=False,
            )

    def measure_norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm over the slices of all ranks, copies counted once."""
        norm = super().measure_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def on_validation_start(self) -> None:
        """Compares the numbers of batches.

        Raises:
            ValueError: They differ from rank to rank, so that some would wait for others in the middle of a network.
        """
        super().on_validation_start()
        count = float(sum(self.module.trainer.num_val_batches))
        range_2 = torch.tensor([count, -count], device=self.root_device)
        dist.all_reduce(range_2, dist.ReduceOp.MAX)
        most, fewest = range_2[0].item(), -range_2[1].item()
        if most != fewest:
            raise ValueError(
                f"validation has {most:g} batches on one rank and {fewest:g} on another: each batch gathers the "
                "parameters from all ranks, so let val_dataloader() fill up with blank batches"
            )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs without gradients, then frees what only a backward pass would."""
        output = super().validation_step(*args, **kwargs)
        self._free()
        return output

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        output = super().test_step(*args, **kwargs)
        self._free()
        return output

    def publish_weights(self) -> None:
        """Frees what was gathered of other weights."""
        self._free()

    def _free(self) -> None:
        for unit in self._units:
            unit.reshard()

    # Saving.

    def gather_weights(self) -> dict[str, Tensor]:
        """All weights, whole, in the memory of the host, one after the other; on every rank."""
        return {
            name: (it.full_tensor() if isinstance(it, DTensor) else it).detach().cpu()
            for name, it in self.module.state_dict().items()
        }


def _widen_embeddings(model: nn.Module) -> None:
    """Makes embeddings give fp32, as under autocast they do; else the residual stream would be 16-bit."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, arguments, output: output.float())


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
