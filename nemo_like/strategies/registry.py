"""Our strategies under names that Lightning's Trainer knows."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from nemo_like.strategies.ddp import DDPStrategy


def register() -> None:
    """Makes ``Trainer(strategy="nemo_ddp")`` work; may be called more than once."""
    if "nemo_ddp" not in StrategyRegistry.available_strategies():
        StrategyRegistry.register(
            "nemo_ddp", DDPStrategy, description="replicas that average their gradients"
        )
