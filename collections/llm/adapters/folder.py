"""Adapters on disk: a folder of peft, or a checkpoint of an adapter run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_like.core.checkpoint import Checkpoint, find_checkpoints, open_checkpoint
from nemo_like.core.errors import CheckpointError

from ..decoder.config import DecoderConfig
from ..decoder.network import DecoderNetwork
from .base_model import ADAPTER_FILE, BaseModel
from .lora import Lora
from .peft_folder import CONFIG, load_peft_folder, read_peft_config, save_peft_folder

_PREFIX = "network."


@dataclass(frozen=True)
class Adapter:
    """A trained adapter: what it is, its parameters, and its base."""

    lora: Lora
    """Its configuration."""
    tensors: dict[str, Tensor]
    """Its parameters, by name."""
    base: BaseModel
    """What it was trained on."""


def describe_adapter(lora: Lora, base: BaseModel) -> bytes:
    """The content of ``adapter.json`` in a checkpoint."""
    content = {"lora": lora.describe(), "base": {"path": base.path, "sha256": base.sha256}}
    return (json.dumps(content, indent=1) + "\n").encode()


def find_newest(folder: Path) -> Path:
    """The newest checkpoint where a folder is that of a run, else the folder.

    Raises:
        CheckpointError: The run has saved nothing yet.
    """
    if not (folder / "checkpoints").is_dir():
        return folder
    saved = find_checkpoints(folder / "checkpoints")
    if not saved:
        raise CheckpointError(f"{folder}: has no whole checkpoint yet")
    return saved[-1]


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    return (folder / CONFIG).is_file() or (folder / ADAPTER_FILE).is_file()


def find_base_path(folder: Path) -> str:
    """Where an adapter says that its base lies.

    Raises:
        CheckpointError: It does not say so, or its files are damaged.
    """
    if (folder / CONFIG).is_file():
        path = read_peft_config(folder).get("base_model_name_or_path")
    else:
        path = _read_description(open_checkpoint(folder, verify=False))["base"]["path"]
    if not path:
        raise CheckpointError(f"{folder}: does not say what base it belongs to; name it")
    return str(path)


def open_adapter(folder: str | Path, shape: DecoderConfig) -> Adapter:
    """Reads an adapter.

    Args:
        folder: Of peft, or a checkpoint of an adapter run.
        shape: Of the base.

    Raises:
        CheckpointError: It is neither, is damaged, or does not fit the base; names are listed.
    """
    folder = find_newest(Path(folder))
    if (folder / CONFIG).is_file():
        return Adapter(*load_peft_folder(folder, shape))
    checkpoint = open_checkpoint(folder)
    description = _read_description(checkpoint)
    lora = Lora(**description["lora"])
    read = checkpoint.read_tensors("model", checkpoint.tensor_names("model"))
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in read.items()}
    lora.check_adapters(shape, {name: it.shape for name, it in tensors.items()}, source=str(folder))
    return Adapter(lora, tensors, BaseModel(**description["base"]))


def _read_description(checkpoint: Checkpoint) -> dict[str, Any]:
    if not (checkpoint.folder / ADAPTER_FILE).is_file():
        raise CheckpointError(
            f"{checkpoint.folder}: is no adapter: it has neither {CONFIG} nor {ADAPTER_FILE}"
        )
    description: dict[str, Any] = json.loads(checkpoint.read_file(ADAPTER_FILE))
    return description


def merge_adapter(
    folder: Path, out: Path, *, base: Path | None = None, dtype: torch.dtype | None = None
) -> Path:
    """Writes the base with an adapter added as a Hugging Face folder; weights are merged one file after the other.

    Args:
        folder: The adapter: of peft, a checkpoint, or a run.
        out: Folder to make.
        base: Folder of the base; None takes the one that the adapter names.
        dtype: Type of the written weights; None is float32.

    Raises:
        CheckpointError: There is no adapter, its base is missing or another one, or ``out`` exists.
    """
    from ..decoder.source import open_source
    from ..hf_folder import save_hf_folder

    folder = _require_adapter(folder)
    source = open_source(folder, base=base)
    tokenizer = source.tokenizer
    # Names and shapes; the weights are read file by file.
    with torch.device("meta"):
        state = DecoderNetwork(source.shape).state_dict()
    return save_hf_folder(
        out,
        source.shape,
        state,
        tokenizer_files=tokenizer.to_bytes() if tokenizer else None,
        bos_token_id=tokenizer.bos_id if tokenizer else None,
        eos_token_id=tokenizer.eos_id if tokenizer else None,
        dtype=dtype or torch.float32,
        read=source.read,
    )


def export_adapter(folder: Path, out: Path, *, base: Path | None = None) -> Path:
    """Writes an adapter alone as a folder of peft; the arguments are those of :func:`merge_adapter`."""
    from ..decoder.source import open_source

    folder = _require_adapter(folder)
    path = base or Path(find_base_path(folder))
    if not path.is_dir():
        raise CheckpointError(explain_missing_base(folder, path))
    plain = open_source(path)
    adapter = open_adapter(folder, plain.shape)
    found = plain.identify()
    adapter.base.refuse_other(found, source=str(folder))
    return save_peft_folder(out, adapter.lora, plain.shape, adapter.tensors, base=found)


def _require_adapter(folder: Path) -> Path:
    folder = find_newest(folder)
    if not is_adapter_folder(folder):
        raise CheckpointError(
            f"{folder}: is no adapter: it has neither {CONFIG} nor {ADAPTER_FILE}"
        )
    return folder


def explain_missing_base(folder: Path, base: Path) -> str:
    """What to say where the base that an adapter names is not here."""
    return (
        f"{folder}: is an adapter of the base {str(base)!r}, which is no folder here; "
        "name the base's folder (--base FOLDER)"
    )
