"""Folders that hold a decoder: of Hugging Face, checkpoints and runs of ours, and adapters with the base they name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from nemo_like.core.checkpoint import open_checkpoint
from nemo_like.core.errors import CheckpointError
from nemo_like.optim.ema import read_weights
from nemo_like.text.tokenizer import Tokenizer

from ..hf_folder import open_hf_folder
from .config import DecoderConfig, RopeScalingConfig
from .convert import list_shapes
from .network import DecoderNetwork

if TYPE_CHECKING:
    from ..adapters.base_model import BaseModel

SHAPE_FILE = "network.json"
"""File of a checkpoint that says the shape of its network."""


@dataclass
class DecoderSource:
    """What a folder holds: shape, tokenizer, and ways to its weights."""

    shape: DecoderConfig
    tokenizer: Tokenizer | None
    read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    """Reads some of the weights, by the names of the network, so that a large model need not be in memory at once."""
    folder: Path
    """Where it lies; of a run its newest checkpoint."""
    fill: Callable[[DecoderNetwork], Any]
    """Fills a network of this shape in place."""

    def identify(self) -> BaseModel:
        """Where the weights lie and their hash; reads all of a Hugging Face folder."""
        from ..adapters.base_model import BaseModel, hash_weights

        return BaseModel(str(self.folder), hash_weights(self.folder))


def open_source(
    folder: Path, *, base: Path | None = None, weights: Literal["model", "ema"] = "model"
) -> DecoderSource:
    """Opens a Hugging Face folder, a checkpoint of ours, the newest one of a run folder, or an adapter.

    An adapter (a folder of peft, a checkpoint of an adapter run) is merged into its base as it is read.

    Args:
        folder: Which.
        base: Base of an adapter; None takes the folder that the adapter names.
        weights: Of a checkpoint: the weights, or their moving average (``optim.ema_decay``).

    Raises:
        CheckpointError: It is none of them, an adapter of another base, or keeps no moving average.
    """
    from ..adapters.folder import find_newest, is_adapter_folder

    is_hf = (folder / "config.json").is_file()
    if weights == "ema" and (is_hf or is_adapter_folder(find_newest(folder))):
        raise CheckpointError(
            f"{folder}: weights=ema: only checkpoints of whole models keep an average; take weights=model"
        )
    if is_hf:
        shape, read_hf = open_hf_folder(folder)
        return DecoderSource(
            shape,
            _find_tokenizer(folder),
            read_hf,
            folder,
            # What is read lies in the files until it is copied.
            fill=lambda network: network.load_state_dict(read_hf(list(list_shapes(shape)))),
        )
    folder = find_newest(folder)
    if is_adapter_folder(folder):
        return _open_adapted(folder, base)
    checkpoint = open_checkpoint(folder)
    values = json.loads(checkpoint.read_file(SHAPE_FILE))
    if values.get("rope_scaling") is not None:
        values["rope_scaling"] = RopeScalingConfig(**values["rope_scaling"])

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        full_names = [f"network.{name}" for name in names]
        tensors = read_weights(checkpoint, full_names, weights=weights)
        return {name.removeprefix("network."): tensor for name, tensor in tensors.items()}

    def fill(network: DecoderNetwork) -> None:
        if weights == "ema":
            network.load_state_dict(read(list(network.state_dict())))
            return
        state = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
        checkpoint.load_tensors("model", state)

    return DecoderSource(DecoderConfig(**values), _find_tokenizer(folder), read, folder, fill)


def _find_tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None


def _open_adapted(folder: Path, base: Path | None) -> DecoderSource:
    from ..adapters.folder import explain_missing_base, find_base_path, open_adapter

    path = base or Path(find_base_path(folder))
    if not path.is_dir():
        raise CheckpointError(explain_missing_base(folder, path))
    plain = open_source(path)
    adapter = open_adapter(folder, plain.shape)
    adapter.base.refuse_other(plain.identify(), source=str(folder))

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        return adapter.lora.read_merged(plain.shape, plain.read, adapter.tensors, names)

    def fill(network: DecoderNetwork) -> None:
        plain.fill(network)
        state = network.state_dict()
        for name in state:
            if f"{name.removesuffix('.weight')}.lora_a" in adapter.tensors or adapter.lora.quantize:
                state[name].copy_(read([name])[name])

    tokenizer = _find_tokenizer(folder) or plain.tokenizer
    return DecoderSource(plain.shape, tokenizer, read, folder, fill)
