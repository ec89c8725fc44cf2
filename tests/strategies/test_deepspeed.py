"""ZeRO equals the single process, whatever it cuts, offloads or computes again."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_like.collections.llm.testing import rehearse
from nemo_like.core.checkpoint import open_checkpoint
from nemo_like.core.errors import ConfigError, MissingExtraError
from nemo_like.core.precision import PrecisionName
from nemo_like.optim import AdamW
from nemo_like.strategies import DDPStrategy, register
from nemo_like.strategies.deepspeed import DeepSpeedStrategy
from nemo_like.testing.fit import fit_toy
from nemo_like.testing.numerics import TOLERANCE, assert_close
from nemo_like.testing.toy import ToyDataModule, ToyModel
from nemo_like.testing.world import run_world

Plan = dict[str, Any]

FP32 = 2e-5


def run_plans(ranks: int, plans: dict[str, Plan], options: dict[str, Any]) -> dict[str, Any]:
    """Runs one plan after the other on this rank."""
    return {name: rehearse(make(plan), devices=ranks, **options) for name, plan in plans.items()}


def make(plan: Plan) -> DeepSpeedStrategy:
    return DeepSpeedStrategy(**{"micro_batch_size": 2, **plan})


def assert_same(
    run: dict[str, Any], reference: dict[str, Any], what: str, *, tolerance: float = FP32
) -> None:
    expected_steps = reference["steps"][-len(run["steps"]) :]
    assert len(run["steps"]) > 0, what
    for step, expected in zip(run["steps"], expected_steps, strict=True):
        for key in ("train/loss", "train/grad_norm", "train/lr"):
            assert step[key] == pytest.approx(expected[key], rel=tolerance), (what, key)
    assert run["val"]["val/loss"] == pytest.approx(reference["val"]["val/loss"], rel=tolerance), (
        what
    )
    assert run["position"] == reference["position"], what
    assert_close(run["weights"], reference["weights"], tolerance=tolerance)


def compare(ranks: int, plans: dict[str, Plan], **options: Any) -> None:
    # Adam's first steps have the size of the rate whatever the gradient: with a hundredth, rounding of those near zero
    # would show in the weights.
    options["optim"] = AdamW(lr=1e-3)
    reference = rehearse(DDPStrategy(micro_batch_size=8), **options)
    for runs in run_world(ranks, run_plans, ranks, plans, options, timeout_s=280):
        for name, run in runs.items():
            assert_same(run, reference, name)


@pytest.mark.dist
def test_all_stages_equal_the_single_process() -> None:
    plans: dict[str, Plan] = {
        "zero1": {"stage": 1},
        "zero2, uneven micro-batches": {"stage": 2, "micro_batch_size": 3},
        "zero3 on the host": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
        "zero3, all computed again": {"stage": 3, "activation_checkpointing": "full"},
    }
    compare(2, plans)


@pytest.mark.slow
@pytest.mark.dist
def test_offloading_and_recomputation_change_nothing() -> None:
    plans: dict[str, Plan] = {
        "zero1 offload": {"stage": 1, "offload_optimizer": True},
        "zero2 offload": {"stage": 2, "offload_optimizer": True},
        "zero3 offload optimizer": {"stage": 3, "offload_optimizer": True},
        "zero3 offload parameters": {"stage": 3, "offload_parameters": True},
        "zero2 full": {"stage": 2, "activation_checkpointing": "full"},
        "zero3 selective": {"stage": 3, "activation_checkpointing": "selective"},
        "zero3 activations": {
            "stage": 3, "activation_checkpointing": "full", "activation_offload": True,
        },
    }  # fmt: skip
    compare(2, plans)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_number_of_ranks_and_tied_weights_change_nothing(ranks: int) -> None:
    # With 3 ranks the shares of the batch and the pieces of the parameters are uneven.
    plans: dict[str, Plan] = {f"zero{stage}": {"stage": stage} for stage in (1, 2, 3)}
    compare(ranks, plans, network={"tie_embeddings": True})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:.*GradScaler")
@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)]
)
def test_mixed_precision_means_what_it_means_elsewhere(
    precision: PrecisionName, dtype: torch.dtype
) -> None:
    plans: dict[str, Plan] = {f"zero{stage}": {"stage": stage} for stage in (1, 3)}
    reference = rehearse(DDPStrategy(micro_batch_size=8), precision=precision)["steps"]
    for runs in run_world(2, run_plans, 2, plans, {"precision": precision}, timeout_s=280):
        for name, run in runs.items():
            # Norms are compared where both stand on the same weights: Adam carries on what was rounded away.
            first, expected = run["steps"][0], reference[0]
            assert first["train/grad_norm"] == pytest.approx(
                expected["train/grad_norm"], rel=TOLERANCE[dtype]
            ), name
            for step, other in zip(run["steps"], reference, strict=True):
                assert step["train/loss"] == pytest.approx(
                    other["train/loss"], rel=TOLERANCE[torch.bfloat16]
                ), name


# Checkpoints.


def run_and_resume(ranks: int, plan: Plan, folder: Path, at: int) -> tuple[Any, Any]:
    whole = rehearse(make(plan), devices=ranks, folder=folder, every_n_steps=at)
    half = rehearse(make(plan), devices=ranks, resume=folder / f"step_{at:08d}")
    return whole, half


@pytest.mark.dist
def test_a_run_goes_on_bit_for_bit_and_from_plan_to_plan(tmp_path: Path) -> None:
    reference = rehearse(DDPStrategy(micro_batch_size=8))
    for whole, half in run_world(2, run_and_resume, 2, {"stage": 3}, tmp_path / "zero3", 4):
        assert_same(whole, reference, "zero3")
        assert half["steps"] == whole["steps"][4:]
        for name, tensor in whole["weights"].items():
            assert torch.equal(half["weights"][name], tensor), name
    single = rehearse(
        DDPStrategy(micro_batch_size=8),
        resume=tmp_path / "zero3" / "step_00000004",
        folder=tmp_path / "single",
        every_n_steps=8,
    )
    assert_same(single, reference, "zero3 -> single")
    start = {"resume": tmp_path / "single" / "step_00000008"}
    for runs in run_world(2, run_plans, 2, {"zero1": {"stage": 1}}, start):
        assert len(runs["zero1"]["steps"]) == 2
        assert_same(runs["zero1"], reference, "single -> zero1")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
def test_other_stages_go_on_bit_for_bit(stage: int, offload: bool, tmp_path: Path) -> None:
    plan = {"stage": stage, "offload_optimizer": offload}
    for whole, half in run_world(2, run_and_resume, 2, plan, tmp_path, 4):
        for name, tensor in whole["weights"].items():
            assert torch.equal(half["weights"][name], tensor), name


class SliceMeter(pl.Callback):
    """Adds up what a rank hands to the checkpoint, and what all of it is."""

    def __init__(self) -> None:
        self.held = self.whole = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        for tensors in strategy.collect_tensors():
            for tensor in tensors.values():
                self.whole += tensor.numel()
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                # What a slice is a view of stays in memory as well.
                self.held += local.untyped_storage().nbytes() // local.element_size()


# Communication, loss scale, refusals: small things in one world.


class _Counter(pl.Callback):
    """Counts the elements of reductions within training steps."""

    def __init__(self) -> None:
        self.is_open = False
        self.elements = 0
        # DeepSpeed keeps one of these functions from its first engine on.
        for name in ("all_reduce", "reduce", "reduce_scatter_tensor"):
            setattr(dist, name, self.wrap(getattr(dist, name)))

    def wrap(self, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.is_open:
                # Of a scattering one the input, which is as long as all outputs.
                tensors = [it for it in (*arguments, *options.values()) if isinstance(it, Tensor)]
                self.elements += max(tensor.numel() for tensor in tensors)
            return function(*arguments, **options)

        return call

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.is_open = True

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.is_open = False


def count_reductions(counter: _Counter, stage: int, micro_batch_size: int) -> tuple[int, float]:
    """How often a step reduces the gradient of the whole model; and the share of a rank in a checkpoint."""
    meter, counter.elements = SliceMeter(), 0
    run = rehearse(
        make({"stage": stage, "micro_batch_size": micro_batch_size}),
        devices=2,
        steps=2,
        num_samples=16,
        limit_val_batches=0,
        callbacks=[counter, meter],
    )
    model = sum(tensor.numel() for tensor in run["weights"].values())
    return round(counter.elements / 2 / model), meter.held / meter.whole


class _ScaleSetter(pl.Callback):
    """Starts with a loss scale that FP16 cannot hold, and notes scale and weights of each step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.weights: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scaler: Any = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**24})

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: Any
    ) -> None:
        scaler: Any = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        self.scales.append(scaler.get_scale())
        self.weights.append(next(pl_module.parameters()).detach().clone())


def train_fp16(folder: Path) -> tuple[list[float], list[Tensor], list[float]]:
    setter = _ScaleSetter()
    run = rehearse(
        make({"stage": 2}), devices=2, precision="fp16-mixed", steps=12, callbacks=[setter],
        folder=folder, every_n_steps=12,
    )  # fmt: skip
    return setter.scales, setter.weights, [step["train/grad_norm"] for step in run["steps"]]


class _Breaking(ToyModel):
    """A model whose loss is infinite in one step."""

    def compute_loss_sum(self, micro_batch: Any) -> Tensor:
        factor = float("inf") if self.trainer.global_step == 1 else 1.0
        return super().compute_loss_sum(micro_batch) * factor


def fit_by_hand(model: ToyModel, strategy: Any) -> None:
    from nemo_like.optim import AdamW

    model.optim = AdamW(lr=1e-2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=3, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model, datamodule=ToyDataModule())


def catch(function: Any, *arguments: Any, **options: Any) -> str:
    try:
        function(*arguments, **options)
    except (ConfigError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def do_small_things(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    counter = _Counter()
    for stage in (1, 2, 3):
        counts = [count_reductions(counter, stage, size) for size in (4, 1)]
        results[f"reductions {stage}"] = [count for count, share in counts]
        results["share"] = counts[0][1]
    results["fp16"] = train_fp16(folder / "fp16")
    results["muon"] = catch(rehearse, make({}), devices=2, steps=1, optim="muon")

    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logging.getLogger("nemo_like").addHandler(logging.handlers.QueueHandler(records))
    fit_by_hand(_Breaking(), make({"stage": 2}))
    messages = [records.get() for _ in range(records.qsize())]
    results["left out"] = [it.msg for it in messages if it.levelno == logging.WARNING]

    register()
    options: dict[str, Any] = {"steps": 6, "limit_val_batches": 1.0, "val_check_interval": 3}
    options["strategy"] = "nemo_deepspeed"
    toy = folder / "toy"
    results["toy"] = fit_toy(devices=2, folder=toy, every_n_steps=3, **options)
    results["toy resumed"] = fit_toy(devices=2, resume=toy / "step_00000003", **options)

    torch.manual_seed(0)
    # A frozen parameter, and a model that is trained twice: by stage 2, then by stage 3, then no more.
    model = ToyModel()
    frozen = model.network[0].bias
    assert isinstance(frozen, torch.nn.Parameter)
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    fit_by_hand(model, make({"stage": 2}))
    strategy = make({"stage": 3})
    fit_by_hand(model, strategy)
    weights = strategy.gather_weights()
    results["frozen"] = torch.equal(weights["network.0.bias"], before)
    results["shapes"] = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    results["again"] = catch(fit_by_hand, model, make({"stage": 3}))
    results["linear"] = torch.nn.functional.linear.__module__
    return results


@pytest.fixture(scope="module")
def small_things(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("deepspeed")
    return [{**it, "folder": folder} for it in run_world(2, do_small_things, folder, timeout_s=240)]


@pytest.mark.dist
def test_stage_1_reduces_once_a_step_and_the_others_once_a_micro_batch(
    small_things: list[dict[str, Any]],
) -> None:
    # 8 samples a step and 2 ranks: 1 micro-batch of 4, or 4 of 1. Stages 2 and 3 keep no whole gradient to add to.
    for it in small_things:
        assert it["reductions 1"] == [1, 1]
        assert it["reductions 2"] == [1, 4]
        assert it["reductions 3"] == [1, 4]


@pytest.mark.dist
def test_a_checkpoint_takes_from_each_rank_its_share(small_things: list[dict[str, Any]]) -> None:
    assert [it["share"] for it in small_things] == pytest.approx([0.5, 0.5], abs=0.01)


@pytest.mark.dist
def test_an_overflow_halves_the_scale_and_leaves_the_step_out(
    small_things: list[dict[str, Any]],
) -> None:
    for it in small_things:
        scales, weights, norms = it["fp16"]
        left_out = [norm == float("inf") for norm in norms]
        assert left_out[0]
        assert not left_out[-1]
        scale = 2.0**24
        for step, (was_left_out, now) in enumerate(zip(left_out, scales, strict=True)):
            scale = scale / 2 if was_left_out else scale
            assert now == scale
            if step:
                assert torch.equal(weights[step], weights[step - 1]) == was_left_out
        checkpoint = open_checkpoint(it["folder"] / "fp16" / "step_00000012")
        assert checkpoint.state["MixedPrecision"]["scale"] == scales[-1]


@pytest.mark.dist
def test_a_step_without_finite_gradients_is_reported(small_things: list[dict[str, Any]]) -> None:
    for it in small_things:
        (line,) = it["left out"]
        assert line.startswith("step 2 changed nothing (1 so far): loss inf, gradient norm inf, ")


@pytest.mark.dist
def test_optimizers_of_whole_matrices_are_refused(small_things: list[dict[str, Any]]) -> None:
    for it in small_things:
        assert it["muon"].startswith("ConfigError: optim: MuonOptimizer needs whole matrices")
        assert "strategy=fsdp or optim=adamw" in it["muon"]


@pytest.mark.dist
def test_a_plain_trainer_takes_it_by_name(small_things: list[dict[str, Any]]) -> None:
    reference = fit_toy(steps=6, limit_val_batches=1.0, val_check_interval=3)
    for it in small_things:
        run = it["toy"]
        assert_close(run["weights"], reference["weights"])
        for step, expected in zip(run["steps"], reference["steps"], strict=True):
            for key in ("train/loss", "train/grad_norm", "train/lr"):
                assert step[key] == pytest.approx(expected[key], rel=FP32), key
        assert run["val"] == pytest.approx(reference["val"], rel=FP32)
        assert it["toy resumed"]["steps"] == run["steps"][3:]
        for name, tensor in run["weights"].items():
            assert torch.equal(it["toy resumed"]["weights"][name], tensor), name


@pytest.mark.dist
def test_training_leaves_frozen_weights_and_torch_alone(small_things: list[dict[str, Any]]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in ToyModel().state_dict().items()}
    for it in small_things:
        assert it["frozen"]
        assert it["shapes"] == shapes
        assert it["linear"] != "deepspeed.runtime.zero.linear"


@pytest.mark.dist
def test_a_model_in_pieces_is_not_trained_again(small_things: list[dict[str, Any]]) -> None:
    for it in small_things:
        assert it["again"].startswith("RuntimeError: this ToyModel was cut into pieces")


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="stage=4: must be 1, 2 or 3"):
        DeepSpeedStrategy(stage=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs stage=3, got stage=2"):
        DeepSpeedStrategy(stage=2, offload_parameters=True)


def test_a_missing_deepspeed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingExtraError, match=r"nemo-like\[deepspeed\]"):
        DeepSpeedStrategy()
