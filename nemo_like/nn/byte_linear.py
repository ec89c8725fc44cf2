"""Linear layers for inference whose weights take a byte each: INT8 with or without INT8 activations, and FP8.

A row of a matrix, which makes one output channel, has its own scale; there are no zero points. So
``weight ~ codes * scales[:, None]``, and the error of a weight is at most half a step: ``scale / 2`` for INT8, 1/16 of
the weight (or ``scale / 1024``, if that is more) for FP8 E4M3 (Micikevicius et al. 2022, arXiv:2209.05433).
"""
# Shapes: O = outputs, I = inputs, N = rows of the input.

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ByteKind = Literal["int8", "int8-dynamic", "fp8"]
"""``int8``: weights. ``int8-dynamic``: activations, too, each row with a scale of its own, multiplied as integers
(the vector-wise scheme of Dettmers et al. 2022, arXiv:2208.07339, without its outliers). ``fp8``: weights in E4M3,
which are widened for the product, whatever the hardware has."""

BYTE_KINDS: tuple[ByteKind, ...] = ("int8", "int8-dynamic", "fp8")
_LARGEST = {"int8": 127.0, "int8-dynamic": 127.0, "fp8": 448.0}
_FEWEST_CUDA_ROWS = 32
"""CUDA's integer product takes more than 16 rows."""


@torch.no_grad()
def quantize_rows(weight_OI: Tensor, kind: ByteKind) -> tuple[Tensor, Tensor]:
    """Rounds a matrix.

    Args:
        weight_OI: Floating point; must be finite.
        kind: How.

    Returns:
        Codes (O, I), int8 or float8_e4m3fn, and scales (O), float32.

    Raises:
        ValueError: A weight is not finite.
    """
    weight_OI = weight_OI.detach().float()
    largest_O = weight_OI.abs().amax(dim=1)
    if not bool(largest_O.isfinite().all()):
        raise ValueError(f"a weight is not finite in {int((~largest_O.isfinite()).sum())} rows")
    # A row of zeros has any scale.
    scales_O = torch.where(largest_O > 0, largest_O / _LARGEST[kind], 1.0)
    scaled_OI = weight_OI / scales_O.unsqueeze(1)
    if kind == "fp8":
        # The largest may have been rounded to above 448, which E4M3 has no number for.
        codes_OI = scaled_OI.clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        codes_OI = scaled_OI.round().clamp(-127, 127).to(torch.int8)
    return codes_OI, scales_O


def widen_fp8(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 in a wider type; torch's own conversion on a CPU takes longer than the product.

    Args:
        codes: float8_e4m3fn, without NaN.
        dtype: float16, or one with at least its range.
    """
    if codes.device.type != "cpu":
        return codes.to(dtype)
    # Exponent and mantissa are moved to their places in float16, whose exponent is counted from 8 higher.
    bits = codes.view(torch.int8).to(torch.int16)
    bits <<= 8
    bits >>= 1  # copies the sign into the highest bit of the exponent, which E4M3 does not reach
    bits &= ~0x4000
    return bits.view(torch.float16).to(dtype) * 256


def multiply_by_integers(codes_NI: Tensor, codes_OI: Tensor) -> Tensor:
    """Product of int8 matrices; (N, O), int32."""
    num_rows = len(codes_NI)
    if codes_NI.is_cuda and num_rows < _FEWEST_CUDA_ROWS:
        codes_NI = F.pad(codes_NI, (0, 0, 0, _FEWEST_CUDA_ROWS - num_rows))
    return torch._int_mm(codes_NI, codes_OI.t())[:num_rows]


def multiply_by_floats(codes_NI: Tensor, codes_OI: Tensor) -> Tensor:
    """The same numbers, bit for bit, from the units that multiply floats; (N, O), int32.

    A sum of up to 1024 products of int8 stays below 2 ** 24, where float32 holds every integer.
    """
    sums_NO: Tensor | None = None
    pairs = zip(codes_NI.split(1024, dim=1), codes_OI.split(1024, dim=1), strict=True)
    for left_NI, right_OI in pairs:
        part_NO = F.linear(left_NI.float(), right_OI.float()).to(torch.int32)
        sums_NO = part_NO if sums_NO is None else sums_NO + part_NO
    assert sums_NO is not None, "there is an input"
    return sums_NO


def _has_integer_units(device: torch.device) -> bool:
    """Whether the integer product is the faster one; on a CPU without VNNI it takes twenty times as long."""
    return device.type == "cuda" or (device.type == "cpu" and torch.cpu._is_vnni_supported())


class ByteLinear(nn.Module):
    """A linear layer with a byte a weight, for inference only.

    Args:
        weight_OI: The matrix that is rounded.
        bias: Is kept as it is; None is none.
        kind: How.

    Raises:
        ValueError: A weight is not finite.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight_OI: Tensor, bias: Tensor | None, kind: ByteKind) -> None:
        super().__init__()
        codes_OI, scales_O = quantize_rows(weight_OI, kind)
        self.kind: ByteKind = kind
        self.register_buffer("codes", codes_OI)
        self.register_buffer("scales", scales_O)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        super().train(False)

    def dequantize(self) -> Tensor:
        """The matrix that the codes stand for; (O, I), float32."""
        return self.codes.float() * self.scales.unsqueeze(1)

    def train(self, mode: bool = True) -> ByteLinear:
        """Stays in evaluation mode.

        Raises:
            RuntimeError: Training is asked for.
        """
        if mode:
            raise RuntimeError(
                f"quantize={self.kind}: a quantised model is for inference; load it anew to train it"
            )
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies.

        Args:
            x: (..., I), floating point.

        Returns:
            (..., O), in the type of ``x``.
        """
        x_NI = x.reshape(-1, x.size(-1))
        if self.kind == "int8-dynamic":
            product_NO = self._multiply_integers(x_NI)
        else:
            product_NO = self._multiply(x_NI)
        if self.bias is not None:
            product_NO = product_NO + self.bias.to(x.dtype)
        return product_NO.reshape(*x.shape[:-1], -1)

    def _multiply(self, x_NI: Tensor) -> Tensor:
        widen = widen_fp8 if self.kind == "fp8" else torch.Tensor.to
        return F.linear(x_NI, widen(self.codes, x_NI.dtype)) * self.scales.to(x_NI.dtype)

    def _multiply_integers(self, x_NI: Tensor) -> Tensor:
        largest_N1 = x_NI.float().abs().amax(dim=1, keepdim=True)
        steps_N1 = torch.where(largest_N1 > 0, largest_N1 / 127, 1.0)
        codes_NI = (x_NI.float() / steps_N1).round().clamp(-127, 127).to(torch.int8)
        multiply = multiply_by_integers if _has_integer_units(x_NI.device) else multiply_by_floats
        return (multiply(codes_NI, self.codes) * steps_N1 * self.scales).to(x_NI.dtype)

    def extra_repr(self) -> str:
        """Shape and kind, for printing."""
        outputs, inputs = self.codes.shape
        return f"{inputs}, {outputs}, kind={self.kind}, bias={self.bias is not None}"
