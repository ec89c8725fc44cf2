"""Decoder-only language models: Llama, Mistral, Qwen2 and Qwen3 as shapes of one network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

from .config import DecoderConfig, DecoderModelConfig, RopeScalingConfig

if TYPE_CHECKING:
    from .model import DecoderModel as DecoderModel
    from .network import DecoderNetwork as DecoderNetwork

__all__ = [
    "DecoderConfig",
    "DecoderModel",
    "DecoderModelConfig",
    "DecoderNetwork",
    "RopeScalingConfig",
]

__getattr__ = lazy_names(__name__, {"DecoderModel": ".model", "DecoderNetwork": ".network"})
