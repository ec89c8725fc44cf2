"""The checkpoint folder: what is in it, how it appears whole, how it is opened.

    step_00000100/
        model/*.safetensors         weights under the names of the single-device network
        optimizer/*.safetensors     <parameter name>/<state name>, e.g. network.norm.weight/exp_avg
        trainer.json                format version, step, time, position in the data, states of callbacks
        config.yaml, tokenizer/...  what the weights mean nothing without
        manifest.json               size and SHA-256 of every other file; written last
        validation.json             figures of the validation of that step, added after it; not in the manifest

Tensors are planned and read by torch.distributed.checkpoint, so a rank may hand in slices (DTensor) and another plan
may read them back differently cut. Nothing here is ever unpickled. The folder is written under a hidden name and
renamed once (:mod:`nemo_like.core.checkpoint_writer`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_like.core.durable import replace
from nemo_like.core.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "trainer.json"
FIGURES = "validation.json"
_NAME = re.compile(r"step_\d+")
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


class DamagedCheckpointError(CheckpointError):
    """A folder that is not what was saved: files are missing, added, or changed."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk, its manifest checked. Nobody removes it while this object lives."""

    folder: Path
    state: Mapping[str, Any]
    """The content of ``trainer.json``; its ``metrics`` are :attr:`figures`."""

    def __post_init__(self) -> None:
        descriptor = os.open(self.folder / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
        # Not every network file system knows locks; there it goes without.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        weakref.finalize(self, os.close, descriptor)

    @property
    def figures(self) -> Mapping[str, float]:
        """Figures of the validation of this step; empty where there was none."""
        figures: Mapping[str, float] = self.state["metrics"]
        return figures

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
        if _can_share(tensors, elsewhere):
            _read_and_share(path, tensors)
        else:
            _read(path, tensors, alone=_world_size() == 1)


def _read(path: Path, tensors: dict[str, Tensor], *, alone: bool) -> None:
    """Fills tensors through torch.distributed.checkpoint, on this process or on all together."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    storage = HuggingFaceStorageReader(path=str(path))
    with warnings.catch_warnings():
        # "torch.distributed is disabled, ...": that is what we asked for.
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single")
        try:
            dcp.load(tensors, storage_reader=storage, no_dist=alone)
        except CheckpointException as error:  # no subclass of Exception; the same on all ranks
            rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"{path}: cannot be read on rank {rank}: {cause}") from error


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _can_share(tensors: Mapping[str, Tensor], elsewhere: Collection[str]) -> bool:
    """Whether all ranks want the same whole tensors, and can send them to each other."""
    if _world_size() == 1 or elsewhere or any(isinstance(it, DTensor) for it in tensors.values()):
        return False
    # "cpu:gloo,cuda:nccl"
    devices = {pair.partition(":")[0] for pair in dist.get_backend_config().split(",")}
    return all(tensor.device.type in devices for tensor in tensors.values())


def _read_and_share(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fills tensors that are the same on all ranks: one reads, so that a file is read once and not once a rank."""
    fault: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            _read(path, tensors, alone=True)
        except Exception as error:  # the other ranks wait for an answer
            fault[0] = str(error)
    dist.broadcast_object_list(fault, 0)
    if fault[0] is not None:
        raise CheckpointError(fault[0])
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        whole = tensor.contiguous()
        dist.broadcast(whole, 0)
        if whole is not tensor:
            tensor.copy_(whole)


def list_files(folder: Path) -> list[str]:
    """All files below a folder, relative, with forward slashes."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_checkpoint(folder: Path | str, *, verify: bool = True) -> Checkpoint:
    """Opens a checkpoint folder after checking it against its manifest.

    Args:
        folder: The folder that was saved.
        verify: Also compare the SHA-256 of every file (about a second a gigabyte and core).

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
        raise DamagedCheckpointError(
            f"{folder}: has no {MANIFEST}, so it is no whole checkpoint of nemo_like"
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        version, entries = int(manifest["format_version"]), dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{folder / MANIFEST}: is damaged ({error!r})") from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: has format version {version}, this nemo_like reads up to {FORMAT_VERSION}; upgrade nemo_like"
        )
    faults = _compare_with_manifest(folder, entries, verify=verify)
    if faults:
        raise DamagedCheckpointError("\n  ".join([f"{folder}: is not what was saved:", *faults]))
    try:
        state = json.loads((folder / STATE).read_bytes())
        return Checkpoint(folder=folder, state={**state, "metrics": _figures_of(folder, state)})
    except (ValueError, TypeError, OSError) as error:
        raise DamagedCheckpointError(f"{folder / STATE}: is damaged ({error})") from error


def _compare_with_manifest(folder: Path, entries: Mapping[str, Any], *, verify: bool) -> list[str]:
    # Figures come after the manifest; a validation may have been killed while it wrote them.
    found = set(list_files(folder)) - {MANIFEST, FIGURES, f".{FIGURES}.new"}
    faults = [f"{name}: is missing" for name in sorted(entries.keys() - found)]
    for name in sorted(found - entries.keys()):
        hint = (
            " (a pickle; nothing is ever unpickled here)" if name.endswith(_PICKLE_SUFFIXES) else ""
        )
        faults.append(f"{name}: is not in the manifest{hint}")
    same_size = []
    for name in sorted(entries.keys() & found):
        size = (folder / name).stat().st_size
        if size != entries[name]["bytes"]:
            faults.append(f"{name}: has {size} bytes, {entries[name]['bytes']} were saved")
        else:
            same_size.append(name)
    if verify:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            hashes = threads.map(lambda name: _hash_file(folder / name), same_size)
        faults += [
            f"{name}: its content changed (SHA-256 differs)"
            for name, found_hash in zip(same_size, hashes, strict=True)
            if found_hash != entries[name]["sha256"]
        ]
    return faults


def read_figures(folder: Path) -> Mapping[str, float] | None:
    """Figures of the validation of a checkpoint; None where it was not validated (yet)."""
    with suppress(OSError, ValueError):
        return dict(json.loads((folder / FIGURES).read_bytes()))
    # Checkpoints that were saved after their validation hold them themselves.
    with suppress(OSError, ValueError):
        return json.loads((folder / STATE).read_bytes()).get("metrics") or None
    return None


def _figures_of(folder: Path, state: Mapping[str, Any]) -> Mapping[str, float]:
    path = folder / FIGURES
    return dict(json.loads(path.read_bytes()) if path.is_file() else state.get("metrics", {}))


def write_figures(folder: Path, figures: Mapping[str, float]) -> None:
    """Adds the figures of its validation to a whole checkpoint, in one step."""
    replace(folder / FIGURES, json.dumps(to_plain(figures), indent=1).encode())


def find_checkpoints(folder: Path | str) -> list[Path]:
    """The whole checkpoints (those with a manifest) in a folder, oldest step first."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    saved = [
        path
        for path in folder.iterdir()
        if is_checkpoint_name(path.name) and (path / MANIFEST).is_file()
    ]
    return sorted(saved, key=lambda path: int(path.name.removeprefix("step_")))


def hide(folder: Path) -> Path:
    """The name of a checkpoint folder while it is not whole."""
    return folder.with_name(f".{folder.name}.incomplete")


def find_incomplete(folder: Path | str) -> list[Path]:
    """What saves and removals left behind that were killed; nobody takes it for a checkpoint."""
    folder = Path(folder)
    return sorted(folder.glob(".step_*.incomplete")) if folder.is_dir() else []


def remove_checkpoint(folder: Path) -> bool:
    """Removes a checkpoint, unless somebody reads it; a half-removed one is never taken for a whole one.

    Returns:
        Whether it is gone.
    """
    with _hold(folder / MANIFEST) as is_free:
        if not is_free:
            return False
        (folder / MANIFEST).unlink(missing_ok=True)
        hidden = hide(folder)
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return True


@contextmanager
def _hold(path: Path) -> Iterator[bool]:
    """Keeps readers of a file away; False if there are some."""
    try:
        # Network file systems lock for writing only what is open for writing.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except BlockingIOError:
        is_free = False
    except OSError:
        is_free = True  # a file system without locks
    try:
        yield is_free
    finally:
        os.close(descriptor)


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is to be a checkpoint."""
    return _NAME.fullmatch(name) is not None


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
