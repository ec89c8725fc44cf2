"""Quantised inference: the matrices of the blocks in a byte a weight.

Embeddings, output matrix, norms and biases stay as they are. Rows of an embedding are looked up, not multiplied; the
output matrix, often the same one, decides about the logits, where nothing that follows averages an error away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from nemo_like.core.errors import ConfigError
from nemo_like.core.units import format_count
from nemo_like.nn.byte_linear import BYTE_KINDS, ByteKind, ByteLinear
from nemo_like.nn.linear import Linear
from nemo_like.nn.lora import LoraLinear
from nemo_like.nn.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from .decoder.network import DecoderNetwork


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What was quantised, and what it saves."""

    kind: ByteKind
    num_matrices: int
    num_weights: int
    """Of these matrices."""
    num_parameters: int
    """Of the whole network."""
    bytes_before: int
    """Of all tensors: in memory, and but for a header in a file of safetensors."""
    bytes_after: int

    def describe(self) -> str:
        """A line for the terminal."""
        return (
            f"{self.kind}: {self.num_matrices} matrices, {format_count(self.num_weights)} of "
            f"{format_count(self.num_parameters)} parameters; weights {self.bytes_before / 1e6:.1f} MB -> "
            f"{self.bytes_after / 1e6:.1f} MB ({self.bytes_before / self.bytes_after:.2f}x smaller)"
        )


def quantize_network(network: DecoderNetwork, kind: str) -> Quantization:
    """Replaces the matrices of all blocks, in place; the network is for inference from then on.

    Args:
        network: With plain weights: adapters are merged first, as loading a folder does.
        kind: One of ``int8``, ``int8-dynamic``, ``fp8``.

    Raises:
        ConfigError: There is no such kind, or the network is quantised already, or has an adapter.
    """
    known = check_kind(kind)
    for name, module in network.named_modules():
        if isinstance(module, ByteLinear | QuantizedLinear):
            raise ConfigError([f"quantize={kind}: {name} is quantised already ({module.kind})"])
        if isinstance(module, LoraLinear):
            raise ConfigError([f"quantize={kind}: {name} has an adapter; merge it first"])
    network.eval()
    before = count_bytes(network)
    num_parameters = sum(it.numel() for it in network.parameters())
    matrices = [
        (parent, name, child)
        for parent in network.layers.modules()
        for name, child in parent.named_children()
        if isinstance(child, Linear)
    ]
    for parent, name, child in matrices:
        setattr(parent, name, ByteLinear(child.weight, child.bias, known))
    return Quantization(
        kind=known,
        num_matrices=len(matrices),
        num_weights=sum(child.weight.numel() for _, _, child in matrices),
        num_parameters=num_parameters,
        bytes_before=before,
        bytes_after=count_bytes(network),
    )


def check_kind(kind: str) -> ByteKind:
    """The kind of this name.

    Raises:
        ConfigError: There is none.
    """
    known = next((it for it in BYTE_KINDS if it == kind), None)
    if known is None:
        raise ConfigError([f"quantize={kind}: must be one of {', '.join(BYTE_KINDS)}"])
    return known


def count_bytes(network: nn.Module) -> int:
    """Bytes of all weights, each counted once."""
    tensors: dict[int, Tensor] = {it.data_ptr(): it for it in network.state_dict().values()}
    return sum(it.nbytes for it in tensors.values())
