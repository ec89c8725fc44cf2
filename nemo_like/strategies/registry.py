"""Our strategies under names that Lightning's Trainer knows."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

_STRATEGIES = {
    "nemo_ddp": ("ddp", "DDPStrategy", "replicas that average their gradients"),
    "nemo_fsdp": ("fsdp", "FSDPStrategy", "FSDP2: parameters, gradients and optimizer state cut"),
    "nemo_deepspeed": ("deepspeed", "DeepSpeedStrategy", "DeepSpeed ZeRO 1, 2, 3"),
    "nemo_megatron": ("megatron", "MegatronStrategy", "tensor, pipeline, sequence parallelism"),
}


def register() -> None:
    """Makes ``Trainer(strategy="nemo_ddp")`` and the like work; may be called more than once."""
    known = StrategyRegistry.available_strategies()
    for name, (module, cls, description) in _STRATEGIES.items():
        if name not in known:
            StrategyRegistry.register(name, _make_builder(module, cls), description=description)


def _make_builder(module: str, cls: str) -> Any:
    """A function that imports the class when it is asked for; its dependencies may not be installed."""

    def build(**options: Any) -> Strategy:
        strategy: Strategy = getattr(import_module(f"nemo_like.strategies.{module}"), cls)(
            **options
        )
        return strategy

    return build
