"""The checkpoint folder: what is in it, how it appears whole, how it is opened.

    step_00000100/
        model/*.safetensors         weights under the names of the single-device network
        optimizer/*.safetensors     <parameter name>/<state name>, e.g. network.norm.weight/exp_avg
        trainer.json                format version, step, position in the data, metrics, states of callbacks
        config.yaml, tokenizer/...  what the weights mean nothing without
        manifest.json               size and SHA-256 of every other file; written last

Tensors go through torch.distributed.checkpoint, so a rank may hand in slices (DTensor) and another plan may read them
back differently cut. Nothing here is ever unpickled. The folder is written under a hidden name and renamed once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.core.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "trainer.json"
_PICKLE_SUFFIXES = (
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".pickle",
    ".bin",
    ".distcp",
    ".metadata",
    ".npy",
    ".joblib",
)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk, its manifest checked."""

    folder: Path
    state: Mapping[str, Any]
    """The content of ``trainer.json``."""

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return int(self.state["step"])

    def read_file(self, name: str) -> bytes:
        """One of the files given to :func:`save_checkpoint`.

        Raises:
            CheckpointError: There is no such file.
        """
        path = self.folder / name
        if not path.is_file():
            raise CheckpointError(
                f"{self.folder}: has no {name}; it holds {sorted(list_files(self.folder))}"
            )
        return path.read_bytes()

    def tensor_names(self, part: str) -> list[str]:
        """Names of the tensors in ``part`` (``model`` or ``optimizer``), sorted."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        if not (self.folder / part).is_dir():
            return []
        return sorted(
            HuggingFaceStorageReader(path=str(self.folder / part))
            .read_metadata()
            .state_dict_metadata
        )

    def read_tensors(self, part: str, names: Sequence[str]) -> dict[str, Tensor]:
        """Reads some tensors, whole, on the CPU.

        Args:
            part: ``model`` or ``optimizer``.
            names: Which.

        Raises:
            CheckpointError: There is no tensor of a name.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        reader = HuggingFaceStorageReader(path=str(self.folder / part))
        found: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
        missing = sorted(set(names) - found.keys())
        if missing:
            raise CheckpointError(f"{self.folder / part}: has no such tensors", missing=missing)
        tensors = {
            name: torch.empty(found[name].size, dtype=found[name].properties.dtype)
            for name in names
        }
        self.load_tensors(part, tensors, elsewhere=found.keys())
        return tensors

    def load_tensors(
        self, part: str, tensors: dict[str, Tensor], *, elsewhere: Collection[str] = ()
    ) -> None:
        """Reads tensors in place; each process reads only the slices that it holds.

        Args:
            part: ``model`` or ``optimizer``.
            tensors: Name -> tensor (or DTensor) to fill.
            elsewhere: Names that belong to the model, too, and are read by other processes.

        Raises:
            CheckpointError: Names or shapes do not fit; lists all of them.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        path = self.folder / part
        metadata: dict[str, Any] = dict(
            HuggingFaceStorageReader(path=str(path)).read_metadata().state_dict_metadata
        )
        expected = tensors.keys() | set(elsewhere)
        missing, unexpected = sorted(expected - metadata.keys()), sorted(metadata.keys() - expected)
        if missing or unexpected:
            raise CheckpointError(
                f"{path}: the names do not fit the model ({len(missing)} missing, {len(unexpected)} unexpected); "
                "was it saved with another model configuration?",
                missing=missing,
                unexpected=unexpected,
            )
        wrong = [
            f"{name}: {tuple(metadata[name].size)} here, {tuple(tensor.shape)} in the model"
            for name, tensor in tensors.items()
            if tuple(metadata[name].size) != tuple(tensor.shape)
        ]
        if wrong:
            raise CheckpointError("\n  ".join([f"{path}: shapes do not fit the model:", *wrong]))
        _run_dcp("load", tensors, HuggingFaceStorageReader(path=str(path)))


def _run_dcp(verb: str, tensors: dict[str, Tensor], storage: Any) -> None:
    """Saves or loads through torch.distributed.checkpoint, on one process or many."""
    import torch.distributed.checkpoint as dcp

    alone = not (dist.is_available() and dist.is_initialized())
    with warnings.catch_warnings():
        # "torch.distributed is disabled, ...": that is what we asked for.
        warnings.filterwarnings(
            "ignore", message=".*assuming the intent is to (save|load) in a single process"
        )
        if verb == "save":
            dcp.save(tensors, storage_writer=storage, no_dist=alone)
        else:
            dcp.load(tensors, storage_reader=storage, no_dist=alone)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def list_files(folder: Path) -> list[str]:
    """All files below a folder, relative, with forward slashes."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def save_checkpoint(
    folder: Path,
    *,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    files: Mapping[str, bytes],
) -> Path:
    """Writes a checkpoint folder; every rank calls it.

    Args:
        folder: Its final name; must not exist yet.
        model: Canonical name -> tensor; on more than one rank either the same everywhere or DTensors.
        optimizer: ``<parameter>/<state>`` -> tensor, likewise.
        state: What goes into ``trainer.json``; plain JSON values.
        files: Relative name -> content of further files, from rank 0.

    Returns:
        ``folder``.

    Raises:
        CheckpointError: The folder exists, or ``state`` holds something that JSON cannot say.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; a checkpoint is never written over")
    try:
        state_json = json.dumps(
            {"format_version": FORMAT_VERSION, **state}, indent=1, allow_nan=True
        )
    except TypeError as error:
        raise CheckpointError(
            f"{folder}: the state of the run must be plain JSON values: {error}"
        ) from error
    hidden = folder.with_name(f".{folder.name}.incomplete")
    if _rank() == 0:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
    _barrier()
    for part, tensors in (("model", model), ("optimizer", optimizer)):
        if tensors:
            contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            _run_dcp(
                "save",
                contiguous,
                HuggingFaceStorageWriter(path=str(hidden / part), save_distributed=True),
            )
    _barrier()
    if _rank() == 0:
        _write(hidden / STATE, state_json.encode())
        for name, content in files.items():
            _write(hidden / name, content)
        entries = {
            name: {"bytes": (hidden / name).stat().st_size, "sha256": _hash_file(hidden / name)}
            for name in sorted(list_files(hidden))
        }
        _write(
            hidden / MANIFEST,
            json.dumps({"format_version": FORMAT_VERSION, "files": entries}, indent=1).encode(),
        )
        hidden.rename(folder)
    _barrier()
    return folder


def open_checkpoint(folder: Path | str, *, verify: bool = True) -> Checkpoint:
    """Opens a checkpoint folder after checking it against its manifest.

    Args:
        folder: The folder that :func:`save_checkpoint` gave.
        verify: Also compare the SHA-256 of every file (about a second a gigabyte).

    Raises:
        CheckpointError: No such folder, no manifest, a file missing, added, or changed, a file that would have to be
            unpickled, or a format of a later version.
    """
    folder = Path(folder)
    if folder.is_file():
        kind = "a pickle file" if folder.suffix in _PICKLE_SUFFIXES else "a file"
        raise CheckpointError(
            f"{folder}: is {kind}, not a checkpoint folder; nothing is ever unpickled here"
        )
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder")
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder}: has no {MANIFEST}, so it is no whole checkpoint of nemo_like"
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        version, entries = int(manifest["format_version"]), dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: is damaged ({error!r})") from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: has format version {version}, this nemo_like reads up to {FORMAT_VERSION}; upgrade nemo_like"
        )
    faults = _compare_with_manifest(folder, entries, verify=verify)
    if faults:
        raise CheckpointError("\n  ".join([f"{folder}: is not what was saved:", *faults]))
    return Checkpoint(folder=folder, state=json.loads((folder / STATE).read_bytes()))


def _compare_with_manifest(folder: Path, entries: Mapping[str, Any], *, verify: bool) -> list[str]:
    found = set(list_files(folder)) - {MANIFEST}
    faults = [f"{name}: is missing" for name in sorted(entries.keys() - found)]
    for name in sorted(found - entries.keys()):
        hint = (
            " (a pickle; nothing is ever unpickled here)" if name.endswith(_PICKLE_SUFFIXES) else ""
        )
        faults.append(f"{name}: is not in the manifest{hint}")
    for name in sorted(entries.keys() & found):
        size = (folder / name).stat().st_size
        if size != entries[name]["bytes"]:
            faults.append(f"{name}: has {size} bytes, {entries[name]['bytes']} were saved")
        elif verify and _hash_file(folder / name) != entries[name]["sha256"]:
            faults.append(f"{name}: its content changed (SHA-256 differs)")
    return faults


def find_checkpoints(folder: Path | str) -> list[Path]:
    """The whole checkpoints (those with a manifest) in a folder, oldest step first."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.glob("step_*") if (path / MANIFEST).is_file())


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint so that a half-removed one is never taken for a whole one: manifest first."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after ``step`` optimizer steps; sorts like the number."""
    return f"step_{step:08d}"


def to_plain(value: Any) -> Any:
    """Tensors of one element as numbers, containers entered: what a state dict needs to go into JSON."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value)
    return value
