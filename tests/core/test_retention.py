"""Which checkpoints stay, and that their number is bounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_like.core.checkpoint import (
    checkpoint_name,
    find_checkpoints,
    open_checkpoint,
    remove_checkpoint,
    write_figures,
)
from nemo_like.core.checkpoint_writer import save_checkpoint
from nemo_like.core.retention import Retention


def save(folder: Path, step: int, loss: float | None = None, hours: float | None = None) -> Path:
    path = save_checkpoint(
        folder / checkpoint_name(step), model={}, optimizer={}, state={"step": step}, files={}
    )
    if loss is not None:
        write_figures(path, {"val/loss": loss})
    if hours is not None:
        state = json.loads((path / "trainer.json").read_bytes())
        (path / "trainer.json").write_text(json.dumps({**state, "saved_at": 3600 * hours}))
    return path


def kept(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in sorted(folder.iterdir())]


LOSSES = [(1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, float("nan")), (6, 2.5)]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, loss in LOSSES:
        save(tmp_path, step, loss)
    removed = Retention(keep_last=2, keep_best=1).apply(tmp_path)
    assert kept(tmp_path) == [2, 5, 6]
    assert [path.name for path in removed] == [checkpoint_name(step) for step in (1, 3, 4)]


def test_a_larger_figure_may_be_better(tmp_path: Path) -> None:
    for step, loss in LOSSES:
        save(tmp_path, step, loss)
    Retention(keep_last=1, keep_best=2, mode="max").apply(tmp_path)
    assert kept(tmp_path) == [1, 6]


def test_figures_that_older_checkpoints_hold_themselves_count(tmp_path: Path) -> None:
    for step, loss in ((1, 1.0), (2, 3.0), (3, 2.0)):
        path = save(tmp_path, step)
        (path / "trainer.json").write_text(
            json.dumps({"step": step, "metrics": {"val/loss": loss}})
        )
    Retention(keep_last=1, keep_best=1).apply(tmp_path)
    assert kept(tmp_path) == [1, 3]


def test_one_of_every_so_many_hours_stays_for_good(tmp_path: Path) -> None:
    retention = Retention(keep_last=1, keep_best=0, keep_every_hours=2)
    for step in range(1, 14):  # one each half hour
        save(tmp_path, step, hours=step / 2)
        retention.apply(tmp_path)
    assert kept(tmp_path) == [1, 5, 9, 13]


def test_the_number_of_folders_is_bounded_over_many_preemptions(tmp_path: Path) -> None:
    retention = Retention(keep_last=2, keep_best=2)
    for number in range(30):
        step = 7 * number + number % 3
        save(tmp_path, step, loss=((number * 11) % 30) / 10 if number % 2 else None)
        retention.apply(tmp_path)
        assert len(list(tmp_path.iterdir())) <= 4
    # The best two of all 30, though they were saved long ago.
    assert {
        open_checkpoint(path).figures.get("val/loss") for path in find_checkpoints(tmp_path)
    } >= {0.1, 0.3}


def test_one_that_is_being_read_is_not_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    reader = open_checkpoint(tmp_path / checkpoint_name(1))
    retention = Retention(keep_last=1, keep_best=0)
    retention.apply(tmp_path)
    assert kept(tmp_path) == [1, 3]
    assert not remove_checkpoint(reader.folder)
    del reader
    retention.apply(tmp_path)
    assert kept(tmp_path) == [3]


@pytest.mark.parametrize(
    ("name", "value"), [("keep_last", 0), ("keep_best", -1), ("keep_every_hours", 0.0)]
)
def test_values_are_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: must be"):
        Retention(**{name: value})  # type: ignore[arg-type]
