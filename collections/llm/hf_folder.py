"""Folders that Hugging Face transformers opens: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_like.core.errors import CheckpointError

from .decoder.config import DecoderConfig
from .decoder.convert import (
    TIED_OUTPUT,
    check_hf_names,
    check_tied_output,
    config_from_hf,
    config_to_hf,
    list_shapes,
    state_to_hf,
    to_hf_name,
)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
"""Size above which weights are cut into several files, the habit of the Hugging Face hub."""


def load_hf_folder(path: str | Path) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Reads the shape and the weights of a folder.

    Names and shapes are compared with the configuration before the first tensor is read.

    Args:
        path: The folder, with ``config.json`` and ``model.safetensors`` or its sharded form.

    Returns:
        The shape, and the weights under our names, in the type in which they are stored.

    Raises:
        CheckpointError: A file is missing or damaged, weights are pickled, or they do not fit the configuration.
        ConfigError: The configuration is not supported.
    """
    config, read = open_hf_folder(path)
    return config, read(list(list_shapes(config)))


def open_hf_folder(
    path: str | Path,
) -> tuple[DecoderConfig, Callable[[Sequence[str]], dict[str, Tensor]]]:
    """Reads the shape of a folder; the weights are read when they are asked for, by our names.

    Raises:
        CheckpointError: As :func:`load_hf_folder`; a file that is damaged where its tensors lie is found by reading.
        ConfigError: Likewise.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(path)
    config_file = folder / "config.json"
    config = config_from_hf(_read_json(config_file), source=str(config_file))
    places: dict[str, Path] = {}
    shapes: dict[str, list[int]] = {}

    def read_stored(names: Sequence[str]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for file in dict.fromkeys(places[name] for name in names):
            try:
                with safe_open(file, framework="pt") as opened:
                    state |= {it: opened.get_tensor(it) for it in names if places[it] == file}
            except SafetensorError as error:
                raise _damaged(file, error) from error
        return state

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        state = read_stored([to_hf_name(name) for name in names])
        return {name: state[to_hf_name(name)] for name in names}

    for file in list_weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    shapes[name], places[name] = opened.get_slice(name).get_shape(), file
        except SafetensorError as error:
            raise _damaged(file, error) from error
    check_hf_names(shapes, config, source=str(folder))
    if config.tie_embeddings and TIED_OUTPUT in places:
        check_tied_output(
            read_stored([TIED_OUTPUT, to_hf_name("embedding.weight")]), source=str(folder)
        )
    return config, read


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file}: damaged ({error}); fetch or copy it again")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing; a Hugging Face folder has one") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: no JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, an object was expected")
    return content


def list_weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a folder.

    Raises:
        CheckpointError: There are none, or only pickled ones.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        names = sorted(set(_read_json(folder / INDEX).get("weight_map", {}).values()))
        outside = [name for name in names if Path(name).name != name]
        if outside or not names:
            raise CheckpointError(
                f"{folder / INDEX}: weight_map must name files of this folder, not {outside}"
            )
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise CheckpointError(
                f"{folder}: {INDEX} names files that are not there", missing=missing
            )
        return [folder / name for name in names]
    pickled = sorted(
        file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)
    )
    if pickled:
        raise CheckpointError(
            f"{folder}: the weights are pickled ({', '.join(pickled)}), and opening a pickle runs the code in it. "
            "If you trust the folder, convert it once: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder) writes safetensors"
        )
    raise CheckpointError(f"{folder}: has neither {WEIGHTS} nor {INDEX}")


def save_hf_folder(
    path: str | Path,
    config: DecoderConfig,
    state: Mapping[str, Tensor],
    *,
    tokenizer_files: Mapping[str, bytes] | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    read: Callable[[Sequence[str]], Mapping[str, Tensor]] | None = None,
) -> Path:
    """Writes a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` open.

    The folder appears under its name when it is complete, by one rename.

    Args:
        path: The folder to make.
        config: The shape.
        state: The weights under our names.
        tokenizer_files: File name -> content. A ``tokenizer_config.json`` is added to a lone ``tokenizer.json``.
        bos_token_id: Token that starts a document, if there is one.
        eos_token_id: Token that ends a document, at which generation stops.
        dtype: Type of the written weights; None keeps each as it is.
        max_shard_bytes: Weights beyond this size are cut into several files.
        read: Gives weights by our names when their file is written, so that ``state`` may be on the meta device; None
            takes those of ``state``.

    Returns:
        The folder.

    Raises:
        CheckpointError: The folder exists, or the weights are not those of ``config``.
        ConfigError: No family of transformers has this shape.
    """
    folder = Path(path)
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; choose another name or remove it")
    hf_config = config_to_hf(config)
    special = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
    hf_state = state_to_hf(state, config)
    written = dtype or next(iter(hf_state.values())).dtype
    hf_config |= {**special, "torch_dtype": str(written).removeprefix("torch.")}
    files = dict(tokenizer_files or {})
    if "tokenizer.json" in files and "tokenizer_config.json" not in files:
        files["tokenizer_config.json"] = _build_tokenizer_config(
            files["tokenizer.json"], config, special
        )
    files["config.json"] = _to_json(hf_config)
    files["generation_config.json"] = _to_json(special)

    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        for name, content in files.items():
            (partial / name).write_bytes(content)
        _save_weights(
            partial,
            state,
            read=read or (lambda names: {name: state[name] for name in names}),
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return folder


def _to_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _build_tokenizer_config(
    tokenizer_json: bytes, config: DecoderConfig, special: Mapping[str, int | None]
) -> bytes:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    # This class takes tokenizer.json as it is; that of the model's family may put its own rules in its place.
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    for name, token_id in special.items():
        if token_id is not None:
            content[name.removesuffix("_id")] = tokenizer.id_to_token(token_id)
    return _to_json(content)


def _save_weights(
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    read: Callable[[Sequence[str]], Mapping[str, Tensor]],
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    from safetensors.torch import save_file

    def count_bytes(tensor: Tensor) -> int:
        return tensor.numel() * (dtype or tensor.dtype).itemsize

    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, tensor in state.items():
        if shards[-1] and shard_bytes + count_bytes(tensor) > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += count_bytes(tensor)
    weight_map: dict[str, str] = {}
    mode = (folder / "config.json").stat().st_mode
    for number, names in enumerate(shards, start=1):
        file = (
            WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        # One shard at a time, so that a large model is never held twice, or at all.
        tensors = {
            to_hf_name(name): tensor.detach().to("cpu", dtype).contiguous()
            for name, tensor in read(names).items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        # safetensors makes files that only their owner can read; they get the mode of any other file.
        (folder / file).chmod(mode)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total = sum(count_bytes(tensor) for tensor in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_bytes(_to_json(index))
