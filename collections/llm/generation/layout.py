"""How matrices lie in memory, which decides the speed of decoding on a CPU: one token uses every weight once."""
# Shapes: B = rows, D = width, V = vocabulary.

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from ..decoder.network import DecoderNetwork

_FEW_ROWS = 2
"""Up to so many rows the columns of the output matrix are faster than its rows; measured with MKL on AVX2."""

# Network -> address and version of its output matrix when the columns were copied, and the columns.
_columns: weakref.WeakKeyDictionary[DecoderNetwork, tuple[tuple[int, int], Tensor]] = (
    weakref.WeakKeyDictionary()
)


@torch.no_grad()
def lay_out_for_decoding(network: DecoderNetwork) -> None:
    """Lays weights out so that decoding on a CPU reads them fastest; no value, shape or name changes.

    Matrices that are at least as wide as long are stored column by column instead of row by row, and the output matrix
    gets a copy of that kind, for it is looked up by rows, too. A product with few rows then adds scaled columns in the
    order of memory instead of making one dot product an output, which MKL does at two thirds of the speed. Elsewhere
    than on a CPU nothing is done.

    Args:
        network: To be read from, not to be trained or saved, afterwards.
    """
    for module in network.modules():
        weight = getattr(module, "weight", None)
        # A quantised weight is a tensor of a class of its own, whose layout is its own affair.
        if not isinstance(module, nn.Linear) or type(weight) is not nn.Parameter:
            continue
        is_plain = weight.device.type == "cpu" and weight.is_floating_point()
        if module is not network.output and is_plain and weight.size(0) >= weight.size(1):
            weight.data = weight.data.t().contiguous().t()
    weight_VD = network.output_weight_VD
    if weight_VD.device.type == "cpu":
        _columns[network] = _identify(weight_VD), weight_VD.detach().t().contiguous()


def project(network: DecoderNetwork, hidden_BD: Tensor) -> Tensor:
    """Logits of hidden states; (B, V)."""
    weight_VD = network.output_weight_VD
    if len(hidden_BD) <= _FEW_ROWS and network in _columns:
        identity, columns_DV = _columns[network]
        if identity == _identify(weight_VD):
            return hidden_BD @ columns_DV
        del _columns[network]  # the weights have changed since
    return F.linear(hidden_BD, weight_VD.to(hidden_BD.dtype))


def _identify(weight_VD: Tensor) -> tuple[int, int]:
    return weight_VD.data_ptr(), weight_VD._version
