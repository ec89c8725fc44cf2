"""What is saved when, and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.callbacks.checkpointing import Checkpointing
from nemo_like.core.checkpoint import save_checkpoint


def save(folder: Path, step: int, loss: float | None) -> Path:
    metrics = {} if loss is None else {"val/loss": loss}
    return save_checkpoint(
        folder / f"step_{step:08d}",
        model={},
        optimizer={},
        state={"step": step, "metrics": metrics},
        files={},
    )


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.iterdir())


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, loss in [(1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, float("nan")), (6, 2.5)]:
        save(tmp_path, step, loss)
    Checkpointing(folder=tmp_path, keep_last=2, keep_best=1)._remove_surplus()
    assert kept(tmp_path) == [2, 5, 6]


def test_a_larger_figure_may_be_better(tmp_path: Path) -> None:
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0)]:
        save(tmp_path, step, loss)
    Checkpointing(folder=tmp_path, keep_last=1, keep_best=1, mode="max")._remove_surplus()
    assert kept(tmp_path) == [1, 3]


@pytest.mark.parametrize("name", ["every_n_steps", "keep_last"])
def test_counts_are_checked(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        Checkpointing(folder=tmp_path, **{name: 0})
