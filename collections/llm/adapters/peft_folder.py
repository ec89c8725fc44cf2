"""Adapters as folders that ``peft`` opens: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_like.core.errors import CheckpointError

from ..decoder.config import DecoderConfig
from .base_model import BaseModel
from .config import ALL_LINEAR
from .lora import Lora, hf_module, list_matrices, match_regex

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KINDS = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}
"""Our name of a parameter -> peft's."""
_UNDERSTOOD = {
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "use_rslora",
    "use_dora",
    "layers_to_transform",
    "base_model_name_or_path",
    "peft_type",
}
# Keys that change nothing of what a trained adapter computes.
_IGNORED = {
    "task_type",
    "peft_version",
    "auto_mapping",
    "revision",
    "inference_mode",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "layers_pattern",
    "eva_config",
    "lora_ga_config",
    "ensure_weight_tying",
}
_SAFE_STARTS = (True, False, "gaussian", "eva", "orthogonal", "lora_ga")
"""Values of ``init_lora_weights`` that leave the base as it is."""


def save_peft_folder(
    path: str | Path,
    lora: Lora,
    shape: DecoderConfig,
    adapters: Mapping[str, Tensor],
    *,
    base: BaseModel,
) -> Path:
    """Writes a folder that ``peft.PeftModel.from_pretrained`` opens; it appears by one rename.

    Args:
        path: The folder to make.
        lora: The adapters' configuration.
        shape: Of the base.
        adapters: Their parameters, by name.
        base: What they were trained on; its hash goes into the metadata of the weights.

    Returns:
        The folder.

    Raises:
        CheckpointError: The folder exists, or the parameters are not those of ``lora``.
    """
    from safetensors.torch import save_file

    folder = Path(path)
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; choose another name or remove it")
    lora.check_adapters(shape, {name: it.shape for name, it in adapters.items()}, source="adapters")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        config = _to_peft_config(lora, shape, base)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        tensors = {
            _to_peft_name(name): tensor.detach().to("cpu", torch.float32).contiguous()
            for name, tensor in adapters.items()
        }
        metadata = {"format": "pt", "base_path": base.path}
        if base.sha256 is not None:
            metadata["base_sha256"] = base.sha256
        save_file(tensors, partial / WEIGHTS, metadata=metadata)
        # safetensors makes files that only their owner can read; they get the mode of any other file.
        (partial / WEIGHTS).chmod((partial / CONFIG).stat().st_mode)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return folder


def _to_peft_name(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{_PREFIX}{hf_module(layer)}.{_KINDS[kind]}"


def _to_peft_config(lora: Lora, shape: DecoderConfig, base: BaseModel) -> dict[str, Any]:
    targets = [hf_module(name) for name in lora.find_targets(shape)]
    leaves = sorted({name.rpartition(".")[2] for name in targets})
    # The short form means those layers of every block.
    is_everywhere = len(targets) == len(leaves) * shape.num_layers
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": leaves if is_everywhere else targets,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }


def read_peft_config(path: str | Path) -> dict[str, Any]:
    """The content of a folder's ``adapter_config.json``.

    Raises:
        CheckpointError: It is missing, no JSON, or holds settings that are not supported; all are listed.
    """
    file = Path(path) / CONFIG
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing; a folder of an adapter has one") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: no JSON ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: holds a {type(config).__name__}, an object was expected")
    faults = [f"{name}: is missing" for name in ("r", "target_modules") if not config.get(name)]
    if config.get("peft_type", "LORA") != "LORA":
        faults.append(f"peft_type={config['peft_type']!r}: only 'LORA' is supported")
    if config.get("bias", "none") != "none":
        faults.append(f"bias={config['bias']!r}: only 'none' is supported")
    start = config.get("init_lora_weights", True)
    if start not in _SAFE_STARTS:
        faults.append(f"init_lora_weights={start!r}: changes the base; convert it with peft first")
    known = {*_UNDERSTOOD, *_IGNORED, "bias", "init_lora_weights"}
    faults += [
        f"{name}={value!r}: is not supported"
        for name, value in config.items()
        if name not in known and value
    ]
    if faults:
        raise CheckpointError("\n  ".join([f"{file}: cannot be used here", *faults]))
    return config


def load_peft_folder(
    path: str | Path, shape: DecoderConfig
) -> tuple[Lora, dict[str, Tensor], BaseModel]:
    """Reads a folder of ``peft`` (or of ours).

    Args:
        path: The folder.
        shape: Of the base.

    Returns:
        The configuration, the parameters by name, and the base as far as the folder knows it.

    Raises:
        CheckpointError: A file is missing or damaged, a setting is not supported, or tensors are missing, unexpected
            or of another shape than the configuration says; all are listed, under the names that the file has.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(path)
    config = read_peft_config(folder)
    lora = _from_peft_config(config, shape, source=folder / CONFIG)
    file = folder / WEIGHTS
    if not file.is_file():
        hint = (
            " (a pickled adapter_model.bin is never opened)"
            * (folder / "adapter_model.bin").exists()
        )
        raise CheckpointError(f"{file}: missing{hint}; save the adapter as safetensors")
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        raise CheckpointError(f"{file}: damaged ({error}); fetch or copy it again") from error
    names = {_to_peft_name(name): name for name in lora.list_adapters(shape)}
    missing = [name for name in names if name not in tensors]
    unexpected = [name for name in tensors if name not in names]
    if missing or unexpected:
        raise CheckpointError(
            f"{file}: its tensors do not fit {CONFIG} and the base ({len(missing)} missing, "
            f"{len(unexpected)} unexpected)",
            missing=missing,
            unexpected=unexpected,
        )
    adapters = {ours: tensors[theirs].float() for theirs, ours in names.items()}
    sizes = {name: tensor.shape for name, tensor in adapters.items()}
    lora.check_adapters(shape, sizes, source=str(file))
    base_path = metadata.get("base_path") or str(config.get("base_model_name_or_path") or "")
    return lora, adapters, BaseModel(base_path, metadata.get("base_sha256"))


def _from_peft_config(config: Mapping[str, Any], shape: DecoderConfig, *, source: Path) -> Lora:
    targets = config["target_modules"]
    if targets == ALL_LINEAR:
        targets = [ALL_LINEAR]
    elif isinstance(targets, str):
        targets = match_regex(shape, targets)
        if not targets:
            raise CheckpointError(
                f"{source}: target_modules={config['target_modules']!r} matches no layer of the base"
            )
    layers = config.get("layers_to_transform")
    if layers is not None:
        wanted = {f"layers.{index}." for index in ([layers] if isinstance(layers, int) else layers)}
        chosen = Lora(target_modules=list(targets)).find_targets(shape)
        targets = [name for name in chosen if name[: name.index(".", 7) + 1] in wanted]
    return Lora(
        rank=int(config["r"]),
        alpha=float(config.get("lora_alpha", 8)),
        dropout=float(config.get("lora_dropout", 0.0)),
        target_modules=_shorten(list(targets), shape),
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
    )


def _shorten(targets: list[str], shape: DecoderConfig) -> list[str]:
    """``all-linear`` where it means the same, so that two spellings of one choice compare equal."""
    chosen = Lora(target_modules=targets).find_targets(shape)
    return [ALL_LINEAR] if chosen == list_matrices(shape) else targets
