"""What is read of a process and its machine."""

from __future__ import annotations

import gc
import logging
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from nemo_like.tracking.machine import (
    FIGURES,
    Meter,
    Sensors,
    find_memory_groups,
    measure_available_bytes,
    measure_peak_bytes,
    name_throttles,
    reset_peak,
)
from nemo_like.tracking.report import RunFacts, write_report

CPU = torch.device("cpu")


def test_memory_that_is_taken_is_seen_and_a_cpu_has_no_figures_of_a_gpu() -> None:
    meter = Meter(CPU)
    gc.collect()  # what other tests have left, or it would go in between
    before = meter.read()
    kept = bytearray(200_000_000)
    after = meter.read()
    assert len(kept) == 200_000_000
    for name in ("rss_gb", "private_gb"):
        # The system may take back what other tests have left between the two readings.
        assert 0.12 < after[name] - before[name] < 0.23
    assert after["rss_peak_gb"] >= after["rss_gb"]
    assert list(after) == list(FIGURES)
    assert {name for name, value in after.items() if math.isnan(value)} == {
        name for name in FIGURES if name.startswith("device_")
    }


def test_pages_of_files_are_no_memory_of_the_process_alone(tmp_path: Path) -> None:
    meter = Meter(CPU)
    path = tmp_path / "shard"
    path.write_bytes(bytes(60_000_000))
    before = meter.read()
    mapped = torch.from_file(str(path), size=60_000_000, dtype=torch.uint8)
    mapped.sum()
    after = meter.read()
    assert after["rss_gb"] - before["rss_gb"] > 0.05
    assert after["private_gb"] - before["private_gb"] < 0.02


def test_the_report_draws_least_mean_and_most_of_the_ranks(tmp_path: Path) -> None:
    steps = np.array([1, 2])
    curves = {
        f"machine/rss_gb{end}": (steps, np.array([1.0, value]))
        for end, value in {"": 2.0, "_min": 1.5, "_max": 2.5}.items()
    }
    facts = RunFacts(name="run", steps=2, duration_s=1.0)
    write_report(tmp_path / "report.html", facts=facts, curves=curves)
    page = (tmp_path / "report.html").read_text()
    assert re.findall("<figcaption>(.*?)</figcaption>", page) == ["rss_gb"]
    assert re.findall('<text class="legend".*?>(.*?)</text>', page) == ["min", "max", "mean"]
    write_report(tmp_path / "report.html", facts=facts, curves={})
    assert "Machine by optimizer step" not in (tmp_path / "report.html").read_text()


def test_processor_time_is_that_since_the_reading_before() -> None:
    meter = Meter(CPU)
    end = psutil.Process().cpu_times().user + 0.2
    while psutil.Process().cpu_times().user < end:
        pass
    figures = meter.read()
    assert 20 < figures["cpu_percent"] < 400
    assert 0 < figures["host_cpu_percent"] <= 100


def test_the_peak_can_begin_anew() -> None:
    reset_peak(CPU)
    before = measure_peak_bytes(CPU)
    kept = bytearray(100_000_000)
    del kept
    assert measure_peak_bytes(CPU) - before > 90_000_000
    reset_peak(CPU)
    assert measure_peak_bytes(CPU) - before < 50_000_000


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_a_container_leaves_less_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_text("0::/pod/job\n")
    write_group(tmp_path / "pod", memory__max="5000", memory__current="1000", memory__stat="x 1\n")
    write_group(tmp_path / "pod/job", memory__max="max", memory__current="1", memory__stat="x 1\n")
    assert find_memory_groups(tmp_path, own) == [tmp_path / "pod"]
    groups = [tmp_path / "pod"]
    monkeypatch.setattr("nemo_like.tracking.machine.find_memory_groups", lambda: groups)
    assert measure_available_bytes() == 4000
    # Pages of files are given back.
    write_group(tmp_path / "pod", memory__stat="anon 3\ninactive_file 500\n")
    assert measure_available_bytes() == 4500


def test_control_groups_of_the_first_version_are_read(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("7:cpu:/job\n4:memory:/job\n")
    write_group(
        tmp_path / "memory/job",
        memory__limit_in_bytes="5000",
        memory__usage_in_bytes="1000",
        memory__stat="x 1\n",
    )
    write_group(
        tmp_path / "memory",
        memory__limit_in_bytes=str(2**63 - 4096),
        memory__usage_in_bytes="1000",
        memory__stat="x 1\n",
    )
    assert find_memory_groups(tmp_path, own) == [tmp_path / "memory/job"]


class NVMLError(Exception):
    pass


def make_nvml(**answers: Any) -> SimpleNamespace:
    """What a driver could answer; a GPU is not at hand."""

    def refuse(*arguments: Any) -> Any:
        raise NVMLError("not supported")

    functions = {
        "nvmlDeviceGetTemperature": refuse,
        "nvmlDeviceGetPowerUsage": refuse,
        "nvmlDeviceGetUtilizationRates": refuse,
        "nvmlDeviceGetCurrentClocksThrottleReasons": refuse,
    }
    functions |= {name: lambda *_, value=value: value for name, value in answers.items()}
    return SimpleNamespace(NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, **functions)


def test_sensors_have_units_and_those_that_a_device_lacks_are_left_out() -> None:
    # Idle clocks (1) are no reason to be slow; a power cap (4) and a temperature (64) are.
    nvml = make_nvml(
        nvmlDeviceGetTemperature=71,
        nvmlDeviceGetPowerUsage=350_500,
        nvmlDeviceGetCurrentClocksThrottleReasons=1 | 4 | 64,
    )
    figures = Sensors(nvml, None).read()
    assert figures == {
        "device_temperature_c": 71,
        "device_power_w": 350.5,
        "device_throttle": 68,
    }
    assert name_throttles(figures["device_throttle"]) == "power cap, temperature (hardware)"
    assert name_throttles(0) == name_throttles(float("nan")) == ""


def test_sensors_are_not_asked_more_often_than_they_change() -> None:
    nvml = make_nvml(nvmlDeviceGetTemperature=71)
    sensors = Sensors(nvml, None)
    sensors.read()
    nvml.nvmlDeviceGetTemperature = lambda *_: 80
    assert sensors.read()["device_temperature_c"] == 71


def test_a_machine_without_nvidia_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "nemo_like"):
        assert Sensors.find(CPU) is None
    assert caplog.records == []
