"""A plan: how a step is spread over devices and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Strategy = Literal["ddp", "fsdp", "deepspeed", "megatron"]

_CLASSES: dict[Strategy, str] = {
    "ddp": "DDPStrategy",
    "fsdp": "FSDPStrategy",
    "deepspeed": "DeepSpeedStrategy",
    "megatron": "MegatronStrategy",
}
_COMMON = ("micro_batch_size", "activation_checkpointing", "activation_offload")
# Keys of a strategy, and what each is called in the table.
_OWN: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "fsdp": ("shard", "accumulate", "replicate", "cpu_offload"),
    "deepspeed": ("stage", "offload_optimizer", "offload_parameters"),
    "megatron": (
        "tensor_parallel",
        "pipeline_parallel",
        "virtual_pipeline",
        "sequence_parallel",
        "shard_optimizer",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A strategy with its settings, on a number of ranks; keys are those of the strategies' configuration."""

    strategy: Strategy
    ranks: int
    """Processes over all nodes; each has a device."""
    micro_batch_size: int = 1
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    activation_offload: bool = False
    shard: Literal["full", "gradients"] = "full"
    accumulate: Literal["sharded", "whole"] = "sharded"
    replicate: int = 1
    cpu_offload: bool = False
    stage: Literal[1, 2, 3] = 2
    offload_optimizer: bool = False
    offload_parameters: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int | None = None
    sequence_parallel: bool = False
    shard_optimizer: bool = True

    @property
    def data_parallel(self) -> int:
        """Groups of ranks that read different samples."""
        return max(1, self.ranks // (self.tensor_parallel * self.pipeline_parallel))

    @property
    def class_name(self) -> str:
        """Of the strategy in ``nemo_like.strategies``."""
        return _CLASSES[self.strategy]

    @property
    def family(self) -> tuple[Any, ...]:
        """Everything but how activations are kept and how much is computed at once."""
        return (self.strategy, *(getattr(self, key) for key in _OWN[self.strategy]))

    @property
    def label(self) -> str:
        """What the plan is called in a table."""
        parts: list[str] = []
        if self.strategy == "fsdp":
            parts = [f"shard={self.shard}"] if self.shard != "full" else []
            parts += [f"accumulate={self.accumulate}"] if self.accumulate != "sharded" else []
            parts += [f"replicate={self.replicate}"] if self.replicate > 1 else []
            parts += ["cpu_offload"] if self.cpu_offload else []
        elif self.strategy == "deepspeed":
            parts = [f"stage {self.stage}"]
            where = [self.offload_optimizer * "optimizer", self.offload_parameters * "parameters"]
            parts += [f"({', '.join(filter(None, where))} on host)"] if any(where) else []
        elif self.strategy == "megatron":
            parts = [f"TP{self.tensor_parallel}", f"PP{self.pipeline_parallel}"]
            parts += [f"x{self.virtual_pipeline}"] if self.virtual_pipeline else []
            parts += ["SP"] if self.sequence_parallel else []
            parts += [f"DP{self.data_parallel}"]
            parts += [] if self.shard_optimizer else ["whole optimizer"]
        return " ".join([self.strategy, *parts])

    def count_micro_batches(self, global_batch_size: int) -> int:
        """Micro-batches of a step on each rank; the last may be shorter."""
        return max(1, -(-global_batch_size // (self.data_parallel * self.micro_batch_size)))

    def options(self) -> dict[str, Any]:
        """Arguments of the strategy; those left at their default are not named."""
        defaults = Plan(strategy=self.strategy, ranks=1)
        keys = (*_COMMON, *_OWN[self.strategy])
        return {
            key: getattr(self, key)
            for key in keys
            if key == "micro_batch_size" or getattr(self, key) != getattr(defaults, key)
        }

    def overrides(self) -> list[str]:
        """What selects the plan on a command line."""
        return [
            f"strategy={self.strategy}",
            *(f"strategy.{key}={_show(value)}" for key, value in self.options().items()),
        ]

    def component(self) -> dict[str, Any]:
        """The strategy as a configuration names it."""
        return {"_target_": f"nemo_like.strategies.{self.class_name}", **self.options()}


def read_plan(strategy: Strategy, settings: Mapping[str, Any], ranks: int) -> Plan:
    """The plan that a strategy's settings describe; settings that concern neither memory nor time are left out.

    ``micro_batch_size=auto`` is read as 1, what every device has to have room for.
    """
    keys = (*_COMMON, *_OWN[strategy])
    given = {key: settings[key] for key in keys if key in settings}
    if given.get("micro_batch_size") == "auto":
        given["micro_batch_size"] = 1
    return Plan(strategy=strategy, ranks=ranks, **given)


def find_strategy(component: Mapping[str, Any]) -> Strategy | None:
    """Which strategy a component builds; None for a class that is none of ours, or chooses itself."""
    name = str(component.get("_target_", "")).rpartition(".")[2]
    return next((key for key, value in _CLASSES.items() if value == name), None)


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
