"""A frozen linear layer whose weights are stored in four or eight bits; all that we ask of bitsandbytes for it.

Codes and scales of a matrix lie in one tensor of bytes. So every strategy can copy, cut and gather it without knowing
what it is, and no mixed precision touches a scale.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_like.core.extras import require

QuantizedKind = Literal["nf4", "int8"]
"""``nf4``: 4-bit NormalFloat in blocks of 64 whose scales are 8-bit codes in blocks of 256 ("double quantisation"),
Dettmers et al. 2023 (arXiv:2305.14314), 4.13 bits a weight. ``int8``: 256 even steps in blocks of 256, 8.13 bits."""

_BLOCK = {"nf4": 64, "int8": 256}
_SCALE_BLOCK = 256
_ALIGNMENT = 16
"""Bytes at whose multiples parts begin, as kernels like it."""


def _part_sizes(numel: int, kind: QuantizedKind) -> list[int]:
    """Bytes of each part of the packed form."""
    blocks = -(-numel // _BLOCK[kind])
    if kind == "int8":
        return [4 * blocks, numel]
    # Mean of the scales, scales of the scales, codes of the scales, codes of the weights (two in a byte).
    return [4, 4 * -(-blocks // _SCALE_BLOCK), blocks, -(-numel // 2)]


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def count_packed_bytes(numel: int, kind: QuantizedKind) -> int:
    """Bytes that a matrix of so many weights takes."""
    return sum(map(_align, _part_sizes(numel, kind)))


def _split(packed: Tensor, numel: int, kind: QuantizedKind) -> list[Tensor]:
    """The parts, as views."""
    sizes = _part_sizes(numel, kind)
    starts = [0, *itertools.accumulate(map(_align, sizes))]
    return [packed[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _functional() -> Any:
    require("bitsandbytes")
    return require("bitsandbytes.functional")


_maps: dict[tuple[str, torch.device], Tensor] = {}


def _code_map(name: str, device: torch.device) -> Tensor:
    """The 256 values of an 8-bit code."""
    if (name, device) not in _maps:
        functional = _functional()
        made = (
            functional.create_linear_map(signed=True)
            if name == "linear"
            else functional.create_dynamic_map()
        )
        _maps[name, device] = made.to(device)
    return _maps[name, device]


@torch.no_grad()
def quantize(weight: Tensor, kind: QuantizedKind) -> Tensor:
    """Packs a matrix.

    Args:
        weight: Any shape, floating point.
        kind: How.

    Returns:
        uint8, one dimension.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """
    functional = _functional()
    weight = weight.detach().float().contiguous()
    if kind == "nf4":
        codes, state = functional.quantize_4bit(
            weight, blocksize=_BLOCK[kind], compress_statistics=True, quant_type="nf4"
        )
        parts = [state.offset, state.state2.absmax, state.absmax, codes]
    else:
        codes, state = functional.quantize_blockwise(
            weight, code=_code_map("linear", weight.device), blocksize=_BLOCK[kind]
        )
        parts = [state.absmax, codes]
    packed = torch.zeros(
        count_packed_bytes(weight.numel(), kind), dtype=torch.uint8, device=weight.device
    )
    for place, part in zip(_split(packed, weight.numel(), kind), parts, strict=True):
        place.copy_(part.contiguous().flatten().view(torch.uint8))
    return packed


@torch.no_grad()
def dequantize(
    packed: Tensor, shape: torch.Size, kind: QuantizedKind, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The matrix that a packed one stands for.

    Args:
        packed: From :func:`quantize`.
        shape: Of the matrix.
        kind: As it was packed.
        dtype: Of the result.
    """
    functional = _functional()
    parts = _split(packed.detach(), shape.numel(), kind)
    if kind == "int8":
        state = functional.QuantState(
            absmax=parts[0].view(torch.float32),
            code=_code_map("linear", packed.device),
            blocksize=_BLOCK[kind],
            dtype=dtype,
        )
        whole: Tensor = functional.dequantize_blockwise(parts[1], state)
        return whole.view(shape)
    offset, scale_scales, scales, codes = parts
    scale_state = functional.QuantState(
        absmax=scale_scales.view(torch.float32),
        code=_code_map("dynamic", packed.device),
        blocksize=_SCALE_BLOCK,
        dtype=torch.float32,
    )
    state = functional.QuantState(
        absmax=scales,
        shape=shape,
        blocksize=_BLOCK[kind],
        quant_type="nf4",
        dtype=dtype,
        offset=offset.view(torch.float32),
        state2=scale_state,
    )
    matrix: Tensor = functional.dequantize_4bit(codes.unsqueeze(-1), state)
    return matrix


class _Product(torch.autograd.Function):
    """``F.linear`` with a packed matrix: it is unpacked for each pass, and only the packed one is kept between them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, shape: torch.Size, kind: Any
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape, ctx.kind = shape, kind
        return F.linear(x, dequantize(packed, shape, kind, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (packed,) = ctx.saved_tensors
        weight = dequantize(packed, ctx.shape, ctx.kind, gradient.dtype)
        return gradient @ weight, None, None, None, None


class QuantizedLinear(nn.Module):
    """A linear layer with packed weights, which pass gradients on and have none.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
        kind: How the weights are packed.
        bias: Whether a bias, not packed, is added.
    """

    def __init__(
        self, in_features: int, out_features: int, *, kind: QuantizedKind, bias: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = in_features, out_features, kind
        self.shape = torch.Size((out_features, in_features))
        self.packed = nn.Parameter(
            torch.empty(count_packed_bytes(self.shape.numel(), kind), dtype=torch.uint8),
            requires_grad=False,
        )
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @property
    def weight(self) -> Tensor:
        """The matrix that the packed one stands for; (out_features, in_features) float32, made anew at each call."""
        return dequantize(self.packed, self.shape, self.kind)

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies.

        Args:
            x: (..., in_features), in the type in which the product is computed; autocast changes it.

        Returns:
            (..., out_features).
        """
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
            bias = None if bias is None else bias.to(x.dtype)
        product: Tensor = _Product.apply(x, self.packed, bias, self.shape, self.kind)
        return product
