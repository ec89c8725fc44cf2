"""Configuration of the strategies: what fits the hardware, never what changes the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from nemo_like.strategies.planning.limits import (
    check_deepspeed,
    check_fsdp,
    check_megatron,
    count_ranks,
)
from nemo_like.strategies.planning.plan import Plan, Strategy, read_plan
from nemo_like.strategies.planning.size import parse_bytes
from nemo_like.strategies.planning.work import read_work

NOT_ALONE = (
    "a rank tries sizes alone, and under this strategy each pass waits for other ranks; set a number (`nemo-like plan` "
    "estimates what fits), or strategy=ddp"
)
"""Why a strategy does not find the micro-batch size, and what to do."""


@dataclass(kw_only=True)
class StepStrategyConfig:
    """What all strategies share."""

    tries_alone: ClassVar[bool] = False
    """Whether ``micro_batch_size=auto`` is possible: passes need no other rank."""
    micro_batch_size: int | Literal["auto"] = 1
    """Samples that are computed at once on one rank; lower it when memory runs out, the result stays the same.
    ``auto`` (``strategy=ddp``) tries what fits when training starts: all samples of the step, half, a quarter, ..."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: nothing, all but the results of matrix products,
    or all but the inputs of the blocks."""
    activation_offload: bool = False
    """Keep what the backward pass needs in the memory of the host."""
    start_method: Literal["popen", "spawn", "fork"] = "popen"
    """How the processes of one node are started: the command again, or children of this process (notebooks: fork)."""
    process_group_backend: Literal["nccl", "gloo"] | None = None
    """None chooses by the device: NCCL on GPUs, gloo on CPUs."""
    timeout_s: float = 1800.0
    """How long a collective waits for the other ranks."""

    def check(self) -> Iterator[str]:
        """Faults of the values."""
        if self.micro_batch_size == "auto":
            if not self.tries_alone:
                yield f"micro_batch_size=auto: {NOT_ALONE}"
        elif self.micro_batch_size < 1:
            yield f"micro_batch_size={self.micro_batch_size}: must be at least 1, or auto"
        if not self.timeout_s > 0:
            yield f"timeout_s={self.timeout_s}: must be above 0"


@dataclass(kw_only=True)
class DDPStrategyConfig(StepStrategyConfig):
    """A whole copy of the model on every rank."""

    tries_alone: ClassVar[bool] = True
    find_unused_parameters: bool = False
    """Look for parameters without a gradient in every step; only for networks that leave some out."""


@dataclass(kw_only=True)
class FSDPStrategyConfig(StepStrategyConfig):
    """Parameters, gradients and optimizer state cut over the ranks (PyTorch's FSDP2)."""

    shard: Literal["full", "gradients"] = "full"
    """``full`` gathers the parameters of a block for each pass; ``gradients`` keeps them whole from the forward to the
    backward pass, which communicates less and needs more memory."""
    accumulate: Literal["sharded", "whole"] = "sharded"
    """Where gradients wait for the last micro-batch: ``sharded`` reduces them over the shards after each one, so only
    slices are kept; ``whole`` keeps them whole and reduces once a step, which communicates less."""
    replicate: int = 1
    """Copies of the sharded model: ranks = ``replicate`` x shards (hybrid sharding; one copy per node is usual)."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in the memory of the host; the optimizer runs there."""

    def check(self) -> Iterator[str]:
        """Faults of the values."""
        yield from super().check()
        if self.replicate < 1:
            yield f"replicate={self.replicate}: must be at least 1"

    def check_run(self, run: Any) -> Iterator[str]:
        """What does not fit the rest of a run.

        Args:
            run: The ``RunConfig``.
        """
        if self.replicate >= 1:
            yield from check_fsdp(_plan("fsdp", self, run), run)


@dataclass(kw_only=True)
class DeepSpeedStrategyConfig(StepStrategyConfig):
    """DeepSpeed's ZeRO: optimizer state (1), gradients (2) and parameters (3) cut over the ranks."""

    stage: Literal[1, 2, 3] = 2
    """What is cut: 1 the optimizer state, 2 the gradients as well, 3 the parameters as well."""
    offload_optimizer: bool = False
    """Keep the optimizer state in the memory of the host; the optimizer runs there."""
    offload_parameters: bool = False
    """Keep the parameters in the memory of the host, too; only with ``stage: 3``."""

    def check(self) -> Iterator[str]:
        """Faults of the values."""
        yield from super().check()
        if self.offload_parameters and self.stage != 3:
            yield (
                f"offload_parameters=true: stage={self.stage} keeps parameters whole on the device; "
                "set stage=3, or offload_parameters=false"
            )

    def check_run(self, run: Any) -> Iterator[str]:
        """What does not fit the rest of a run.

        Args:
            run: The ``RunConfig``.
        """
        yield from check_deepspeed(run)


@dataclass(kw_only=True)
class MegatronStrategyConfig(StepStrategyConfig):
    """Megatron-Core: each layer cut over ranks (tensor), the layers cut over ranks (pipeline), or both."""

    tensor_parallel: int = 1
    """Ranks that share each layer; keep them within a node."""
    pipeline_parallel: int = 1
    """Stages that the layers are cut into; micro-batches follow each other through them (1F1B)."""
    virtual_pipeline: int | None = None
    """Chunks of layers that each stage holds, interleaved, which shortens the wait at the ends; null is one."""
    sequence_parallel: bool = False
    """Cut what lies between the tensor-parallel regions (norms, dropout) along the sequence, which saves memory."""
    shard_optimizer: bool = True
    """Cut the optimizer state over the data-parallel ranks (the distributed optimizer)."""

    def check(self) -> Iterator[str]:
        """Faults of the values."""
        yield from super().check()
        for name in ("tensor_parallel", "pipeline_parallel", "virtual_pipeline"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name}={value}: must be at least 1"
        if self.virtual_pipeline is not None and self.pipeline_parallel == 1:
            yield (
                f"virtual_pipeline={self.virtual_pipeline}: interleaves chunks over stages, of which "
                "pipeline_parallel=1 has one; set pipeline_parallel to 2 or more, or virtual_pipeline=null"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            yield (
                "sequence_parallel=true: cuts sequences over the tensor-parallel ranks, of which tensor_parallel=1 has "
                "one; set tensor_parallel to 2 or more, or sequence_parallel=false"
            )

    def check_run(self, run: Any) -> Iterator[str]:
        """What does not fit the rest of a run.

        Args:
            run: The ``RunConfig``.
        """
        yield from check_megatron(_plan("megatron", self, run), read_work(run, platform="gpu"), run)


@dataclass(kw_only=True)
class AutoStrategyConfig(StepStrategyConfig):
    """The strategy is chosen when the run starts, from the devices that it finds (``nemo-like plan`` shows how)."""

    tries_alone: ClassVar[bool] = True
    micro_batch_size: int | Literal["auto"] = 1
    """Is chosen, too: what a run file gives for other strategies is not looked at."""
    device_memory: str | None = None
    """Memory of a device, ``80GiB``; null asks the device, or on a CPU divides that of the machine by the processes."""

    def check(self) -> Iterator[str]:
        """Faults of the values."""
        yield from super().check()
        if self.device_memory is not None:
            try:
                parse_bytes(self.device_memory)
            except ValueError as error:
                yield f"device_memory={error}"


def _plan(strategy: Strategy, config: StepStrategyConfig, run: Any) -> Plan:
    """A configuration as a plan; without knowledge of the devices, for as many ranks as one replica has."""
    plan = read_plan(strategy, vars(config), ranks=1)
    ranks = count_ranks(run.trainer) or plan.tensor_parallel * plan.pipeline_parallel
    return dataclasses.replace(plan, ranks=ranks)
