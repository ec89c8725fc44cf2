"""The end of a run that is not finite any more, and reports of loss spikes."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from nemo_like.callbacks import (
    LossSpikes,
    MetricsWriter,
    NonfiniteGuard,
    ProgressBar,
)
from nemo_like.callbacks.spike import SpikeDetector
from nemo_like.collections.llm.testing import rehearse
from nemo_like.core.checkpoint import find_checkpoints, open_checkpoint
from nemo_like.core.errors import NonfiniteError
from nemo_like.strategies import DDPStrategy
from nemo_like.testing.world import run_world
from nemo_like.tracking.logger import JsonlLogger, read_metrics


class Scaling(pl.Callback):
    """Multiplies the loss of some steps (steps done before -> factor) on one rank."""

    def __init__(self, factors: dict[int, float], *, rank: int = 0) -> None:
        self.factors, self.rank = factors, rank

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        compute: Any = pl_module.compute_loss_sum

        def scaled(micro_batch: Any) -> torch.Tensor:
            loss: torch.Tensor = compute(micro_batch)
            is_here = trainer.training and trainer.global_rank == self.rank
            return loss * (self.factors.get(trainer.global_step, 1.0) if is_here else 1.0)

        object.__setattr__(pl_module, "compute_loss_sum", scaled)


def run(factors: dict[int, float], *callbacks: pl.Callback, **options: Any) -> dict[str, Any]:
    return rehearse(
        DDPStrategy(micro_batch_size=4),
        devices=options.pop("devices", 1),
        network={"num_layers": 1},
        callbacks=[Scaling(factors, rank=options.pop("rank", 0)), *callbacks],
        **{"limit_val_batches": 0, "steps": 6, **options},
    )


# The guard.


def test_a_run_stops_saved_as_before_the_first_bad_step_and_goes_on_behind_the_data(
    tmp_path: Path,
) -> None:
    bad = {step: math.nan for step in (2, 3, 4)}
    with pytest.raises(
        NonfiniteError, match=r"stopped after step 5: the last 3 steps .*since step 3"
    ) as caught:
        run(bad, NonfiniteGuard(max_nonfinite_steps=3), folder=tmp_path, every_n_steps=100)
    assert f"Saved as {tmp_path / 'step_00000005'}, with the weights of step 2" in str(caught.value)
    clean = run({}, steps=2)
    checkpoint = open_checkpoint(tmp_path / "step_00000005")
    names = list(clean["weights"])
    for name, tensor in checkpoint.read_tensors("model", names).items():
        assert torch.equal(tensor, clean["weights"][name]), name
    # The next start counts anew: another bad step does not end it.
    guard = NonfiniteGuard(max_nonfinite_steps=3)
    start = checkpoint.folder
    resumed = run({5: math.nan}, guard, folder=tmp_path, resume=start, steps=7)
    assert [step["train/skipped"] for step in resumed["steps"]] == [4, 4]
    assert resumed["sample_ids"][0] == list(range(16, 20))
    assert resumed["position"] == 8 + 8 + 4 + 8 + 8 + 4 + 8


def test_bad_steps_that_are_not_in_a_row_stop_nothing() -> None:
    result = run({1: math.nan, 2: math.inf, 4: math.nan}, NonfiniteGuard(max_nonfinite_steps=3))
    assert result["steps"][-1]["train/skipped"] == 3


def test_null_never_stops() -> None:
    bad = {step: math.nan for step in range(6)}
    assert run(bad, NonfiniteGuard(max_nonfinite_steps=None))["steps"][-1]["train/skipped"] == 6


def test_without_checkpointing_the_message_says_that_nothing_was_saved() -> None:
    with pytest.raises(NonfiniteError, match=r"after step 1: .* Nothing was saved, because"):
        run({0: math.nan}, NonfiniteGuard(max_nonfinite_steps=1))


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_nonfinite_steps=0: must be at least 1"):
        NonfiniteGuard(max_nonfinite_steps=0)


def stop_together(folder: str) -> str:
    try:
        guard = NonfiniteGuard(max_nonfinite_steps=2)
        bad = {1: math.nan, 2: math.nan}
        run(bad, guard, devices=2, rank=1, folder=Path(folder), every_n_steps=100)
    except NonfiniteError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.dist
def test_all_ranks_stop_together_when_one_of_them_is_bad(tmp_path: Path) -> None:
    first, second = run_world(2, stop_together, str(tmp_path))
    assert first == second
    assert first.startswith("stopped after step 3: the last 2 steps in a row (since step 2)")
    assert [it.name for it in find_checkpoints(tmp_path)] == ["step_00000003"]


def test_steps_that_changed_nothing_are_in_the_metrics_and_on_the_bar_once_there_are_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"logger": [JsonlLogger(folder=tmp_path)], "steps": 3}
    run({1: math.nan}, MetricsWriter(every_n_steps=1), ProgressBar(line_every_s=0), **options)
    steps, values = read_metrics(tmp_path)["train/skipped"]
    assert (steps.tolist(), values.tolist()) == ([2, 3], [1, 1])
    lines = capsys.readouterr().err.splitlines()
    shown = [line for line in lines if line.startswith("step ")]
    assert "skipped" not in shown[0]
    assert "  1 skipped  " in shown[1]


def test_a_row_that_goes_on_for_long_does_not_flood_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("nemo_like").propagate = True
    run({step: math.nan for step in range(30)}, steps=30)
    assert sum("changed nothing" in it.message for it in caplog.records) == 10


# Loss spikes.


def feed(detector: SpikeDetector, values: list[float]) -> list[float | None]:
    return [detector.note(value) for value in values]


NOISE = [3.0, 3.1, 2.9, 3.05, 2.95, 3.0, 3.1, 2.9]


def test_a_spike_is_reported_once_with_the_usual_value_and_again_when_it_comes_back() -> None:
    detector = SpikeDetector(factor=8.0, window=8)
    assert feed(detector, NOISE) == [None] * 8
    assert feed(detector, [9.0, 8.0, 3.0, 7.0]) == [3.0, None, None, 3.05]


def test_the_bound_is_median_plus_factor_times_spread() -> None:
    # Median 3, absolute deviations 0, 0, .05, .05, .1, .1, .1, .1, of which the upper median is 0.1.
    bound = 3.0 + 8.0 * 1.4826 * 0.1
    for value, expected in ((bound - 0.01, None), (bound + 0.01, 3.0)):
        detector = SpikeDetector(factor=8.0, window=8)
        feed(detector, NOISE)
        assert detector.note(value) == expected


def test_a_few_values_far_off_move_neither_median_nor_spread() -> None:
    detector = SpikeDetector(factor=8.0, window=20)
    feed(detector, [*NOISE, *NOISE, 50.0, 60.0])
    assert detector.note(3.0) is None
    assert detector.note(9.0) == 3.0


def test_a_level_that_stays_becomes_the_usual_one() -> None:
    detector = SpikeDetector(factor=8.0, window=8)
    feed(detector, NOISE)
    assert [it is not None for it in feed(detector, [it + 4 for it in NOISE])].count(True) == 1
    assert detector.note(7.0) is None


def test_nothing_is_judged_before_half_a_window_and_last_digits_are_no_spikes() -> None:
    detector = SpikeDetector(factor=8.0, window=8)
    assert feed(detector, [3.0, 3.0, 3.0, 30.0]) == [None] * 4
    flat = SpikeDetector(factor=8.0, window=8)
    assert feed(flat, [3.0] * 8) == [None] * 8
    assert flat.note(3.001) is None
    assert flat.note(3.1) == 3.0


def test_what_is_not_finite_is_passed_over() -> None:
    detector = SpikeDetector(factor=8.0, window=8)
    feed(detector, NOISE)
    before = detector.state_dict()
    assert feed(detector, [math.nan, math.inf]) == [None, None]
    assert detector.state_dict() == before


def test_a_detector_goes_on_from_its_state_like_one_that_never_stopped() -> None:
    values = [*NOISE, 9.0, *NOISE, 8.0, 8.5, *NOISE, 5.0]
    whole = SpikeDetector(factor=8.0, window=8)
    expected = feed(whole, values)
    for cut in range(len(values)):
        first, second = SpikeDetector(factor=8.0, window=8), SpikeDetector(factor=8.0, window=8)
        before = feed(first, values[:cut])
        second.load_state_dict(first.state_dict())
        assert [*before, *feed(second, values[cut:])] == expected, cut
        assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 0.0}, "factor=0.0: must be above 0"),
        ({"window": 3}, "window=3: must be at least 4"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossSpikes(**options)


def test_a_spike_is_in_the_log_and_in_the_metrics_and_survives_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("nemo_like").propagate = True
    factors, found = {8: 3.0, 9: 3.0, 11: 3.0}, {}
    for name, resume in (("whole", None), ("resumed", tmp_path / "runs" / "step_00000009")):
        run(
            factors,
            LossSpikes(factor=3.0, window=8),
            steps=12,
            folder=tmp_path / "runs",
            every_n_steps=9,
            resume=resume,
            logger=[JsonlLogger(folder=tmp_path / name)],
        )
        found[name] = read_metrics(tmp_path / name)["train/loss_spike"][0].tolist()
    # Step 10 goes on with the spike of step 9: the second run knows it from the checkpoint.
    assert found == {"whole": [9, 12], "resumed": [12]}
    (line,) = [it.message for it in caplog.records if "spike at step 9" in it.message]
    assert "data position 64, samples of rank 0: 0, 1" in line or "samples of rank 0: " in line


def test_callbacks_that_count_steps_stand_before_the_one_that_saves() -> None:
    from nemo_like.core.compose import compose

    names = list(compose("pretrain", ["+conf=llm/quickstart"]).config.callbacks)
    assert names.index("spikes") < names.index("guard") < names.index("checkpointing")
