"""Number formats of a run: which plugin Lightning gets, and what a user should know before it starts."""

from __future__ import annotations

import logging
import warnings
from typing import Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

logger = logging.getLogger(__name__)

PrecisionName = Literal["fp32", "bf16-mixed", "fp16-mixed", "fp8-mixed"]


def has_fast_bf16(device_type: str) -> bool:
    """Whether BF16 matrix products are quicker than FP32 ones on this machine's devices of a type."""
    if device_type == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
    if device_type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device_type == "mps"


def build_precision(name: PrecisionName, device_type: str) -> Precision:
    """Gives the plugin for a number format.

    Weights and optimizer state stay in FP32; ``fp16-mixed`` scales the loss dynamically.

    Args:
        name: ``fp32``, ``bf16-mixed``, ``fp16-mixed`` or ``fp8-mixed``.
        device_type: ``cpu``, ``cuda`` or ``mps``.

    Raises:
        ConfigError: ``fp8-mixed`` on hardware that has no FP8.
    """
    if name == "fp32":
        return Precision()
    if name == "fp8-mixed":
        from nemo_like.core.float8 import Float8Precision

        return Float8Precision(device_type)
    if device_type == "cpu" and (name == "fp16-mixed" or not has_fast_bf16("cpu")):
        logger.warning(
            "%s on this CPU, which has no units for it: a step will take about ten times as long as in fp32 "
            "(trainer.precision=fp32)",
            name,
        )
    if name == "bf16-mixed":
        return MixedPrecision("bf16-mixed", device_type)
    with warnings.catch_warnings():
        # Lightning's own choice for CPUs would be BF16 in disguise; torch's scaler works there.
        warnings.filterwarnings("ignore", message=".*GradScaler.*")
        return MixedPrecision("16-mixed", device_type, torch.amp.GradScaler(device_type))
