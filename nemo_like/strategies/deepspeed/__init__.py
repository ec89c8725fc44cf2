"""DeepSpeed's ZeRO: optimizer state, gradients and parameters cut over the ranks."""

from nemo_like.strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
