"""A decoder with adapters: which layers get one, and where the weights of all its parts come from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.core.errors import CheckpointError, ConfigError, suggest
from nemo_like.nn.linear import Linear
from nemo_like.nn.lora import LoraLinear, merge_lora
from nemo_like.nn.quantized_linear import QuantizedLinear, dequantize, quantize

from ..decoder.config import DecoderConfig
from ..decoder.convert import to_hf_name
from ..decoder.network import DecoderNetwork
from .config import ALL_LINEAR, LoraConfig

Read = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Gives some weights of the base by the names of the plain network, so that a large base need not be in memory."""


class Lora(LoraConfig):
    """Low-rank adapters on the linear layers of the blocks; what the arguments mean stands in ``LoraConfig``.

    Raises:
        ConfigError: A value makes no sense; all faults at once.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if faults := list(self.check()):
            raise ConfigError([f"adapter.{fault}" for fault in faults])

    def describe(self) -> dict[str, Any]:
        """The numbers that decide what the adapted network computes, as plain values."""
        values = dataclasses.asdict(self)
        return {
            name: value for name, value in values.items() if name not in ("dropout", "init_from")
        }

    def refuse_other(self, other: Lora, shape: DecoderConfig, *, source: str) -> None:
        """Compares with the adapter that was trained before.

        Args:
            other: That one.
            shape: Of the network of both.
            source: Where it comes from, for the message.

        Raises:
            CheckpointError: Numbers that decide what is computed differ; all are listed.
        """
        names = ("rank", "alpha", "rslora", "dora", "quantize")
        wrong = [
            f"adapter.{name}={getattr(self, name)}: it is {getattr(other, name)} there"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]
        if self.find_targets(shape) != other.find_targets(shape):
            wrong.append(
                f"adapter.target_modules={self.target_modules}: they are {other.target_modules} there"
            )
        if wrong:
            raise CheckpointError("\n  ".join([f"{source}: holds another adapter:", *wrong]))

    def find_targets(self, shape: DecoderConfig) -> list[str]:
        """Names of the layers that get an adapter, in the order of the network.

        Raises:
            ConfigError: An entry of ``target_modules`` names none; all such entries, with the names that there are.
        """
        names = list_matrices(shape)
        chosen: set[str] = set()
        faults = []
        for entry in self.target_modules:
            found = {name for name in names if _matches(name, entry)}
            if not found:
                leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
                leaves += [hf_module(name).rpartition(".")[2] for name in names[: len(leaves)]]
                faults.append(
                    f"adapter.target_modules: {entry!r} names no matrix of the blocks{suggest(entry, leaves)}; "
                    f"there are: {', '.join(leaves)}, and {ALL_LINEAR}"
                )
            chosen |= found
        if faults:
            raise ConfigError(faults)
        return [name for name in names if name in chosen]

    def build(self, shape: DecoderConfig) -> DecoderNetwork:
        """The network with adapters and without weights, on the meta device; only adapters require a gradient."""
        with torch.device("meta"):
            network = DecoderNetwork(shape).requires_grad_(False)
            targets = set(self.find_targets(shape))
            for name in list_matrices(shape):
                layer = network.get_submodule(name)
                assert isinstance(layer, Linear)
                base: Linear | QuantizedLinear = layer
                if self.quantize is not None:
                    base = QuantizedLinear(
                        layer.in_features,
                        layer.out_features,
                        kind=self.quantize,
                        bias=layer.bias is not None,
                    )
                new: nn.Module = base
                if name in targets:
                    new = LoraLinear(
                        base,
                        rank=self.rank,
                        scaling=self.scaling,
                        dropout=self.dropout,
                        dora=self.dora,
                    )
                parent, _, leaf = name.rpartition(".")
                setattr(network.get_submodule(parent), leaf, new)
        return network

    def make_weights(
        self,
        network: DecoderNetwork,
        read: Read,
        *,
        start: Mapping[str, Tensor] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of an adapted network, one layer after the other; no more than one matrix is in fp32 at once.

        Args:
            network: From :meth:`build`; it is left as it is.
            read: Gives the weights of the base.
            start: The adapters' parameters, by name; None draws them from the global generator of the CPU.
        """
        done: set[str] = set()
        for name, module in network.named_modules():
            if isinstance(module, LoraLinear):
                yield from _make_base(f"{name}.base", name, module.base, read)
                done.add(f"{name}.base")
                if start is None:
                    needs_weight = module.magnitude is not None
                    weight = (
                        _read_stored(name, module.base, read) if needs_weight else torch.empty(0)
                    )
                    drawn = module.draw(weight)
                else:
                    drawn = {
                        it: start[f"{name}.{it}"]
                        for it, _ in module.named_parameters(recurse=False)
                    }
                yield from ((f"{name}.{it}", tensor) for it, tensor in drawn.items())
            elif name not in done:
                yield from _make_base(name, name, module, read)

    def fill(
        self, network: DecoderNetwork, read: Read, *, start: Mapping[str, Tensor] | None = None
    ) -> None:
        """Gives a network of :meth:`build` its weights, on the CPU; the arguments are those of :meth:`make_weights`."""
        for name, tensor in self.make_weights(network, read, start=start):
            parent, _, leaf = name.rpartition(".")
            module = network.get_submodule(parent)
            needs_grad = module.get_parameter(leaf).requires_grad
            setattr(module, leaf, nn.Parameter(tensor, requires_grad=needs_grad))

    def read_merged(
        self, shape: DecoderConfig, read: Read, adapters: Mapping[str, Tensor], names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Some weights of the plain network that computes what the adapted one does.

        What is stored in few bits is unpacked first, so that the adapters are added to what they were trained on.

        Args:
            shape: Of the network.
            read: Gives the weights of the base.
            adapters: The adapters' parameters, by name.
            names: Which weights, by the names of the plain network.
        """
        matrices = set(list_matrices(shape))
        merged = dict(read(names))
        for name in names:
            layer, _, kind = name.rpartition(".")
            if kind != "weight" or layer not in matrices:
                continue
            weight = merged[name]
            if self.quantize is not None:
                weight = dequantize(quantize(weight, self.quantize), weight.shape, self.quantize)
            if f"{layer}.lora_a" in adapters:
                weight = merge_lora(
                    weight,
                    adapters[f"{layer}.lora_a"],
                    adapters[f"{layer}.lora_b"],
                    scaling=self.scaling,
                    magnitude_O=adapters.get(f"{layer}.magnitude"),
                )
            merged[name] = weight
        return merged

    def list_adapters(self, shape: DecoderConfig) -> dict[str, torch.Size]:
        """Names and shapes of the adapters' parameters."""
        return {
            name: parameter.shape
            for name, parameter in self.build(shape).named_parameters()
            if is_adapter(name)
        }

    def check_adapters(
        self, shape: DecoderConfig, found: Mapping[str, torch.Size], *, source: str
    ) -> None:
        """Refuses parameters that are not those of these adapters.

        Args:
            shape: Of the network.
            found: Names and shapes.
            source: Where they come from, for the message.

        Raises:
            CheckpointError: Names are missing or unexpected, or shapes differ; all are listed.
        """
        expected = self.list_adapters(shape)
        missing = [name for name in expected if name not in found]
        unexpected = [name for name in found if name not in expected]
        wrong = [
            f"  {name}: {list(found[name])}, its configuration and the base say {list(size)}"
            for name, size in expected.items()
            if name in found and found[name] != size
        ]
        if missing or unexpected or wrong:
            raise CheckpointError(
                "\n".join(
                    [f"{source}: the adapter's tensors do not fit its configuration", *wrong]
                ),
                missing=missing,
                unexpected=unexpected,
            )


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.rpartition(".")[2] in ("lora_a", "lora_b", "magnitude")


def list_matrices(shape: DecoderConfig) -> list[str]:
    """Names of the linear layers of the blocks, in the order of the network."""
    with torch.device("meta"):
        network = DecoderNetwork(shape)
    return [
        name
        for name, module in network.named_modules()
        if isinstance(module, Linear) and name.startswith("layers.")
    ]


def hf_module(name: str) -> str:
    """What transformers calls a layer: ``layers.0.attention.query`` -> ``model.layers.0.self_attn.q_proj``."""
    return to_hf_name(f"{name}.weight").removesuffix(".weight")


def _matches(name: str, entry: str) -> bool:
    if entry == ALL_LINEAR:
        return True
    for spelling in (name, hf_module(name)):
        if spelling == entry or spelling.endswith(f".{entry}") or fnmatchcase(spelling, entry):
            return True
    return False


def match_regex(shape: DecoderConfig, pattern: str) -> list[str]:
    """Layers whose name in transformers matches a regular expression as a whole, the other spelling of peft."""
    return [name for name in list_matrices(shape) if re.fullmatch(pattern, hf_module(name))]


def _read_stored(name: str, layer: nn.Module, read: Read) -> Tensor:
    """The weight of a frozen layer as it will be after it was packed; float32."""
    weight = read([f"{name}.weight"])[f"{name}.weight"].float()
    if isinstance(layer, QuantizedLinear):
        return dequantize(quantize(weight, layer.kind), layer.shape, layer.kind)
    return weight


def _make_base(
    prefix: str, name: str, module: nn.Module, read: Read
) -> Iterator[tuple[str, Tensor]]:
    """The frozen parameters of one module.

    Args:
        prefix: Its name in the adapted network.
        name: Its name in the plain one.
        module: It.
        read: Gives the weights of the base.
    """
    for kind, _ in module.named_parameters(recurse=False):
        source = f"{name}.{'weight' if kind == 'packed' else kind}"
        tensor = read([source])[source]
        if kind == "packed":
            assert isinstance(module, QuantizedLinear)
            yield f"{prefix}.{kind}", quantize(tensor, module.kind)
        else:
            # A copy: what is read may lie in the file itself.
            yield f"{prefix}.{kind}", tensor.to(torch.float32, copy=True)
