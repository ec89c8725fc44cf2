"""A run goes on from the newest checkpoint that is whole; what is not whole is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_like.core import resume_point
from nemo_like.core.checkpoint import checkpoint_name, find_checkpoints, write_figures
from nemo_like.core.checkpoint_writer import save_checkpoint
from nemo_like.core.errors import CheckpointError
from nemo_like.core.resume_point import find_resume_point, is_finished
from nemo_like.testing.world import run_world


@pytest.fixture(autouse=True)
def _forget_agreements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_LIKE_AGREED_RESUME_0", "")


def save(folder: Path, *steps: int) -> list[Path]:
    return [
        save_checkpoint(
            folder / checkpoint_name(step),
            model={"a": torch.full((1000,), float(step))},
            optimizer={},
            state={"step": step},
            files={},
        )
        for step in steps
    ]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("exists", [True, False])
def test_a_run_without_checkpoints_starts_at_its_beginning(exists: bool, tmp_path: Path) -> None:
    if exists:
        (tmp_path / "checkpoints").mkdir()
    assert find_resume_point(tmp_path / "checkpoints") is None


def test_the_newest_is_taken_by_its_number(tmp_path: Path) -> None:
    save(tmp_path, 9, 123456789, 99)
    found = find_resume_point(tmp_path)
    assert found == tmp_path / "step_123456789"


def test_what_was_never_finished_is_named_and_removed(tmp_path: Path, caplog: Any) -> None:
    save(tmp_path, 1)
    half = tmp_path / ".step_00000002.incomplete"
    (half / "model").mkdir(parents=True)
    (half / "model" / "x.safetensors").write_bytes(b"1")
    assert find_resume_point(tmp_path) == tmp_path / "step_00000001"
    assert f"removing {half}, which was never finished: it holds 1 files" in caplog.text
    assert names(tmp_path) == ["step_00000001"]


def test_a_damaged_one_is_named_set_aside_and_the_one_before_taken(
    tmp_path: Path, caplog: Any
) -> None:
    _, _, newest = save(tmp_path, 1, 2, 3)
    flip_last_bit(next((newest / "model").iterdir()))
    (tmp_path / "step_00000002" / "manifest.json").unlink()
    assert find_resume_point(tmp_path) == tmp_path / "step_00000001"
    assert "step_00000003: is not what was saved:" in caplog.text
    assert ".safetensors: its content changed (SHA-256 differs)" in caplog.text
    assert "step_00000002: has no manifest.json" in caplog.text
    assert names(tmp_path) == ["step_00000001", "step_00000002.damaged", "step_00000003.damaged"]
    # It does not count any more, and the next one of this step has a name, too.
    assert len(find_checkpoints(tmp_path)) == 1
    save(tmp_path, 3)
    (tmp_path / "step_00000003" / "trainer.json").unlink()
    find_resume_point(tmp_path)
    assert "step_00000003.damaged-2" in names(tmp_path)


def test_nothing_whole_is_a_warning_and_a_beginning(tmp_path: Path, caplog: Any) -> None:
    (only,) = save(tmp_path, 1)
    flip_last_bit(only / "trainer.json")
    assert find_resume_point(tmp_path) is None
    assert "no checkpoint is whole; the run starts from its beginning" in caplog.text


def test_hashes_are_compared_unless_that_is_switched_off(tmp_path: Path) -> None:
    _, newest = save(tmp_path, 1, 2)
    flip_last_bit(next((newest / "model").iterdir()))
    assert find_resume_point(tmp_path, verify=False) == newest
    (newest / "trainer.json").unlink()
    assert find_resume_point(tmp_path, verify=False) == tmp_path / "step_00000001"


def test_a_later_format_is_no_damage(tmp_path: Path) -> None:
    (only,) = save(tmp_path, 1)
    manifest = json.loads((only / "manifest.json").read_bytes())
    (only / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(CheckpointError, match="format version 99"):
        find_resume_point(tmp_path)
    assert names(tmp_path) == ["step_00000001"]


def _find(folder: str) -> tuple[str, int]:
    # Verification of more than one value: rank zero gives signs of life in between.
    resume_point._SIGN_OF_LIFE_S = 0.0005
    before = _read_characters()
    found = find_resume_point(Path(folder))
    return str(found), _read_characters() - before


def _read_characters() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


@pytest.mark.dist
def test_all_ranks_take_the_same_and_one_of_them_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(
        tmp_path / checkpoint_name(1),
        model={"a": torch.ones(5_000_000)},
        optimizer={},
        state={"step": 1},
        files={},
    )
    (path_2,) = save(tmp_path, 2)
    flip_last_bit(path_2 / "trainer.json")
    with _store() as (host, port):
        for name, value in (
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RUN_ID", "1"),
            ("AGENT", f"{host}:{port}"),
        ):
            monkeypatch.setenv(name, value)
        first, second = run_world(2, _find_with_agent, str(tmp_path), process_group=False)
    assert first[0] == second[0] == str(path)
    assert 20_000_000 < first[1] < 22_000_000
    assert second[1] < 1_000_000


def _find_with_agent(folder: str) -> tuple[str, int]:
    import os

    host, _, port = os.environ["AGENT"].rpartition(":")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, port
    return _find(folder)


def _store() -> Any:
    from contextlib import contextmanager

    from torch.distributed import TCPStore

    @contextmanager
    def serve() -> Any:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield "127.0.0.1", store.port

    return serve()


def _config(**trainer: Any) -> Any:
    return SimpleNamespace(
        trainer=SimpleNamespace(**{"max_steps": 4, "val_every_n_steps": 2, **trainer})
    )


def test_a_run_is_finished_when_its_last_step_is_validated(tmp_path: Path) -> None:
    third, last = save(tmp_path, 3, 4)
    assert not is_finished(third, _config(), tmp_path)
    assert not is_finished(last, _config(), tmp_path)
    assert is_finished(last, _config(val_every_n_steps=3), tmp_path)
    assert is_finished(last, _config(max_steps=2), tmp_path)
    # A run without validation says by its status that it is through.
    (tmp_path / "status.json").write_text('{"state": "running"}')
    assert not is_finished(last, _config(), tmp_path)
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    assert is_finished(last, _config(), tmp_path)
    (tmp_path / "status.json").unlink()
    write_figures(last, {"val/loss": 1.0})
    assert is_finished(last, _config(), tmp_path)


def test_signs_of_life_do_not_end_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(resume_point, "_SIGN_OF_LIFE_S", 0.0)
    save(tmp_path, 1)
    with caplog.at_level(logging.INFO):
        assert find_resume_point(tmp_path) == tmp_path / "step_00000001"
