"""Tensor, pipeline and sequence parallelism by Megatron-Core."""

from .strategy import MegatronStrategy

__all__ = ["MegatronStrategy"]
