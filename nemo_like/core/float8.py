"""FP8 matrix products inside the blocks of a model, by torchao; the only file that knows it."""

from __future__ import annotations

import functools
import logging
from typing import Any, cast

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from nemo_like.core.errors import ConfigError
from nemo_like.core.extras import require
from nemo_like.core.model import Model

logger = logging.getLogger(__name__)

_CAPABILITY = (8, 9)
"""Compute capability from which on CUDA devices have FP8 units (Ada, Hopper, Blackwell)."""
_MULTIPLE = 16
"""What the units want both sizes of a matrix to be a multiple of."""

_CONVERTED = "has_float8_layers"
"""Attribute that marks a converted model."""


class Float8Precision(MixedPrecision):
    """BF16 autocast, with the linear layers of the blocks in FP8 (Micikevicius et al. 2022, arXiv:2209.05433).

    Inputs and weights are scaled by their largest element and rounded to E4M3, gradients to E5M2, anew in each pass, so
    there is no state to save. Weights keep their names and stay in fp32. What is not in a block (embedding, output
    matrix), or has a size that is no multiple of 16, stays in BF16.

    Args:
        device_type: ``cuda``; any with ``emulate``.
        emulate: Round to FP8, but multiply in a wider type: slow, for tests on hardware without FP8.

    Raises:
        ConfigError: The hardware has no FP8.
        MissingExtraError: torchao is not installed.
    """

    def __init__(self, device_type: str, *, emulate: bool = False) -> None:
        fault = None if emulate else _find_fault(device_type)
        if fault:
            raise ConfigError([f"trainer.precision=fp8-mixed: {fault}; use bf16-mixed or fp32"])
        require("torchao")
        self.emulate = emulate
        super().__init__("bf16-mixed", device_type)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the linear layers of the blocks in place.

        Raises:
            ConfigError: There is none that could be converted.
        """
        float8 = require("torchao.float8")
        if getattr(module, _CONVERTED, False):
            return module  # by an earlier call of the same trainer
        config = float8.Float8LinearConfig(emulate=self.emulate, pad_inner_dim=True)
        blocks = nn.ModuleList(cast(Model, module).blocks())
        linears = [it for it in blocks.modules() if isinstance(it, nn.Linear)]
        converted = [it for it in linears if _fits(it)]
        if not converted:
            raise ConfigError(
                [
                    f"trainer.precision=fp8-mixed: none of the {len(linears)} linear layers in the blocks of "
                    f"{type(module).__name__} has sizes that are multiples of {_MULTIPLE}; use bf16-mixed or fp32"
                ]
            )
        for block in blocks:
            before = dict(block.named_modules())
            float8.convert_to_float8_training(
                block, module_filter_fn=lambda it, name: _fits(it), config=config
            )
            for name, linear in block.named_modules():
                if linear is not before[name]:
                    _keep_initialization(linear, before[name])
        setattr(module, _CONVERTED, True)
        logger.info("fp8: %d of %d linear layers in blocks", len(converted), len(linears))
        return module


def _find_fault(device_type: str) -> str | None:
    """Why devices of this type cannot multiply in FP8."""
    need = "needs a CUDA device of compute capability 8.9 or above"
    if device_type != "cuda" or not torch.cuda.is_available():
        return f"{need}, the device is {device_type}"
    capability = torch.cuda.get_device_capability()
    if capability < _CAPABILITY:
        return f"{need}, {torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}"
    return None


def _fits(linear: nn.Module) -> bool:
    assert isinstance(linear, nn.Linear), "torchao asks for linear layers only"
    return linear.in_features % _MULTIPLE == 0 and linear.out_features % _MULTIPLE == 0


def _keep_initialization(converted: nn.Module, original: nn.Module) -> None:
    """Lets a converted layer draw its weights as the original would."""
    for name, value in vars(original).items():
        vars(converted).setdefault(name, value)
    draw = cast(Any, type(original)).reset_parameters
    cast(Any, converted).reset_parameters = functools.partial(draw, converted)
