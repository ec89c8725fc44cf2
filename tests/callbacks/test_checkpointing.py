"""What is saved when, which validation belongs to it, and what a run does when a save has failed."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from nemo_like.callbacks.checkpointing import Checkpointing
from nemo_like.core.agreement import Flag
from nemo_like.core.checkpoint import open_checkpoint, read_figures
from nemo_like.core.errors import CheckpointError
from nemo_like.core.precision import build_precision
from nemo_like.strategies.ddp import DDPStrategy
from nemo_like.testing.fit import QUIET, FusedAdamW
from nemo_like.testing.toy import ToyDataModule, ToyModel
from nemo_like.testing.world import run_world


class Validations(pl.Callback):
    """Notes at which step a validation begins, and what is saved by then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[int] = []
        self.saved: list[list[int]] = []
        self.ended = 0

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.steps.append(trainer.global_step)
        trainer.strategy.checkpoint_writer.wait()  # type: ignore[attr-defined]
        self.saved.append(kept(self.folder))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended += 1


def fit(
    folder: Path,
    *callbacks: pl.Callback,
    steps: int = 6,
    val_every: int = 2,
    resume: Path | None = None,
    strategy: Any = None,
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[ToyModel, pl.Trainer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = ToyModel(dropout=0.2)
        model.optim, model.seed = FusedAdamW(), 3
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=strategy or DDPStrategy(micro_batch_size=8),
            plugins=[build_precision("fp32", "cpu")],
            max_steps=steps,
            max_epochs=-1,
            callbacks=[Checkpointing(folder=folder, **options), *callbacks],
            **{
                **QUIET,
                "devices": 1,
                "val_check_interval": val_every,
                "limit_val_batches": 1.0,
                **(trainer_options or {}),
            },
        )
        trainer.fit(model, datamodule=ToyDataModule(), ckpt_path=resume)
    return model, trainer


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.iterdir() if path.name[0] != ".")


def figures(folder: Path) -> dict[int, Any]:
    return {step: read_figures(folder / f"step_{step:08d}") for step in kept(folder)}


def test_a_step_is_saved_before_it_is_validated(tmp_path: Path) -> None:
    watcher = Validations(tmp_path)
    model, _ = fit(tmp_path, watcher, every_n_steps=2, keep_last=9)
    assert watcher.steps == [2, 4, 6]
    assert watcher.saved == [[2], [2, 4], [2, 4, 6]]
    found = figures(tmp_path)
    assert found.keys() == {2, 4, 6}
    assert found[6] == model.val_metrics
    assert len({it["val/loss"] for it in found.values()}) == 3
    last = open_checkpoint(tmp_path / "step_00000006")
    assert last.figures == last.state["metrics"] == found[6]


class Counter(pl.Callback):
    """Counts the steps that it has seen."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, *arguments: Any, **options: Any) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def test_a_checkpoint_knows_what_callbacks_behind_the_saving_say_of_its_step(
    tmp_path: Path,
) -> None:
    fit(tmp_path, Counter(), every_n_steps=2, val_every=100, keep_last=9)
    states = {
        step: open_checkpoint(tmp_path / f"step_{step:08d}").state["callbacks"]
        for step in kept(tmp_path)
    }
    assert {step: it["Counter"]["seen"] for step, it in states.items()} == {2: 2, 4: 4, 6: 6}


def test_only_the_file_of_figures_may_be_added_to_a_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, steps=2)
    path = tmp_path / "step_00000002"
    (path / ".validation.json.new").write_text("{")  # a validation that was killed while it wrote
    open_checkpoint(path)
    (path / "validation.jsonl").write_text("{}")
    with pytest.raises(CheckpointError, match=r"validation\.jsonl: is not in the manifest"):
        open_checkpoint(path)


def test_the_best_are_kept_by_figures_that_come_after_the_save(tmp_path: Path) -> None:
    fit(tmp_path / "all", steps=10, every_n_steps=2, keep_last=9)
    losses = {step: it["val/loss"] for step, it in figures(tmp_path / "all").items()}
    worst = max(losses, key=lambda step: losses[step])
    fit(tmp_path / "few", steps=10, every_n_steps=2, keep_last=1, keep_best=1, mode="max")
    assert kept(tmp_path / "few") == sorted({worst, 10})


def test_figures_wait_until_their_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, synchronise = threading.Event(), os.fsync

    def wait(descriptor: int) -> None:
        assert go_on.wait(30)
        synchronise(descriptor)

    monkeypatch.setattr(os, "fsync", wait)

    class Release(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
            # The validation of step 2 is over, and its checkpoint still hidden.
            if trainer.global_step == 3:
                assert kept(tmp_path) == []
                assert trainer.strategy.checkpoint_writer.folder == tmp_path / "step_00000002"
                go_on.set()

    fit(tmp_path, Release(), steps=4, every_n_steps=2, keep_last=9)
    assert figures(tmp_path)[2]["val/loss"] != figures(tmp_path)[4]["val/loss"]


@pytest.mark.parametrize("last", [2, 4])
def test_a_run_that_was_stopped_before_a_validation_starts_with_it(
    last: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"steps": 4, "every_n_steps": 2, "keep_last": 9}
    whole, _ = fit(tmp_path / "whole", **options)
    # As if it had been stopped in the validation of step `last`.
    fit(tmp_path / "cut", **{**options, "steps": last})
    path = tmp_path / "cut" / f"step_{last:08d}"
    (path / "validation.json").unlink()
    watcher = Validations(tmp_path / "cut")
    resumed, trainer = fit(tmp_path / "cut", watcher, resume=path, **options)
    assert watcher.steps == list(range(last, 5, 2))
    assert watcher.ended == 1
    assert trainer.global_step == trainer.max_steps == 4
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])


def test_a_validation_that_was_done_is_not_done_again(tmp_path: Path) -> None:
    fit(tmp_path, steps=4, every_n_steps=2, keep_last=9)
    watcher = Validations(tmp_path)
    fit(tmp_path, watcher, steps=4, every_n_steps=2, resume=tmp_path / "step_00000002", keep_last=9)
    assert watcher.steps == [4]


def test_the_clock_of_rank_zero_saves_besides(tmp_path: Path) -> None:
    class Wait(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step == 2:
                threading.Event().wait(0.2)

    fit(tmp_path, Wait(), steps=6, every_minutes=0.15 / 60, keep_last=9, val_every=100)
    saved = kept(tmp_path)
    # Asked for at the end of the third step, saved at the next boundary; the last step in any case.
    assert saved == [4, 6]


def _fit_by_the_clock(folder: Path) -> list[int]:
    class Wait(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step == 2:
                time.sleep(1.2)

    # Rank one's clock is far ahead and is not asked.
    every = 1 / 60 if int(os.environ["RANK"]) == 0 else 1e-9
    two = {"devices": 2}
    fit(
        folder, Wait(), steps=9, every_minutes=every, keep_last=9, val_every=99, trainer_options=two
    )
    return kept(folder)


@pytest.mark.dist
def test_all_ranks_save_once_when_the_clock_of_rank_zero_asks(tmp_path: Path) -> None:
    # Raised at the end of step 3, sent by step 4, known after step 5.
    assert run_world(2, _fit_by_the_clock, tmp_path, process_group=False) == [[5, 9], [5, 9]]


def test_figures_that_cannot_be_written_do_not_end_a_run(tmp_path: Path, caplog: Any) -> None:
    class Block(pl.Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.checkpoint_writer.wait()
            (tmp_path / f"step_{trainer.global_step:08d}" / ".validation.json.new").mkdir()

    fit(tmp_path, Block(), steps=4, every_n_steps=2, keep_last=9)
    assert kept(tmp_path) == [2, 4]
    assert f"{tmp_path}: cannot be tidied up now: " in caplog.text


def test_a_flag_saves_at_the_next_boundary_and_is_cleared(tmp_path: Path) -> None:
    class Ask(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step == 1:
                trainer.strategy.agreement.raise_flag(Flag.SAVE)

    _, trainer = fit(tmp_path, Ask(), steps=4, keep_last=9, val_every=100)
    assert kept(tmp_path) == [2, 4]
    assert trainer.strategy.agreement.agreed == Flag(0)  # type: ignore[attr-defined]


class FullDisk(pl.Callback):
    """From a step on nothing can be written."""

    def __init__(self, step: int, rank: int = 0) -> None:
        self.step, self.rank = step, rank
        self.seen = 0

    def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
        self.seen = trainer.global_step
        writer = trainer.strategy.checkpoint_writer
        if trainer.global_step == self.step and trainer.world_size == 1:
            while not writer.has_failed:
                time.sleep(0.001)
        if trainer.global_step == self.step - 1:
            writer.wait()
        if trainer.global_step == self.step - 1 and trainer.global_rank == self.rank:

            def write(descriptor: int, content: Any) -> int:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            os.write = write  # type: ignore[assignment]


def test_a_run_whose_save_has_failed_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", os.write)
    watcher = FullDisk(4)
    with pytest.raises(
        CheckpointError, match="step_00000004: was not saved: rank 0: the disk is full"
    ):
        fit(tmp_path, watcher, steps=9, every_n_steps=2, keep_last=9, val_every=100)
    # At the first boundary at which it was known, not only when the next step was to be saved.
    assert watcher.seen == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002"]


def test_a_failed_save_does_not_hide_why_a_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(os, "write", os.write)

    class Fail(pl.Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        fit(tmp_path, FullDisk(2), Fail(), every_n_steps=2)
    assert "step_00000002: was not saved" in caplog.text


def test_an_exception_lets_a_save_become_whole(tmp_path: Path) -> None:
    class Fail(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step == 2:
                raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        fit(tmp_path, Fail(), every_n_steps=2, val_every=100)
    assert open_checkpoint(tmp_path / "step_00000002").step == 2


def test_a_step_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    class SaveTwice(pl.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            (callback,) = [it for it in trainer.callbacks if isinstance(it, Checkpointing)]
            assert callback.save(trainer) == tmp_path / "step_00000002"
            callback.flush()

    fit(tmp_path, SaveTwice(), steps=2, every_n_steps=2)
    assert kept(tmp_path) == [2]
    assert figures(tmp_path)[2]


def test_strategies_without_checkpoint_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="SingleDeviceStrategy writes no checkpoint folders"):
        fit(tmp_path, strategy="auto")


@pytest.mark.parametrize(
    ("name", "value"), [("every_n_steps", 0), ("keep_last", 0), ("every_minutes", 0.0)]
)
def test_values_are_checked(name: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Checkpointing(folder=tmp_path, **{name: value})  # type: ignore[arg-type]


def _fit_with_a_full_disk(folder: Path) -> tuple[str, int]:
    watcher = FullDisk(50, rank=1)
    with pytest.raises(CheckpointError) as caught:
        fit(
            folder,
            watcher,
            steps=3000,
            every_n_steps=50,
            val_every=5000,
            trainer_options={"devices": 2},
        )
    return str(caught.value), watcher.seen


@pytest.mark.dist
def test_all_ranks_end_at_the_same_step_when_the_save_of_one_has_failed(tmp_path: Path) -> None:
    first, second = run_world(2, _fit_with_a_full_disk, tmp_path, process_group=False)
    assert first == second
    assert "step_00000050: was not saved: rank 1: the disk is full" in first[0]
    assert list(tmp_path.iterdir()) == []
