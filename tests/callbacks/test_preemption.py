"""A run that is told to stop saves between two steps, says so by its exit code, and goes on as if nothing had been."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from nemo_like.callbacks import Checkpointing, Preemption
from nemo_like.callbacks.config import PreemptionConfig
from nemo_like.core import notice
from nemo_like.core.agreement import Agreement, Flag
from nemo_like.core.checkpoint import find_checkpoints
from nemo_like.core.precision import build_precision
from nemo_like.strategies.ddp import DDPStrategy
from nemo_like.testing.fit import QUIET, FusedAdamW
from nemo_like.testing.toy import ToyDataModule, ToyModel
from nemo_like.testing.world import run_world

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 6


class At(pl.Callback):
    """Does something when so many steps are done, or before the validation batch of a number."""

    def __init__(
        self, action: Callable[[], Any], *, step: int, val_batch: int | None = None
    ) -> None:
        self.action, self.step, self.val_batch = action, step, val_batch

    def on_train_batch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if trainer.global_step == self.step and self.val_batch is None:
            self.action()

    def on_validation_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, *arguments: Any
    ) -> None:
        if trainer.global_step == self.step and batch_idx == self.val_batch:
            self.action()


class Counter(pl.Callback):
    """State that has to survive, of a callback that comes late in the list."""

    steps = 0

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


class Ended(pl.Callback):
    """What belongs to the end of a run."""

    def __init__(self) -> None:
        self.trained = self.validated = 0

    def on_train_end(self, *arguments: Any) -> None:
        self.trained += 1

    def on_validation_end(self, *arguments: Any) -> None:
        self.validated += 1


def send(name: str) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signal.Signals[name])


def fit(
    folder: Path,
    *callbacks: pl.Callback,
    preemption: Preemption | None = None,
    devices: int = 1,
    every_n_steps: int | None = None,
    data: ToyDataModule | None = None,
    **options: Any,
) -> tuple[pl.Trainer, dict[str, torch.Tensor]]:
    """Trains from the newest checkpoint of the folder."""
    torch.manual_seed(0)
    model, data = ToyModel(dropout=0.3), data or ToyDataModule()
    model.optim, model.seed, model.schedule = FusedAdamW(), 3, lambda step: 1 / (1 + step)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=DDPStrategy(micro_batch_size=8),
        plugins=[build_precision("fp32", "cpu")],
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=[
            Checkpointing(
                folder=folder / "checkpoints", every_n_steps=every_n_steps, keep_last=100
            ),
            preemption or Preemption(status=folder / "status.json"),
            *callbacks,
        ],
        **{**QUIET, "default_root_dir": folder, **options},
    )
    saved = find_checkpoints(folder / "checkpoints")
    trainer.fit(model, datamodule=data, ckpt_path=saved[-1] if saved else None)
    return trainer, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def steps_saved(folder: Path) -> list[int]:
    return [int(it.name.rpartition("_")[2]) for it in find_checkpoints(folder / "checkpoints")]


def handlers() -> dict[str, Any]:
    return {it: signal.getsignal(signal.Signals[it]) for it in notice.DEFAULT_SIGNALS}


def assert_goes_on(folder: Path, alone: Path, **options: Any) -> None:
    """A second start with the same command ends where an uninterrupted run ends, bit for bit."""
    counters = Counter(), Counter()
    _, weights = fit(folder, counters[0], **options)
    _, expected = fit(alone, counters[1], **options)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert [it.steps for it in counters] == [STEPS, STEPS]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_signal_in_a_step_saves_that_step_and_leaves(
    name: str, code: int, tmp_path: Path
) -> None:
    before, ended = handlers(), Ended()
    with pytest.raises(notice.StopRun, match=str(code)) as stop:
        fit(tmp_path / "a", Counter(), At(send(name), step=2), ended)
    assert stop.value.reason.rpartition("(")[2].rstrip(")") == name
    assert steps_saved(tmp_path / "a") == [3]
    assert ended.trained == 0
    assert handlers() == before
    status = json.loads((tmp_path / "a" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", 3)
    assert name in status["reason"]
    assert_goes_on(tmp_path / "a", tmp_path / "b")


def test_a_validation_is_left_at_a_batch_and_disturbs_nothing(tmp_path: Path) -> None:
    options = {"limit_val_batches": 1.0, "val_check_interval": 2}
    ended = Ended()
    with pytest.raises(notice.StopRun, match="75"):
        fit(tmp_path / "a", Counter(), At(send("SIGTERM"), step=4, val_batch=3), ended, **options)
    assert steps_saved(tmp_path / "a") == [4]
    assert ended.validated == 1  # that of step 2
    assert_goes_on(tmp_path / "a", tmp_path / "b", **options)


def test_a_signal_during_a_save_spoils_neither(tmp_path: Path) -> None:
    class DuringSave(pl.Callback):
        def on_save_checkpoint(self, *arguments: Any) -> None:
            if notice.find_signal() is None:
                send("SIGTERM")()

    with pytest.raises(notice.StopRun, match="75"):
        fit(tmp_path / "a", Counter(), DuringSave(), every_n_steps=2)
    assert steps_saved(tmp_path / "a") == [2, 3]
    assert_goes_on(tmp_path / "a", tmp_path / "b")


def test_before_the_first_step_nothing_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class OnStart(pl.Callback):
        def on_fit_start(self, *arguments: Any) -> None:
            send("SIGTERM")()

    with caplog.at_level(logging.INFO, "nemo_like"), pytest.raises(notice.StopRun, match="75"):
        fit(tmp_path / "a", OnStart())
    assert steps_saved(tmp_path / "a") == []
    assert "stopped by SIGTERM at step 0: nothing was trained since the start" in caplog.text
    assert json.loads((tmp_path / "a" / "status.json").read_text())["step"] == 0


def test_a_run_at_its_last_step_ends_by_itself(tmp_path: Path) -> None:
    ended = Ended()
    trainer, _ = fit(tmp_path, At(send("SIGTERM"), step=STEPS - 1), ended)
    assert trainer.global_step == STEPS
    assert ended.trained == 1
    assert steps_saved(tmp_path) == [STEPS]


def test_a_sentinel_file_stops_once(tmp_path: Path) -> None:
    preemption = Preemption(sentinel=tmp_path / "STOP")

    def ask() -> None:
        (tmp_path / "STOP").touch()
        preemption._next_look_s = 0.0

    with pytest.raises(notice.StopRun, match="75") as stop:
        fit(tmp_path, At(ask, step=1), preemption=preemption)
    assert stop.value.reason == f"{tmp_path / 'STOP'} is there"
    assert steps_saved(tmp_path) == [2]
    trainer, _ = fit(tmp_path, preemption=preemption)
    assert trainer.global_step == STEPS


def test_max_time_counts_from_the_start_of_the_process(tmp_path: Path) -> None:
    assert notice.measure_age_s() > 0.5  # pytest and torch are loaded
    with pytest.raises(notice.StopRun, match="75") as stop:
        fit(tmp_path, preemption=Preemption(max_time="00:00:00"))
    assert stop.value.reason == "max_time=00:00:00 is over"
    trainer, _ = fit(tmp_path, preemption=Preemption(max_time="01:00:00:00"))
    assert trainer.global_step == STEPS


def test_other_callbacks_may_ask_for_a_stop(tmp_path: Path) -> None:
    class Asking(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
            if trainer.global_step == 1:
                trainer.strategy.agreement.raise_flag(Flag.STOP)  # type: ignore[attr-defined]

    with pytest.raises(notice.StopRun, match="75"):
        fit(tmp_path, Asking())
    assert steps_saved(tmp_path) == [2]


def test_signals_that_are_not_named_keep_their_handlers(tmp_path: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    fit(tmp_path, At(send("SIGUSR2"), step=2), preemption=Preemption(signals=["SIGTERM"]))
    assert heard == [signal.SIGUSR2]


def test_handlers_are_put_back_after_a_failure(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("broken here")

    before = handlers()
    with pytest.raises(RuntimeError, match="broken here"):
        fit(tmp_path, At(fail, step=2))
    assert handlers() == before
    fit(tmp_path)
    assert handlers() == before


class Plain(pl.LightningModule):
    """Nothing of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_it_works_in_a_plain_trainer_and_stays_lightnings_own(tmp_path: Path) -> None:
    def make(*callbacks: pl.Callback) -> pl.Trainer:
        options = {**QUIET, "default_root_dir": tmp_path, "use_distributed_sampler": True}
        return pl.Trainer(
            accelerator="cpu", devices=1, max_steps=STEPS, callbacks=[*callbacks], **options
        )

    class Starts(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
            starts.append(trainer.global_step)

    before = handlers()
    loader = torch.utils.data.DataLoader(torch.ones(20, 2), batch_size=2)
    with pytest.raises(notice.StopRun, match="75"):
        make(Preemption(), At(send("SIGTERM"), step=2)).fit(Plain(), loader)
    assert handlers() == before
    trainer, starts = make(Preemption(), Starts()), []
    trainer.fit(Plain(), loader, ckpt_path=tmp_path / "preempted.ckpt")
    assert starts == [3]
    assert trainer.global_step == STEPS
    assert handlers() == before


def test_lightnings_handlers_do_not_act(tmp_path: Path) -> None:
    class Slow(ToyDataModule):
        """The first thing that happens once Lightning has put its handlers over ours."""

        def train_dataloader(self) -> Any:
            send("SIGTERM")()
            return super().train_dataloader()

    trainers = []

    class Seen(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, *arguments: Any) -> None:
            trainers.append(trainer)

    with pytest.raises(notice.StopRun, match="75"):
        fit(tmp_path, Seen(), data=Slow())
    assert [it.received_sigterm for it in trainers] == [False]


# More time, and the requeue.


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Stands in for SLURM: ``answer`` is the script behind ``scontrol``; gives the calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("nemo_like.core.requeue._was_asked", False)
    log = tmp_path / "calls"
    log.touch()

    def answer(script: str) -> list[str]:
        (folder / "scontrol").write_text(f'#!/bin/sh\necho "$*" >> {log}\n{script}\n')
        (folder / "scontrol").chmod(0o755)
        return [it for it in log.read_text().splitlines() if not it.startswith("show")]

    answer("exit 0")
    return answer


@pytest.mark.parametrize(("name", "times"), [("SIGTERM", 1), ("SIGINT", 0)])
def test_a_job_is_requeued_once_it_is_saved(
    name: str, times: int, slurm: Callable[[str], list[str]], tmp_path: Path
) -> None:
    slurm(f'[ "$1" = show ] || ls {tmp_path}/a/checkpoints > {tmp_path}/saved')
    with pytest.raises(notice.StopRun):
        fit(tmp_path / "a", At(send(name), step=2))
    assert slurm("") == ["requeue 7"] * times
    if times:
        assert "step_" in (tmp_path / "saved").read_text()
        assert (json.loads((tmp_path / "a" / "status.json").read_text())["state"]) == "stopped"


def test_granted_time_is_used_and_asked_for_again(
    slurm: Callable[[str], list[str]], tmp_path: Path
) -> None:
    slurm('[ "$1" = show ] && printf "JobId=7\\n TimeLimit=01:00:00 EndTime=soon\\n"; exit 0')
    preemption = Preemption(more_time_minutes=5)
    trainer, _ = fit(tmp_path / "a", At(send("SIGUSR1"), step=2), preemption=preemption)
    assert trainer.global_step == STEPS
    assert slurm("exit 1") == ["update JobId=7 TimeLimit=+5"]
    preemption = Preemption(more_time_minutes=5)

    def minutes_are_over() -> None:
        assert preemption._again is not None
        preemption._again = (0.0, preemption._again[1])

    slurm('[ "$1" = update ] && [ -e refused ] && exit 1; exit 0')
    os.chdir(tmp_path)
    events = [
        At(send("SIGUSR1"), step=1),
        At(lambda: Path("refused").touch(), step=3),
        At(minutes_are_over, step=3),
    ]
    with pytest.raises(notice.StopRun, match="75"):
        fit(tmp_path / "b", *events, preemption=preemption)
    assert steps_saved(tmp_path / "b") == [4]
    assert slurm("")[1:] == ["update JobId=7 TimeLimit=+5"] * 2 + ["requeue 7"]


def test_time_is_not_asked_for_at_sigterm(
    slurm: Callable[[str], list[str]], tmp_path: Path
) -> None:
    with pytest.raises(notice.StopRun, match="75"):
        fit(tmp_path / "a", At(send("SIGTERM"), step=2), preemption=Preemption(more_time_minutes=5))
    assert slurm("") == ["requeue 7"]


# Two ranks.


def fit_two(
    folder: str, victim: int | None, options: dict[str, Any], step: int, val_batch: int | None
) -> Any:
    rank = int(os.environ["RANK"])
    events = [At(send("SIGTERM"), step=step, val_batch=val_batch)] if rank == victim else []
    try:
        _, weights = fit(Path(folder), *events, devices=2, **options)
    except notice.StopRun as stop:
        return stop.code, steps_saved(Path(folder))
    return {name: tensor.numpy() for name, tensor in weights.items()}


@pytest.mark.dist
@pytest.mark.parametrize(("step", "val_batch", "saved"), [(2, None, 4), (2, 1, 2)])
def test_a_signal_on_one_rank_stops_both_at_the_same_step(
    step: int, val_batch: int | None, saved: int, tmp_path: Path
) -> None:
    options = {} if val_batch is None else {"limit_val_batches": 1.0, "val_check_interval": 2}
    folder = str(tmp_path)
    ends = run_world(2, fit_two, folder, 1, options, step, val_batch, process_group=False)
    assert ends == [(75, [saved])] * 2
    goes_on = run_world(2, fit_two, folder, None, options, 0, None, process_group=False)
    alone = run_world(2, fit_two, f"{folder}/b", None, options, 0, None, process_group=False)
    for weights, expected in zip(goes_on, alone, strict=True):
        assert all((weights[name] == expected[name]).all() for name in expected)


def fit_plain(folder: str) -> Any:
    loader = torch.utils.data.DataLoader(torch.ones(40, 2), batch_size=2)
    is_told = os.environ["RANK"] == "1"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        callbacks=[Preemption(), *([At(send("SIGTERM"), step=1)] if is_told else [])],
        **{**QUIET, "default_root_dir": folder, "use_distributed_sampler": True},
    )
    try:
        trainer.fit(Plain(), loader)
    except notice.StopRun as stop:
        return stop.code, trainer.global_step
    return None


@pytest.mark.dist
def test_lightnings_own_strategies_stop_all_ranks_alike(tmp_path: Path) -> None:
    assert run_world(2, fit_plain, str(tmp_path), process_group=False) == [(75, 3)] * 2
    assert (tmp_path / "preempted.ckpt").is_file()


def rehearse_plan(folder: str, plan: str, steps: int) -> Any:
    from nemo_like.collections.llm.testing import rehearse
    from nemo_like.strategies import DeepSpeedStrategy, FSDPStrategy, MegatronStrategy

    strategies: dict[str, Callable[[], Any]] = {
        "fsdp": lambda: FSDPStrategy(micro_batch_size=2),
        "deepspeed": lambda: DeepSpeedStrategy(micro_batch_size=2, stage=3),
        "megatron": lambda: MegatronStrategy(pipeline_parallel=2),
    }
    is_told = os.environ["RANK"] == "1" and steps == 4
    events = [At(send("SIGUSR1"), step=1)] if is_told else []
    saved = find_checkpoints(Path(folder))
    try:
        done = rehearse(
            strategies[plan](),
            devices=2,
            steps=steps,
            folder=Path(folder),
            every_n_steps=100,
            resume=saved[-1] if saved else None,
            callbacks=[Preemption(), *events],
            val_check_interval=100,
        )
    except notice.StopRun as stop:
        return stop.code
    return {name: tensor.numpy() for name, tensor in done["weights"].items()}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("plan", ["fsdp", "deepspeed", "megatron"])
def test_every_plan_stops_and_goes_on_bit_for_bit(plan: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "a")
    assert run_world(2, rehearse_plan, folder, plan, 4, process_group=False) == [75, 75]
    assert [it.name for it in find_checkpoints(tmp_path / "a")] == ["step_00000003"]
    # Steps do not depend on how many there are to be; 5 are not told to stop.
    goes_on = run_world(2, rehearse_plan, folder, plan, 5, process_group=False)
    alone = run_world(2, rehearse_plan, str(tmp_path / "b"), plan, 5, process_group=False)
    for weights, expected in zip(goes_on, alone, strict=True):
        assert expected
        assert all((weights[name] == expected[name]).all() for name in expected)


# Settings.


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="'SIGKILL' is no signal that can be handled"):
        Preemption(signals=["SIGKILL"])
    with pytest.raises(ValueError, match="more_time_minutes=0: must be at least 1"):
        Preemption(more_time_minutes=0)
    with pytest.raises(ValueError, match="'90' is no duration: write HH:MM:SS"):
        Preemption(max_time="90")
    assert list(PreemptionConfig(signals=["TERM"], more_time_minutes=0).check()) == [
        "signals: 'TERM' is no signal that can be handled; name them as SIGTERM",
        "more_time_minutes=0: must be at least 1, or null",
    ]
    assert list(PreemptionConfig().check()) == []


def test_an_agreement_of_one_needs_no_second_call() -> None:
    agreement = Agreement()
    agreement.raise_flag(Flag.STOP, cause=15)
    assert agreement.agreed == Flag.STOP
