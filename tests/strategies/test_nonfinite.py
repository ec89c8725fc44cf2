"""A step whose loss or gradient is not finite changes nothing, on any rank, under any plan."""

from __future__ import annotations

import logging
import logging.handlers
import math
import queue
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import nemo_like.strategies
from nemo_like.collections.llm.testing import rehearse
from nemo_like.core.checkpoint import open_checkpoint
from nemo_like.core.nonfinite import NonfiniteSteps, describe_ids, read_together
from nemo_like.optim import AdamW
from nemo_like.strategies.nonfinite import judge_step, update_scale
from nemo_like.testing.toy import ToyModel
from nemo_like.testing.world import run_world

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("DDPStrategy", {}),
    "fsdp": ("FSDPStrategy", {}),
    "zero1": ("DeepSpeedStrategy", {"stage": 1}),
    "zero2": ("DeepSpeedStrategy", {"stage": 2}),
    "zero3": ("DeepSpeedStrategy", {"stage": 3, "offload_optimizer": True}),
    "megatron replicas": ("MegatronStrategy", {}),
    "megatron tensor": ("MegatronStrategy", {"tensor_parallel": 2, "sequence_parallel": True}),
    "megatron pipeline": ("MegatronStrategy", {"pipeline_parallel": 2}),
}
BAD = {2: "gradient", 3: "loss"}
"""Steps done before -> what is not finite, on the last rank alone."""


class NanGradient(torch.autograd.Function):
    """The value itself forward, not a number backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.nan


class Poison(pl.Callback):
    """Makes loss or gradient of some steps not finite, on the last rank alone; notes what each step changed."""

    def __init__(self, bad: dict[int, str], *, scale: float | None = None) -> None:
        self.bad, self.scale = bad, scale
        self.changed: list[bool] = []
        self.scales: list[float] = []
        self._before: dict[str, Tensor] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._wrap(pl_module, "compute_loss_sum", trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pipeline = getattr(trainer.strategy, "_pipeline", None)
        if pipeline is not None:
            self._wrap(pipeline.parts, "sum_loss", trainer)
        if self.scale is not None and trainer.global_step == 0:
            scaler: Any = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
            state = {"scale": self.scale, "growth_interval": 3}
            scaler.load_state_dict({**scaler.state_dict(), **state})
        self._before = take_state(trainer)

    def _wrap(self, owner: Any, name: str, trainer: pl.Trainer) -> None:
        compute = getattr(owner, name)

        def poisoned(*arguments: Any) -> Tensor:
            loss: Tensor = compute(*arguments)
            kind = self.bad.get(trainer.global_step) if trainer.training else None
            if kind is None or trainer.global_rank != trainer.world_size - 1:
                return loss
            return loss + math.inf if kind == "loss" else NanGradient.apply(loss)

        setattr(owner, name, poisoned)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: Any
    ) -> None:
        now = take_state(trainer)
        self.changed.append(
            now.keys() != self._before.keys()
            or any(not torch.equal(now[name], self._before[name]) for name in now)
        )
        assert all(bool(it.isfinite().all()) for it in now.values())
        self._before = now
        scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.scales.append(scaler.get_scale())


def take_state(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Copies of weights, optimizer state and averages, as far as this rank holds them."""
    strategy: Any = trainer.strategy
    weights, state = strategy.collect_tensors()
    tensors = {**{f"model.{name}": it for name, it in weights.items()}, **state}
    return {
        name: (it.to_local() if isinstance(it, DTensor) else it).detach().clone()
        for name, it in tensors.items()
    }


def run_poisoned(
    plan: tuple[str, dict[str, Any]],
    devices: int,
    bad: dict[int, str],
    *,
    scale: float | None = None,
    steps: int = 5,
    **options: Any,
) -> dict[str, Any]:
    poison = Poison(bad, scale=scale)
    strategy = getattr(nemo_like.strategies, plan[0])(**{"micro_batch_size": 2, **plan[1]})
    run = rehearse(
        strategy,
        devices=devices,
        steps=steps,
        optim=AdamW(lr=1e-2, ema_decay=0.9),
        network={"num_layers": 2},
        callbacks=[poison],
        **{"limit_val_batches": 0, **options},
    )
    return {**run, "changed": poison.changed, "scales": poison.scales}


def run_all(devices: int, names: list[str]) -> dict[str, Any]:
    runs: dict[str, Any] = {}
    for name in names:
        records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        handler = logging.handlers.QueueHandler(records)
        logging.getLogger("nemo_like").addHandler(handler)
        runs[name] = run_poisoned(PLANS[name], devices, BAD)
        logging.getLogger("nemo_like").removeHandler(handler)
        messages = [records.get() for _ in range(records.qsize())]
        runs[name]["log"] = [it.msg for it in messages if it.levelno >= logging.WARNING]
        # Of this process, so the ranks can compare: as a figure it would differ where no rank holds all.
        runs[name]["weights"] = sum(
            float(it.double().sum()) for it in runs[name]["weights"].values()
        )
    return runs


def assert_skipped(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        run = rank[name]
        assert run["changed"] == [True, True, False, False, True], name
        counts = [step.get("train/skipped") for step in run["steps"]]
        assert counts == [None, None, 1, 2, 2], name
        figures = [step["train/loss"] + step["train/grad_norm"] for step in run["steps"]]
        assert [math.isfinite(it) for it in figures] == [True, True, False, False, True], name
        assert math.isfinite(run["steps"][2]["train/loss"]), name
        rates = [step["train/lr"] for step in run["steps"]]
        assert rates == pytest.approx([1e-2 * 0.5 ** (step / 10) for step in range(5)]), name
        assert run["position"] == 8 + 8 + 4 + 8 + 8, name
        assert run["global_step"] == 5, name
        assert run["weights"] == ranks[0][name]["weights"], name
        first, second = run["log"]
        assert first.startswith("step 3 changed nothing (1 so far): loss "), name
        assert "gradient norm nan" in first or "gradient norm inf" in first, name
        assert second.startswith("step 4 changed nothing (2 so far): loss "), name
        assert "data position 28, samples of rank " in second, name


@pytest.mark.dist
def test_one_bad_rank_leaves_a_step_out_on_all_ranks_bit_for_bit_under_every_plan() -> None:
    ranks = run_world(2, run_all, 2, list(PLANS), timeout_s=280)
    for name in PLANS:
        assert_skipped(name, ranks)
    # Only the rank whose loss was infinite is named, where there is one; else what all have read.
    first, second = ranks[0]["ddp"]["log"]
    assert first.endswith("samples of rank 0: 16, 17; rank 1: 18, 19")
    assert second.startswith("step 4 changed nothing (2 so far): loss inf, ")
    assert second.endswith("samples of rank 1: 4, 5, 6, 7")


def test_the_count_and_the_weights_go_on_through_a_checkpoint(tmp_path: Path) -> None:
    plan, bad = PLANS["ddp"], {1: "loss", 4: "gradient"}
    whole = run_poisoned(plan, 1, bad, steps=6, folder=tmp_path, every_n_steps=2)
    half = tmp_path / "step_00000002"
    counts = {"total": 1, "in_a_row": 1, "first": 2, "last": 2}
    assert open_checkpoint(half).state["nonfinite_steps"] == counts
    resumed = run_poisoned(plan, 1, bad, steps=6, resume=half)
    assert [step["train/skipped"] for step in resumed["steps"]] == [1, 1, 2, 2]
    assert repr(resumed["steps"]) == repr(whole["steps"][2:])  # nan is not equal to itself
    for name, tensor in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor), name


def test_a_clean_run_says_nothing_of_steps_that_were_left_out(tmp_path: Path) -> None:
    run = run_poisoned(PLANS["ddp"], 1, {}, steps=2, folder=tmp_path, every_n_steps=2)
    assert all("train/skipped" not in step for step in run["steps"])
    assert "nonfinite_steps" not in open_checkpoint(tmp_path / "step_00000002").state


# FP16.


@pytest.mark.parametrize("name", ["ddp"])
def test_an_overflow_of_the_loss_scale_is_its_ordinary_business(name: str) -> None:
    run = run_poisoned(PLANS[name], 1, {}, scale=2.0**40, precision="fp16-mixed", steps=3)
    assert run["scales"] == [2.0**39, 2.0**38, 2.0**37]
    assert run["changed"] == [False] * 3
    assert all("train/skipped" not in step for step in run["steps"])


FP16 = {0: "gradient", 1: "gradient", 2: "loss", 4: "gradient"}
SCALES = [1.0, 1.0, 1.0, 1.0, 1.0]


def run_fp16(devices: int, names: list[str]) -> dict[str, Any]:
    return {
        name: run_poisoned(PLANS[name], devices, FP16, scale=2.0, precision="fp16-mixed")
        for name in names
    }


def assert_fp16(run: dict[str, Any]) -> None:
    assert run["scales"] == SCALES
    assert run["changed"] == [False, False, False, True, False]
    # The first only halves the scale, from 2 to 1.
    assert [step.get("train/skipped") for step in run["steps"]] == [None, 1, 2, 2, 3]


def test_a_scale_that_cannot_go_lower_and_a_loss_that_is_infinite_are_counted_under_fp16() -> None:
    assert_fp16(run_fp16(1, ["ddp"])["ddp"])


@pytest.mark.dist
def test_fp16_is_judged_alike_on_all_ranks_when_sharded() -> None:
    names = ["fsdp", "zero2", "zero3"]
    for rank in run_world(2, run_fp16, 2, names, timeout_s=200):
        for name in names:
            assert_fp16(rank[name])


def test_interrupted_equals_uninterrupted_with_a_loss_scale_that_grows_and_falls(
    tmp_path: Path,
) -> None:
    bad = {4: "gradient"}
    options: dict[str, Any] = {"precision": "fp16-mixed", "steps": 8}
    whole = run_poisoned(
        PLANS["ddp"], 1, bad, scale=64.0, folder=tmp_path, every_n_steps=2, **options
    )
    # It grows after three finite steps, one of which the checkpoint has not seen yet.
    assert whole["scales"] == [64.0, 64.0, 128.0, 128.0, 64.0, 64.0, 64.0, 128.0]
    half = tmp_path / "step_00000002"
    saved = open_checkpoint(half).state["MixedPrecision"]
    assert (saved["scale"], saved["_growth_tracker"]) == (64.0, 2)
    resumed = run_poisoned(PLANS["ddp"], 1, bad, scale=64.0, resume=half, **options)
    assert resumed["scales"] == whole["scales"][2:]
    assert repr(resumed["steps"]) == repr(whole["steps"][2:])  # nan is not equal to itself
    for name, tensor in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor), name


# The parts.


def make_model(step: int = 0) -> Any:
    model = ToyModel()
    model.trainer = type("Steps", (), {"global_step": step})()  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("loss", "norm", "scale", "expected"),
    [
        (1.0, 2.0, None, (True, False)),
        (math.nan, 2.0, None, (False, True)),
        (1.0, math.inf, None, (False, True)),
        (-math.inf, math.inf, None, (False, True)),
        (1.0, math.inf, 8.0, (False, False)),
        (1.0, math.nan, 1.0, (False, True)),
        (math.nan, math.nan, 8.0, (False, True)),
    ],
)
def test_a_step_is_judged_by_loss_norm_and_scale(
    loss: float, norm: float, scale: float | None, expected: tuple[bool, bool]
) -> None:
    model = make_model(6)
    judged = judge_step(model, loss, norm, scale=None if scale is None else lambda: scale)
    assert judged == expected
    assert model.nonfinite.total == expected[1]
    assert model.nonfinite.last == 7 * expected[1]


def test_a_finite_step_ends_a_row_and_an_overflow_does_not() -> None:
    model = make_model()
    for _ in range(3):
        judge_step(model, math.nan, 1.0)
    judge_step(model, 1.0, math.inf, scale=lambda: 8.0)
    assert (model.nonfinite.in_a_row, model.nonfinite.first) == (3, 1)
    judge_step(model, 1.0, 1.0)
    assert (model.nonfinite.in_a_row, model.nonfinite.total) == (0, 3)


def test_torch_does_not_blame_the_schedule_for_a_first_step_that_was_left_out() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        judge_step(make_model(), math.nan, 1.0)
        scheduler.step()


def test_a_scale_has_a_floor_and_a_bad_loss_leaves_it_alone() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.5)
    scaler.scale(torch.ones(()))
    update_scale(scaler, is_finite=False, is_left_out=True)
    assert scaler.get_scale() == 1.5
    update_scale(scaler, is_finite=False, is_left_out=False)
    assert scaler.get_scale() == 1.0


def test_counts_survive_a_round_trip_and_ids_are_cut() -> None:
    steps, again = NonfiniteSteps(), NonfiniteSteps()
    steps.note(4)
    steps.note(5)
    again.load_state_dict(steps.state_dict())
    assert (again.total, again.in_a_row, again.first, again.last) == (2, 2, 4, 5)
    assert describe_ids([]) == "none"
    assert describe_ids(list(range(5)), most=2) == "0, 1 and 3 more"
    assert read_together(torch.tensor(1.5), torch.tensor(math.inf)) == [1.5, math.inf]


@pytest.mark.gpu
def test_figures_of_two_devices_are_read_together() -> None:
    assert read_together(torch.tensor(1.5, device="cuda"), torch.tensor(2.0)) == [1.5, 2.0]
