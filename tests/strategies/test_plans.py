"""One checkpoint, any plan: what one plan saved, every other goes on with, at the exact sample."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import nemo_like.strategies
from nemo_like.collections.llm.testing import rehearse
from nemo_like.optim import AdamW
from nemo_like.testing.numerics import assert_close
from nemo_like.testing.world import run_world

# Ranks, strategy, options.
PLANS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "single": (1, "DDPStrategy", {"micro_batch_size": 3}),
    "ddp2": (2, "DDPStrategy", {}),
    "ddp3": (3, "DDPStrategy", {}),
    "fsdp2": (2, "FSDPStrategy", {}),
    "fsdp4": (4, "FSDPStrategy", {"shard": "gradients"}),
    "hybrid2x2": (4, "FSDPStrategy", {"replicate": 2, "micro_batch_size": 1}),
    "zero1x2": (2, "DeepSpeedStrategy", {"stage": 1}),
    "zero2x2": (2, "DeepSpeedStrategy", {"stage": 2}),
    "zero3x2": (2, "DeepSpeedStrategy", {"stage": 3, "micro_batch_size": 1}),
    "zero3x4": (4, "DeepSpeedStrategy", {"stage": 3}),
    "tp2": (2, "MegatronStrategy", {"tensor_parallel": 2}),
    "tp2sp": (2, "MegatronStrategy", {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, "MegatronStrategy", {"pipeline_parallel": 2}),
    "pp2x2": (2, "MegatronStrategy", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "tp2pp2": (4, "MegatronStrategy", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "tp2dp2": (4, "MegatronStrategy", {"tensor_parallel": 2, "micro_batch_size": 1}),
}
SAVED_AT, STEPS = 5, 10


def run_plan(name: str, starts: dict[str, str | None], folder: str | None) -> dict[str, Any]:
    """Runs a plan on this rank once from each start; gives what each run did."""
    ranks, strategy, options = PLANS[name]
    runs = {}
    for start, checkpoint in starts.items():
        runs[start] = rehearse(
            getattr(nemo_like.strategies, strategy)(**{"micro_batch_size": 2, **options}),
            devices=ranks,
            steps=STEPS,
            # Adam's first steps have the size of the rate whatever the gradient: with a hundredth, rounding of those
            # near zero would show in the weights.
            optim=AdamW(lr=1e-3),
            # Interleaved stages want micro-batches in multiples of their number, in every step.
            num_samples=24,
            folder=None if folder is None else Path(folder),
            every_n_steps=SAVED_AT,
            resume=None if checkpoint is None else Path(checkpoint),
        )
    return runs


def save_plans(names: list[str], folder: Path) -> dict[str, str]:
    """Runs each plan from the beginning; gives its checkpoint in the middle."""
    for name in names:
        run_world(PLANS[name][0], run_plan, name, {"new": None}, str(folder / name))
    return {name: str(folder / name / f"step_{SAVED_AT:08d}") for name in names}


def assert_all_go_on(names: list[str], folder: Path) -> None:
    reference = run_plan("single", {"new": None}, None)["new"]
    checkpoints = save_plans(names, folder)
    for name in names:
        ranks = run_world(
            PLANS[name][0], run_plan, name, {**checkpoints}, None, timeout_s=100 + 20 * len(names)
        )
        for start in names:
            runs = [rank[start] for rank in ranks]
            assert_goes_on(runs, reference, what=f"{start} -> {name}")


def assert_goes_on(runs: list[dict[str, Any]], reference: dict[str, Any], *, what: str) -> None:
    rest = reference["steps"][SAVED_AT:]
    for run in runs:
        assert len(run["steps"]) == len(rest), what
        for step, expected in zip(run["steps"], rest, strict=True):
            for key in ("train/loss", "train/grad_norm", "train/lr"):
                assert step[key] == pytest.approx(expected[key], rel=2e-5), (what, key)
        assert run["val"]["val/loss"] == pytest.approx(reference["val"]["val/loss"], rel=2e-5), what
        assert run["position"] == reference["position"], what
    for step, expected_ids in enumerate(reference["sample_ids"][SAVED_AT:]):
        # Ranks that share a model read the same samples.
        shares = {tuple(run["sample_ids"][step]) for run in runs}
        assert sorted(itertools.chain(*shares)) == sorted(expected_ids), what
    for name, tensor in reference["weights"].items():
        assert_close(runs[0]["weights"][name], tensor)


@pytest.mark.dist
def test_what_one_plan_saved_another_goes_on_with(tmp_path: Path) -> None:
    assert_all_go_on(["ddp2", "fsdp2", "zero3x2", "tp2"], tmp_path)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(3000)
def test_every_plan_goes_on_with_what_every_plan_saved(tmp_path: Path) -> None:
    assert_all_go_on(list(PLANS), tmp_path)


# With three ranks even the order of a sum over the ranks has to be the same.
@pytest.mark.dist
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "ddp3" else pytest.mark.slow) for name in PLANS],
)
def test_the_same_plan_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "runs")
    whole = run_world(PLANS[name][0], run_plan, name, {"new": None}, folder)
    start = {"half": str(Path(folder) / f"step_{SAVED_AT:08d}")}
    halves = run_world(PLANS[name][0], run_plan, name, start, None)
    for rank, half in zip(whole, halves, strict=True):
        for key, tensor in rank["new"]["weights"].items():
            assert torch.equal(half["half"]["weights"][key], tensor), key


class SaveMeter(pl.Callback):
    """Saves after training and notes how far the memory of this process rose."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rise_bytes = folder, 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Sets the high-water mark of resident memory to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        before = read_status_bytes("VmHWM")
        trainer.save_checkpoint(self.folder / "step_00000001")
        self.rise_bytes = read_status_bytes("VmHWM") - before


def read_status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def measure_save(name: str, folder: str) -> tuple[int, int]:
    ranks, strategy, options = PLANS[name]
    meter = SaveMeter(Path(folder))
    run = rehearse(
        getattr(nemo_like.strategies, strategy)(**{"micro_batch_size": 4, **options}),
        devices=ranks,
        steps=1,
        network={"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192},
        callbacks=[meter],
        limit_val_batches=0,
    )
    return meter.rise_bytes, sum(tensor.nbytes for tensor in run["weights"].values())


# A rank writes what it holds and needs room to serialise it; ZeRO also has to cut its runs of elements into rows.
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"), [("fsdp4", 0.45), ("hybrid2x2", 0.45), ("tp2pp2", 0.45), ("zero3x4", 0.85)]
)
def test_saving_never_holds_the_whole_model_on_a_rank(
    name: str, most: float, tmp_path: Path
) -> None:
    for rise_bytes, weights_bytes in run_world(PLANS[name][0], measure_save, name, str(tmp_path)):
        # With Adam's two states. To gather the weights alone would take 0.25 more: three quarters of a third.
        assert rise_bytes < most * 3 * weights_bytes
