"""Lines of metrics: written whole, taken back on resume, read while half written."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch.utilities import rank_zero_only

from nemo_like.tracking.logger import JsonlLogger, read_metrics


def test_each_record_is_one_line_with_step_and_time(tmp_path: Path) -> None:
    writer = JsonlLogger(folder=tmp_path / "run")
    writer.log_metrics({"train/loss": 2.5, "train/lr": 1e-3}, step=10)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record.pop("time") == pytest.approx(1.9e9, abs=5e8)
    assert record == {"step": 10, "train/loss": 2.5, "train/lr": 1e-3}


def test_a_line_can_be_read_at_once(tmp_path: Path) -> None:
    writer = JsonlLogger(folder=tmp_path)
    writer.log_metrics({"a": 1.0}, step=1)
    assert list(read_metrics(tmp_path)) == ["a"]


def test_not_a_number_and_infinity_come_back_and_stay_valid_json(tmp_path: Path) -> None:
    writer = JsonlLogger(folder=tmp_path)
    for step, value in enumerate([math.nan, math.inf, -math.inf], start=1):
        writer.log_metrics({"train/loss": value}, step=step)

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    for line in writer.path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    _, values = read_metrics(writer.path)["train/loss"]
    assert np.array_equal(values, [math.nan, math.inf, -math.inf], equal_nan=True)


def test_resuming_takes_back_the_steps_that_are_taken_again(tmp_path: Path) -> None:
    first = JsonlLogger(folder=tmp_path)
    for step in range(10, 60, 10):
        first.log_metrics({"train/loss": float(step)}, step=step)

    second = JsonlLogger(folder=tmp_path)
    second.drop_after(30)
    second.log_metrics({"train/loss": -1.0}, step=40)
    steps, values = read_metrics(tmp_path)["train/loss"]
    assert steps.tolist() == [10, 20, 30, 40]
    assert values.tolist() == [10.0, 20.0, 30.0, -1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_steps_are_taken_back_by_the_logger_that_wrote_them(tmp_path: Path) -> None:
    writer = JsonlLogger(folder=tmp_path)
    writer.log_metrics({"a": 1.0}, step=5)
    writer.drop_after(0)
    writer.log_metrics({"a": 2.0}, step=1)
    assert [x.tolist() for x in read_metrics(tmp_path)["a"]] == [[1], [2.0]]


def test_nothing_is_rewritten_where_nothing_is_later(tmp_path: Path) -> None:
    writer = JsonlLogger(folder=tmp_path)
    writer.drop_after(0)
    writer.log_metrics({"a": 1.0}, step=5)
    inode = writer.path.stat().st_ino
    writer.drop_after(5)
    assert writer.path.stat().st_ino == inode


def test_a_last_line_that_a_crash_cut_is_left_out_and_spoils_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0, "a": 1.0}\n{"step": 2, "ti')
    with caplog.at_level(logging.WARNING):
        assert read_metrics(path)["a"][0].tolist() == [1]
    assert caplog.records == []

    JsonlLogger(folder=tmp_path).log_metrics({"a": 3.0}, step=3)
    with caplog.at_level(logging.WARNING):
        assert read_metrics(path)["a"][0].tolist() == [1, 3]
    assert f"{path}:2" in caplog.text


def test_curves_rise_in_steps_and_the_later_figure_of_a_step_stays(tmp_path: Path) -> None:
    writer = JsonlLogger(folder=tmp_path)
    for step, value in [(20, 2.0), (10, 1.0), (20, 3.0)]:
        writer.log_metrics({"a": value}, step=step)
    steps, values = read_metrics(tmp_path)["a"]
    assert (steps.dtype, values.dtype) == (np.int64, np.float64)
    assert (steps.tolist(), values.tolist()) == ([10, 20], [1.0, 3.0])


def test_a_run_without_metrics_has_no_curves(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == {}


def test_only_rank_zero_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    writer = JsonlLogger(folder=tmp_path)
    writer.log_metrics({"a": 1.0}, step=1)
    writer.drop_after(0)
    assert list(tmp_path.iterdir()) == []


def test_metrics_without_a_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics \['a'\] came without a step"):
        JsonlLogger(folder=tmp_path).log_metrics({"a": 1.0})


def test_a_metric_named_like_a_field_of_the_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a metric cannot be called 'time'"):
        JsonlLogger(folder=tmp_path).log_metrics({"time": 1.0}, step=1)
