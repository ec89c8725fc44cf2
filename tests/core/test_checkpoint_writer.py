"""A save is a copy of one moment, written behind the next steps; it becomes whole, or nothing of it is there."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_like.core.checkpoint import find_checkpoints, find_incomplete, open_checkpoint
from nemo_like.core.checkpoint_writer import CheckpointWriter, SaveOptions, save_checkpoint
from nemo_like.core.errors import CheckpointError
from nemo_like.core.snapshot import Piece, Snapshot
from nemo_like.testing.world import WorldError, run_world

BEHIND = SaveOptions(asynchronous=True)


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter()
    yield writer
    writer.close()


def weights(value: float = 1.0, size: int = 6) -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.full((2, size), value),
        "a.half": torch.full((3,), value, dtype=torch.bfloat16),
        "a.count": torch.tensor(int(value)),
        "a.is_used": torch.tensor([True, False, True]),
    }


def save(
    writer: CheckpointWriter, folder: Path, model: dict[str, torch.Tensor], **options: Any
) -> None:
    writer.save(
        folder,
        model=model,
        optimizer={"a.weight/step": torch.tensor(3.0)},
        state={"step": 1},
        files={"notes.txt": b"n"},
        options=SaveOptions(**options),
    )


def hold_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing gets to the disk before the event is set."""
    go_on, synchronise = threading.Event(), os.fsync

    def wait(descriptor: int) -> None:
        assert go_on.wait(30)
        synchronise(descriptor)

    monkeypatch.setattr(os, "fsync", wait)
    return go_on


def fill_disk_after(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """A disk that takes so many bytes more."""
    left, write = [num_bytes], os.write

    def write_some(descriptor: int, content: Any) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, content[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", write_some)


def test_what_trains_on_does_not_change_what_is_saved(
    tmp_path: Path, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = hold_disk(monkeypatch)
    model = weights(1.0)
    save(writer, tmp_path / "step_1", model, asynchronous=True)
    for tensor in model.values():
        tensor.zero_()
    assert writer.folder == tmp_path / "step_1"
    assert find_checkpoints(tmp_path) == []
    go_on.set()
    writer.wait()
    assert writer.folder is None
    saved = open_checkpoint(tmp_path / "step_1")
    for name, tensor in saved.read_tensors("model", saved.tensor_names("model")).items():
        assert tensor.dtype == model[name].dtype
        assert torch.equal(tensor, weights(1.0)[name])
    assert saved.read_file("notes.txt") == b"n"


def test_the_memory_of_a_snapshot_is_used_again(tmp_path: Path, writer: CheckpointWriter) -> None:
    model = weights(1.0)
    save(writer, tmp_path / "step_1", model, asynchronous=True)
    writer.wait()
    places = [it.content.data_ptr() for _, it in writer._snapshots()]
    model["a.weight"].fill_(2.0)
    save(writer, tmp_path / "step_2", model, asynchronous=True)
    writer.wait()
    assert [it.content.data_ptr() for _, it in writer._snapshots()] == places
    read = open_checkpoint(tmp_path / "step_2").read_tensors("model", ["a.weight"])
    assert torch.equal(read["a.weight"], torch.full((2, 6), 2.0))


def test_a_state_of_another_shape_is_planned_anew(tmp_path: Path, writer: CheckpointWriter) -> None:
    save(writer, tmp_path / "step_1", weights())
    save(writer, tmp_path / "step_2", {**weights(size=9), "b": torch.ones(4)})
    saved = open_checkpoint(tmp_path / "step_2")
    assert saved.read_tensors("model", ["a.weight"])["a.weight"].shape == (2, 9)
    assert "b" in saved.tensor_names("model")


def test_a_save_waits_for_the_one_before_and_says_so(
    tmp_path: Path, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    go_on = hold_disk(monkeypatch)
    save(writer, tmp_path / "step_1", weights(1.0), asynchronous=True)
    threading.Timer(0.3, go_on.set).start()
    with caplog.at_level(logging.INFO, "nemo_like"):
        save(writer, tmp_path / "step_2", weights(2.0), asynchronous=True)
    assert [path.name for path in find_checkpoints(tmp_path)][:1] == ["step_1"]
    assert "s until step_1 was written" in caplog.text
    writer.wait()
    read = open_checkpoint(tmp_path / "step_1").read_tensors("model", ["a.count"])
    assert int(read["a.count"]) == 1


def test_written_behind_and_written_in_place_are_the_same_bytes(
    tmp_path: Path, writer: CheckpointWriter
) -> None:
    for name, asynchronous in (("step_1", True), ("step_2", False)):
        save(writer, tmp_path / name, weights(), asynchronous=asynchronous)
        writer.wait()
    first, second = tmp_path / "step_1", tmp_path / "step_2"
    files = sorted(it.relative_to(first) for it in first.rglob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes()


@pytest.mark.parametrize("num_bytes", [0, 100, 700])
def test_a_disk_that_fills_up_leaves_nothing_but_the_older_checkpoint(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []
    writer = CheckpointWriter(on_failure=lambda: failed.append(1))
    save(writer, tmp_path / "step_1", weights(1.0))
    fill_disk_after(monkeypatch, num_bytes)
    save(writer, tmp_path / "step_2", weights(2.0), asynchronous=True)
    with pytest.raises(
        CheckpointError, match=r"step_2: was not saved: rank 0: the disk is full"
    ) as caught:
        writer.wait()
    assert "MiB are needed" in str(caught.value)
    assert "checkpoint.keep_last" in str(caught.value)
    assert failed == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    monkeypatch.undo()
    save(writer, tmp_path / "step_2", weights(2.0))
    assert open_checkpoint(tmp_path / "step_2").step == 1


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64))
    fill_disk_after(monkeypatch, 0)
    with pytest.raises(CheckpointError, match=r"the disk is full: .* 0\.0 MiB are free"):
        save(writer, tmp_path / "step_2", weights())
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_too_small(small_disk: Path, writer: CheckpointWriter) -> None:
    save(writer, small_disk / "step_1", weights())
    with pytest.raises(CheckpointError, match=r"0\.8 MiB are needed, 0\.2 MiB are free"):
        save(writer, small_disk / "step_2", weights(size=100_000))
    assert [path.name for path in small_disk.iterdir()] == ["step_1"]
    open_checkpoint(small_disk / "step_1")


def test_a_disk_that_may_only_be_read(small_disk: Path, writer: CheckpointWriter) -> None:
    save(writer, small_disk / "step_1", weights())
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(
        CheckpointError, match=r"Read-only file system.*disk a folder that this process may write"
    ):
        save(writer, small_disk / "step_2", weights())
    open_checkpoint(small_disk / "step_1")


def test_a_file_in_the_place_of_the_folder_is_named(
    tmp_path: Path, writer: CheckpointWriter
) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(
        CheckpointError, match=r"rank 0: .*checkpoints a folder that this process may"
    ):
        save(writer, tmp_path / "checkpoints" / "step_1", weights())


def test_a_type_that_safetensors_lacks_is_named(tmp_path: Path, writer: CheckpointWriter) -> None:
    with pytest.raises(CheckpointError, match=r"rank 0: z: torch\.complex128 has no place"):
        save(writer, tmp_path / "step_1", {"z": torch.zeros(2, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []


def test_two_slices_of_a_tensor_on_a_rank_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['a'\]: a rank holds two slices"):
        Snapshot([Piece("a", (0,), (4,)), Piece("a", (4,), (4,))], {"a": torch.zeros(4)})


def test_what_cannot_be_tidied_up_does_not_unsave(
    tmp_path: Path, writer: CheckpointWriter, caplog: Any
) -> None:
    def fail() -> None:
        raise OSError("no such luck")

    save(writer, tmp_path / "step_1", weights(), after=fail)
    assert "step_1 is saved, but: no such luck" in caplog.text
    open_checkpoint(tmp_path / "step_1")


def _save_until_killed(folder: Path, num_bytes: int) -> None:
    left, write = num_bytes, os.write

    def write_some(descriptor: int, content: Any) -> int:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        written = write(descriptor, content[:left])
        left -= written
        return written

    writer = CheckpointWriter()
    for step in (1, 2):
        save(writer, folder / f"step_{step}", weights(step, size=500), asynchronous=True)
        writer.wait()
        os.write = write_some


# In the header, in the weights, in the optimizer, in trainer.json, in the manifest.
@pytest.mark.dist
@pytest.mark.parametrize("num_bytes", [10, 3000, 4700, 4800, 5000])
def test_a_save_that_is_killed_leaves_the_older_checkpoint(num_bytes: int, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="exit code -9"):
        run_world(1, _save_until_killed, tmp_path, num_bytes, process_group=False)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step_1"]
    open_checkpoint(tmp_path / "step_1")
    assert [path.name for path in find_incomplete(tmp_path)] == [".step_2.incomplete"]


def _fail_on_rank(folder: Path, rank: int, how: str) -> list[str]:
    is_mine = int(os.environ["RANK"]) == rank
    writer = CheckpointWriter()
    said = []
    if is_mine:

        def write(descriptor: int, content: Any) -> int:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        original, os.write = os.write, write
    save(writer, folder / "step_1", weights(), asynchronous=True)
    try:
        writer.wait()
    except CheckpointError as error:
        said.append(str(error))
    if is_mine:
        os.write = original
    # And all of them are ready for the next.
    save(writer, folder / "step_2", weights(2.0), asynchronous=True)
    writer.wait()
    writer.close()
    return said


@pytest.mark.dist
def test_what_fails_on_one_rank_all_ranks_say_alike(tmp_path: Path) -> None:
    first, second = run_world(2, _fail_on_rank, tmp_path, 1, "fail")
    assert first == second
    assert len(first) == 1
    assert "step_1: was not saved: rank 1: [Errno 5]" in first[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    open_checkpoint(tmp_path / "step_2")


@pytest.mark.dist
def test_a_rank_that_dies_while_saving_leaves_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WorldError):
        run_world(2, _fail_on_rank, tmp_path, 1, "die")
    assert find_checkpoints(tmp_path) == []


def _save_what_does_not_fit(folder: Path) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    slices = DTensor.from_local(
        torch.ones(1), mesh, [Shard(0)], run_check=False, shape=(4,), stride=(1,)
    )
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(folder / "step_1", model={"a": slices}, optimizer={}, state={}, files={})
    return str(caught.value)


@pytest.mark.dist
def test_slices_that_do_not_make_a_whole_are_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_world(2, _save_what_does_not_fit, tmp_path)
    assert first == second
    assert "was not saved: rank 0: a: this rank holds (1,), its slice is (2,)" in first
    assert list(tmp_path.iterdir()) == []
