"""The machine monitor in real runs: what is recorded, who is warned, what the page shows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from nemo_like.callbacks import MachineMonitor, Report
from nemo_like.callbacks.config import MachineMonitorConfig
from nemo_like.strategies import DDPStrategy
from nemo_like.testing.fit import QUIET, FusedAdamW
from nemo_like.testing.toy import ToyDataModule, ToyModel
from nemo_like.testing.world import run_world
from nemo_like.tracking.logger import JsonlLogger, read_metrics

# Said by Lightning about its own use of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")

MB = 1_000_000


class Leaking(pl.Callback):
    """Keeps memory.

    Args:
        sizes: Step -> bytes that are kept from then on.
    """

    def __init__(self, sizes: dict[int, int]) -> None:
        self.sizes, self.kept = sizes, []

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        # Filled with ones: pages that are never written to are no memory.
        self.kept.append(b"\1" * self.sizes.get(trainer.global_step, 0))


def train(
    folder: Path, *callbacks: pl.Callback, steps: int = 150, devices: int = 1
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = ToyModel()
    model.optim, model.seed = FusedAdamW(), 3
    options = {"logger": JsonlLogger(folder=folder), "default_root_dir": folder}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=DDPStrategy(micro_batch_size=8),
        max_steps=steps,
        max_epochs=-1,
        callbacks=list(callbacks),
        log_every_n_steps=1,
        **{**QUIET, **options},
    )
    trainer.fit(model, datamodule=ToyDataModule())
    return model.state_dict()


def leaks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.getMessage() for it in caplog.records if "grows by" in it.getMessage()]


def test_a_run_that_keeps_a_megabyte_a_step_is_told_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leak = Leaking({step: MB for step in range(1, 151)})
    train(tmp_path, MachineMonitor(), leak, Report())
    (text,) = leaks(caplog)
    assert "the memory of rank 0 grows by 1." in text
    assert "MB a step, since about step 2" in text  # 21: where the warm-up ends
    _, growth = read_metrics(tmp_path)["machine/rss_growth_mb_per_step"]
    assert growth[-1] == pytest.approx(1, rel=0.15)
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Memory and machine</h2>" in page
    assert "Rank 0 leaks: 1." in page
    assert "<figcaption>rss_gb</figcaption>" in page
    # They are no part of the learning curves, which have the full names.
    assert "machine/rss_gb" not in page


def test_a_healthy_run_and_one_whose_memory_jumps_are_not_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "healthy", MachineMonitor())
    train(tmp_path / "jumps", MachineMonitor(), Leaking({60: 200 * MB, 100: 100 * MB}))
    assert leaks(caplog) == []
    steps, memory = read_metrics(tmp_path / "jumps")["machine/rss_gb"]
    assert memory[steps == 65] - memory[steps == 55] == pytest.approx(0.2, abs=0.02)


def test_the_monitor_changes_nothing_and_keeps_to_its_steps(tmp_path: Path) -> None:
    plain = train(tmp_path / "without", steps=10)
    watched = train(tmp_path / "with", MachineMonitor(every_n_steps=4), steps=10)
    for name, tensor in plain.items():
        assert torch.equal(watched[name], tensor)
    lines = [json.loads(it) for it in (tmp_path / "with/metrics.jsonl").read_text().splitlines()]
    assert [it["step"] for it in lines] == [4, 8, 10]
    assert set(lines[0]) == {
        "step", "time", "machine/rss_gb", "machine/rss_peak_gb", "machine/private_gb",
        "machine/host_available_gb", "machine/cpu_percent", "machine/host_cpu_percent",
    }  # fmt: skip


def train_rank(folder: Path) -> tuple[list[str], list[Any]]:
    """The second of two ranks leaks."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nemo_like.callbacks.machine").addHandler(handler)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    monitor = MachineMonitor()
    leak = Leaking({step: MB * rank for step in range(1, 121)})
    train(folder, monitor, leak, steps=120, devices=2)
    (section,) = monitor.describe()
    return records, [section.table.rows, list(section.table.emphasis), section.note]


@pytest.mark.dist
def test_ranks_are_one_record_and_the_one_that_leaks_is_named(tmp_path: Path) -> None:
    (first, shown), (second, _) = run_world(2, train_rank, tmp_path)
    (text,) = first
    assert "the memory of rank 1 grows by 1." in text
    assert second == []
    curves = read_metrics(tmp_path)
    least, mean, most = (curves[f"machine/rss_gb{end}"][1][-1] for end in ("_min", "", "_max"))
    assert most - least == pytest.approx(0.12, abs=0.03)
    assert mean == pytest.approx((least + most) / 2)
    rows, emphasis, note = shown
    assert ([row[0] for row in rows], emphasis) == ([0, 1], [1])
    assert note.startswith("Rank 1 leaks: 1.")


def test_a_gpu_that_is_slowed_down_is_told_once_and_its_power_cap_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from nemo_like.callbacks.machine import _SENT, summarize

    monitor = MachineMonitor()
    monitor._last = np.full((2, len(_SENT)), np.nan)
    monitor._last[:, _SENT.index("device_throttle")] = [4, 0x44]
    monitor._last[:, _SENT.index("device_temperature_c")] = [60, 90]
    for step in (1, 2):
        monitor._warn(step)
    assert [it.getMessage() for it in caplog.records] == [
        "step 1: the GPU of rank 1 is slowed down: temperature (hardware)"
    ]
    assert summarize(monitor._last) == {
        "machine/device_temperature_c": 75.0,
        "machine/device_temperature_c_min": 60.0,
        "machine/device_temperature_c_max": 90.0,
        "machine/device_throttled": 1.0,
    }
    (section,) = monitor.describe()
    assert section.table is not None
    assert [row[-1] for row in section.table.rows] == [
        "power cap", "power cap, temperature (hardware)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0: must be at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1: must be at least 0"),
        ({"leak_mb": 0.0}, "leak_mb=0.0: must be above 0"),
    ],
)
def test_values_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MachineMonitor(**options)
    (fault,) = MachineMonitorConfig(**options).check()
    assert fault.startswith(text)
    assert list(MachineMonitorConfig().check()) == []
