"""The progress bar and the metrics writer, in real training runs of a toy."""

from __future__ import annotations

import io
import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from nemo_like.callbacks import MetricsWriter, ProgressBar
from nemo_like.callbacks.throughput import StepClock
from nemo_like.tracking.logger import JsonlLogger, read_metrics

# Said by Lightning about the toy, which has no loader workers, and about its own use of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable.*"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval.*"),
]


class Toy(pl.LightningModule):
    """Fills its figures as a strategy would: the loss of step n is n."""

    unit = "tokens"

    def __init__(self, *, step_s: float = 0.0, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.step_s, self.fail_at = step_s, fail_at
        self.step_metrics: dict[str, Tensor | float] = {}
        self.val_metrics: dict[str, float] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.step_s)
        step = self.trainer.global_step + 1
        if step == self.fail_at:
            raise KeyboardInterrupt
        logging.getLogger("nemo_like").info("step %d", step)
        self.step_metrics |= {
            "train/loss": torch.tensor(float(step)),
            "train/units": torch.tensor(1000),
        }
        return self.weight * 1.0

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(5 * self.step_s)

    def on_validation_epoch_end(self) -> None:
        self.val_metrics["val/loss"] = self.trainer.global_step / 100

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def fit(
    model: Toy,
    callbacks: Sequence[pl.Callback],
    *,
    steps: int,
    folder: Path,
    resume: Path | None = None,
    **options: Any,
) -> pl.Trainer:
    data = torch.utils.data.DataLoader(torch.zeros(steps, 1))
    val = torch.utils.data.DataLoader(torch.zeros(2, 1))
    trainer = pl.Trainer(
        **{
            "max_steps": steps,
            "max_epochs": -1,
            "accelerator": "cpu",
            "callbacks": list(callbacks),
            "default_root_dir": folder,
            "logger": [JsonlLogger(folder=folder)],
            "log_every_n_steps": 5,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
    trainer.fit(model, data, val, ckpt_path=resume, weights_only=True)
    return trainer


def split_frames(terminal: io.StringIO) -> list[str]:
    """What a reader saw, one redraw after the other, without colours."""
    frames = re.split("\r\x1b\\[K", terminal.getvalue())
    return [re.sub(r"\x1b\[\d+m", "", frame).strip() for frame in frames if frame.strip()]


# The bar.


def test_bar_shows_step_loss_throughput_and_time_left(tmp_path: Path) -> None:
    terminal = Terminal()
    callbacks = [MetricsWriter(every_n_steps=1), ProgressBar(refresh_s=0, file=terminal)]
    fit(Toy(step_s=0.005), callbacks, steps=8, folder=tmp_path)
    frames = split_frames(terminal)
    assert [re.search(r"step (\d+)/8", frame)[1] for frame in frames] == [*"12345678", "8"]
    assert re.fullmatch(
        "\u2501{24} step 4/8  loss 4.0000  [\\d.]+ k tokens/s  0:00 left", frames[3]
    ), frames[3]
    assert "left" not in frames[-1]
    assert terminal.getvalue().endswith("\r\n")


def test_bar_is_as_full_as_the_run_is_done(tmp_path: Path) -> None:
    terminal = Terminal()
    fit(Toy(), [ProgressBar(refresh_s=0, file=terminal)], steps=4, folder=tmp_path)
    colored = re.split("\r\x1b\\[K", terminal.getvalue())
    filled = [re.match("\x1b\\[36m(\u2501*)\x1b\\[0m", frame) for frame in colored[1:]]
    assert [len(found[1]) for found in filled if found] == [6, 12, 18, 24, 24]


def test_bar_without_colours_where_they_are_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    fit(Toy(), [ProgressBar(refresh_s=0, file=terminal)], steps=2, folder=tmp_path)
    assert "\x1b[3" not in terminal.getvalue()


def test_bar_fits_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal()
    fit(Toy(), [ProgressBar(refresh_s=0, file=terminal)], steps=2, folder=tmp_path)
    assert max(len(frame) for frame in split_frames(terminal)) <= 29


def test_bar_refreshes_by_the_clock_and_not_by_the_step(tmp_path: Path) -> None:
    terminal = Terminal()
    fit(Toy(), [ProgressBar(refresh_s=3600, file=terminal)], steps=20, folder=tmp_path)
    assert len(split_frames(terminal)) == 2  # the first step and the last


def test_validation_is_shown_and_its_loss_stays_in_the_line(tmp_path: Path) -> None:
    terminal = Terminal()
    options = {"val_check_interval": 2, "check_val_every_n_epoch": None, "limit_val_batches": 2}
    fit(Toy(), [ProgressBar(refresh_s=0, file=terminal)], steps=4, folder=tmp_path, **options)
    shown = [frame.partition(" ")[2] for frame in split_frames(terminal)]
    assert shown[2:5] == [
        "step 2/4  validating 1/2",
        "step 2/4  validating 2/2",
        "step 3/4  loss 3.0000  val 0.0200  0:00 left",
    ]


def test_log_lines_do_not_run_into_the_bar(tmp_path: Path) -> None:
    terminal = Terminal()
    handler = logging.StreamHandler(terminal)
    log = logging.getLogger("nemo_like")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    fit(Toy(), [ProgressBar(refresh_s=0, file=terminal)], steps=3, folder=tmp_path)
    assert "\r\x1b[Kstep 2\n\r\x1b[K" in terminal.getvalue()
    assert handler.filters == []


def test_elsewhere_plain_lines_come_every_now_and_then(tmp_path: Path) -> None:
    out = io.StringIO()
    fit(Toy(), [ProgressBar(line_every_s=3600, file=out)], steps=20, folder=tmp_path)
    assert out.getvalue() == "step 1/20 (5 %)  loss 1.0000\nstep 20/20 (100 %)  loss 20.0000\n"


def test_a_resumed_run_is_counted_from_where_it_goes_on(tmp_path: Path) -> None:
    trainer = fit(Toy(), [], steps=6, folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    out = io.StringIO()
    with pytest.raises(SystemExit):
        fit(
            Toy(step_s=0.02, fail_at=11),
            [ProgressBar(line_every_s=0, file=out)],
            steps=1006,
            folder=tmp_path,
            resume=tmp_path / "six.ckpt",
        )
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 7/1,006 (1 %)  loss 7.0000"
    # 996 steps of 20 ms are left; steps that were done before this start took no time of it.
    left = re.fullmatch(r"step 10/1,006 \(1 %\)  loss 10.0000  0:(\d\d) left", lines[-1])
    assert left, lines[-1]
    assert 19 <= int(left[1]) <= 45


def test_an_interrupted_run_leaves_the_cursor_on_a_new_line(tmp_path: Path) -> None:
    terminal = Terminal()
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger("nemo_like").addHandler(handler)
    with pytest.raises(SystemExit):
        fit(Toy(fail_at=4), [ProgressBar(refresh_s=0, file=terminal)], steps=8, folder=tmp_path)
    assert "step 3/8" in split_frames(terminal)[-1]
    assert terminal.getvalue().endswith("\r\n")
    assert handler.filters == []


@pytest.mark.parametrize("name", ["refresh_s", "line_every_s"])
def test_times_below_zero_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-1: must be at least 0 seconds"):
        ProgressBar(**{name: -1})


# Metrics.


def test_metrics_are_sent_every_n_steps_and_at_the_last(tmp_path: Path) -> None:
    fit(Toy(), [MetricsWriter()], steps=12, folder=tmp_path)
    steps, values = read_metrics(tmp_path)["train/loss"]
    assert steps.tolist() == [5, 10, 12]
    assert values.tolist() == [5.0, 10.0, 12.0]


def test_every_line_goes_to_every_logger(tmp_path: Path) -> None:
    loggers = [JsonlLogger(folder=tmp_path / name) for name in "ab"]
    fit(Toy(), [MetricsWriter(every_n_steps=3)], steps=3, folder=tmp_path, logger=loggers)
    assert [read_metrics(tmp_path / name)["train/loss"][0].tolist() for name in "ab"] == [[3], [3]]


def test_validation_figures_stand_at_the_step_they_belong_to(tmp_path: Path) -> None:
    options = {"val_check_interval": 4, "check_val_every_n_epoch": None, "limit_val_batches": 2}
    fit(Toy(), [MetricsWriter()], steps=8, folder=tmp_path, **options)
    steps, values = read_metrics(tmp_path)["val/loss"]
    assert (steps.tolist(), values.tolist()) == ([4, 8], [0.04, 0.08])


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    trainer = fit(Toy(), [MetricsWriter(every_n_steps=2)], steps=6, folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    fit(Toy(), [MetricsWriter(every_n_steps=2)], steps=10, folder=tmp_path)  # goes on, and is lost
    fit(
        Toy(),
        [MetricsWriter(every_n_steps=2)],
        steps=8,
        folder=tmp_path,
        resume=tmp_path / "six.ckpt",
    )
    rows = [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows == [2, 4, 6, 8]


def test_throughput_counts_neither_validation_nor_saving(tmp_path: Path) -> None:
    class SaveOften(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step % 4 == 0:
                trainer.save_checkpoint(tmp_path / "x.ckpt")
                time.sleep(0.2)

    options = {"val_check_interval": 3, "check_val_every_n_epoch": None, "limit_val_batches": 2}
    model = Toy(step_s=0.01)
    fit(model, [MetricsWriter(), SaveOften()], steps=12, folder=tmp_path, **options)
    curves = read_metrics(tmp_path)
    # A step takes 10 ms and some overhead of Lightning's; with validations it would be 45 ms, with saves 60.
    assert 0.01 <= curves["perf/step_s"][1][-1] < 0.03
    assert 1000 / 0.03 < curves["perf/tokens_per_s"][1][-1] <= 1000 / 0.01
    assert curves["perf/tokens_per_s"][1][-1] * curves["perf/step_s"][1][-1] == pytest.approx(
        1000, rel=1e-6
    )


@pytest.fixture
def clock() -> Iterator[StepClock]:
    return StepClock(window=3)


def test_clock_counts_waiting_for_data_between_steps(clock: StepClock) -> None:
    clock.start_step(10.0)
    clock.end_step(11.0, 100)
    clock.start_step(13.0)
    clock.end_step(14.0, torch.tensor(200))
    assert clock.compute_step_s() == 2.0
    assert clock.compute_units_per_s() == 75.0


def test_clock_leaves_out_interruptions_and_steps_that_hold_one(clock: StepClock) -> None:
    clock.start_step(0.0)
    clock.end_step(1.0, 10)
    clock.interrupt()
    clock.start_step(50.0)
    clock.end_step(51.0, 10)
    clock.start_step(51.0)
    clock.interrupt()
    clock.end_step(99.0, 10)
    clock.start_step(100.0)
    clock.end_step(101.0, 10)
    assert clock.compute_step_s() == 1.0
    assert clock.compute_units_per_s() == 10.0


def test_clock_looks_at_the_last_steps_only(clock: StepClock) -> None:
    clock.start_step(0.0)
    for end in (100.0, 101.0, 102.0, 103.0):
        clock.end_step(end, 1)
    assert clock.compute_step_s() == 1.0


def test_clock_knows_nothing_before_the_first_step(clock: StepClock) -> None:
    assert clock.compute_step_s() is None
    assert clock.compute_units_per_s() is None


@pytest.mark.parametrize("name", ["every_n_steps", "window"])
def test_counts_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
        MetricsWriter(**{name: 0})
