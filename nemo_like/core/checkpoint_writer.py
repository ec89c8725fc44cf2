"""Saving: a snapshot now, the writing behind the next steps, and on every rank the same answer whether it went well.

The thread that writes talks over a process group of its own. Each phase (make room, write the slices, finish) ends with
an exchange, so that what fails on one rank is known to all. The folder is complete under a hidden name before one
rename gives it its own; until then nothing stands under that name, whatever happens.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nemo_like.core.checkpoint import FORMAT_VERSION, MANIFEST, STATE, hide
from nemo_like.core.durable import sync_folder, write_new
from nemo_like.core.errors import CheckpointError
from nemo_like.core.snapshot import Piece, Snapshot, describe_layout, plan_pieces

logger = logging.getLogger(__name__)

# A rank waits for the others' disks, which may take longer than any collective of a step.
_TIMEOUT = timedelta(hours=2)
_NOTICEABLE_S = 0.1
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNTOUCHED = "the checkpoints before it are untouched"


@dataclass(frozen=True)
class SaveOptions:
    """How a strategy saves; goes through Lightning as ``storage_options``."""

    asynchronous: bool = False
    """Return when the snapshot is taken, and write in the background."""
    after: Callable[[], None] | None = None
    """Called on rank zero, where it writes, once the checkpoint is whole."""


@dataclass
class _Job:
    folder: Path
    state: bytes
    files: Mapping[str, bytes]
    options: SaveOptions
    fault: Exception | None = None
    """What went wrong on this rank before anything could be written."""


@dataclass
class _Part:
    """A part of the state (``model``, ``optimizer``) as this rank writes it, kept from save to save."""

    layout: list[tuple[Any, ...]]
    pieces: list[Piece]
    snapshot: Snapshot | None = None
    """None: this rank writes nothing of it."""


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time; every rank has one and calls it alike.

    Args:
        on_failure: Called in the thread that writes when a save has failed, on every rank.
    """

    def __init__(self, *, on_failure: Callable[[], None] | None = None) -> None:
        self._on_failure = on_failure
        self._group: Any = None
        self._parts: dict[str, _Part] = {}
        self._num_bytes = 0
        self._thread: threading.Thread | None = None
        self._folder: Path | None = None
        self._failure: CheckpointError | None = None

    @property
    def folder(self) -> Path | None:
        """The checkpoint that is being written, if there is one."""
        is_writing = self._thread is not None and self._thread.is_alive()
        return self._folder if is_writing else None

    @property
    def has_failed(self) -> bool:
        """Whether the last save has failed and :meth:`wait` would say so."""
        return self._failure is not None

    def save(
        self,
        folder: Path,
        *,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
        files: Mapping[str, bytes],
        options: SaveOptions | None = None,
    ) -> None:
        """Saves what the tensors hold now; waits for the save before.

        Args:
            folder: Its final name; must not exist yet.
            model: Canonical name -> tensor; on more than one rank either the same everywhere or DTensors.
            optimizer: ``<parameter>/<state>`` -> tensor, likewise.
            state: What goes into ``trainer.json``; plain JSON values.
            files: Relative name -> content of further files, from rank 0.
            options: See :class:`SaveOptions`.

        Raises:
            CheckpointError: The save before has failed; ``state`` holds something that JSON cannot say; or this save
                has failed, unless it is asynchronous.
        """
        self.wait()
        job = _Job(folder, _encode_state(folder, state), dict(files), options or SaveOptions())
        if self._group is None and _world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        job.fault = self._take({"model": model, "optimizer": optimizer})
        self._folder = folder
        if job.options.asynchronous:
            self._thread = threading.Thread(
                target=self._write_behind, args=(job,), name=f"save {folder.name}", daemon=True
            )
            self._thread.start()
        else:
            self._write(job)

    def wait(self) -> None:
        """Returns when nothing is being written any more.

        Raises:
            CheckpointError: The save has failed; on every rank the same.
        """
        thread = self._thread
        if thread is not None:
            started_s = time.monotonic()
            thread.join()
            waited_s = time.monotonic() - started_s
            if waited_s > _NOTICEABLE_S and self._folder is not None:
                logger.info("waited %.1f s until %s was written", waited_s, self._folder.name)
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Lets the save in flight end, and gives memory and process group back."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._parts.clear()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    # On the thread of the training loop.

    def _take(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Exception | None:
        """Copies what this rank writes; gives what went wrong on this rank instead of raising it.

        The ranks must come through the same exchanges, whatever happens to one of them.
        """
        layouts = {part: describe_layout(held) for part, held in tensors.items()}
        known = {part: it.layout for part, it in self._parts.items()}
        fault: Exception | None = None
        if any(self._share(layouts != known)):
            self._parts.clear()
            try:
                for part, held in tensors.items():
                    pieces = plan_pieces(held, self._group)
                    self._parts[part] = _Part(layouts[part], pieces)
                for part, it in self._parts.items():
                    if it.pieces:
                        it.snapshot = Snapshot(it.pieces, tensors[part])
            except (ValueError, TypeError, RuntimeError) as error:
                fault = error
            self._num_bytes = sum(self._share(sum(it.num_bytes for _, it in self._snapshots())))
        if fault is not None:
            self._parts.clear()
            return fault
        for part, snapshot in self._snapshots():
            snapshot.take(tensors[part])
        return None

    def _snapshots(self) -> list[tuple[str, Snapshot]]:
        return [(part, it.snapshot) for part, it in self._parts.items() if it.snapshot is not None]

    # On the thread that writes.

    def _write_behind(self, job: _Job) -> None:
        try:
            self._write(job)
        except CheckpointError as error:
            self._failure = error
        if self._failure is not None and self._on_failure is not None:
            self._on_failure()

    def _write(self, job: _Job) -> None:
        hidden = hide(job.folder)
        started_s = time.monotonic()
        try:
            self._together(job, lambda: self._prepare(job, hidden))
            entries = self._together(job, lambda: self._write_slices(hidden))
            merged = {name: entry for part in entries for name, entry in part.items()}
            self._together(job, lambda: self._finish(job, hidden, merged))
        except CheckpointError:
            if _rank() == 0:
                shutil.rmtree(hidden, ignore_errors=True)
            raise
        if _rank() == 0:
            logger.info("saved %s in %.1f s", job.folder, time.monotonic() - started_s)
            if job.options.after is not None:
                try:
                    job.options.after()
                except OSError as error:
                    # The checkpoint is whole; what could not be tidied up now is tidied up after the next.
                    logger.warning("%s is saved, but: %s", job.folder.name, error)

    def _together(self, job: _Job, work: Callable[[], Any]) -> list[Any]:
        """Does a piece of work on all ranks and gives the results by rank; all raise if one has failed."""
        result, cause = None, None
        try:
            result = work()
        except Exception as error:
            cause = self._explain(error, job)
        try:
            outcomes = self._share((result, cause))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"{job.folder}: was not saved: another rank is gone ({reason}); {_UNTOUCHED}"
            ) from error
        for rank, (_, cause) in enumerate(outcomes):
            if cause is not None:
                raise CheckpointError(
                    f"{job.folder}: was not saved: rank {rank}: {cause}; {_UNTOUCHED}"
                )
        return [result for result, _ in outcomes]

    def _share(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _explain(self, error: Exception, job: _Job) -> str:
        if isinstance(error, OSError) and error.errno in _FULL:
            free = shutil.disk_usage(_first_existing(job.folder.parent)).free
            return _describe_full_disk(self._num_bytes, free, is_quota=error.errno == errno.EDQUOT)
        if isinstance(error, OSError):
            return f"{error}; make {job.folder.parent} a folder that this process may write to"
        return str(error) or type(error).__name__

    def _prepare(self, job: _Job, hidden: Path) -> None:
        if job.fault is not None:
            raise job.fault
        if _rank() != 0:
            return
        if job.folder.exists():
            raise FileExistsError(f"{job.folder} exists already, and nothing is written over")
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        needed = self._num_bytes + sum(len(content) for content in job.files.values())
        free = shutil.disk_usage(hidden).free
        if needed > free:
            raise ValueError(_describe_full_disk(needed, free))

    def _write_slices(self, hidden: Path) -> dict[str, Any]:
        entries = {}
        for part, snapshot in self._snapshots():
            name = f"{part}/shard-{_rank() + 1:05d}-model-00001-of-00001.safetensors"
            entries[name] = write_new(hidden / name, snapshot.header, snapshot.content.numpy())
        return entries

    def _finish(self, job: _Job, hidden: Path, entries: dict[str, Any]) -> None:
        if _rank() != 0:
            return
        for name, content in {STATE: job.state, **job.files}.items():
            entries[name] = write_new(hidden / name, content)
        manifest = {"format_version": FORMAT_VERSION, "files": dict(sorted(entries.items()))}
        write_new(hidden / MANIFEST, json.dumps(manifest, indent=1).encode())
        for folder in (*(path for path in hidden.rglob("*") if path.is_dir()), hidden):
            sync_folder(folder)
        hidden.rename(job.folder)
        sync_folder(job.folder.parent)


def _describe_full_disk(needed: int, free: int, *, is_quota: bool = False) -> str:
    what = "the quota is used up" if is_quota else "the disk is full"
    return (
        f"{what}: {needed / 2**20:,.1f} MiB are needed, {free / 2**20:,.1f} MiB are free; make room, or keep "
        "fewer (checkpoint.keep_last, keep_best, keep_every_hours)"
    )


def _encode_state(folder: Path, state: Mapping[str, Any]) -> bytes:
    whole = {"format_version": FORMAT_VERSION, **state, "saved_at": time.time()}
    try:
        return json.dumps(whole, indent=1, allow_nan=True).encode()
    except TypeError as error:
        raise CheckpointError(
            f"{folder}: the state of the run must be plain JSON values: {error}"
        ) from error


def _first_existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def save_checkpoint(
    folder: Path,
    *,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    files: Mapping[str, bytes],
) -> Path:
    """Writes one checkpoint folder and returns when it is whole; every rank calls it.

    The arguments are those of :meth:`CheckpointWriter.save`.

    Raises:
        CheckpointError: It could not be saved; on every rank the same.
    """
    writer = CheckpointWriter()
    try:
        writer.save(folder, model=model, optimizer=optimizer, state=state, files=files)
    finally:
        writer.close()
    return folder
