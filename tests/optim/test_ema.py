"""The moving average of the weights: what it is, under every plan, in checkpoints and in validations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import nemo_like.strategies
from nemo_like.collections.llm.decoder import DecoderModel
from nemo_like.collections.llm.decoder.config import DecoderConfig
from nemo_like.collections.llm.decoder.source import open_source
from nemo_like.collections.llm.testing import rehearse
from nemo_like.core.checkpoint import open_checkpoint
from nemo_like.core.compose import check_run
from nemo_like.core.errors import CheckpointError, ConfigError
from nemo_like.optim import AdamW, Muon
from nemo_like.optim.ema import exchange_ema, read_weights, update_ema, warm_up_decay
from nemo_like.strategies.planning.memory import estimate
from nemo_like.strategies.planning.plan import Plan
from nemo_like.strategies.planning.work import Work
from nemo_like.testing.numerics import assert_close
from nemo_like.testing.world import run_world

# The arithmetic.


@pytest.mark.parametrize(("step", "expected"), [(0, 0.1), (1, 2 / 11), (80, 0.9), (10**6, 0.9)])
def test_decay_starts_low_and_ends_at_what_was_asked_for(step: int, expected: float) -> None:
    assert warm_up_decay(0.9, step) == expected


@pytest.mark.parametrize("builder", [AdamW(lr=0.1), Muon(lr=0.1)])
def test_the_average_is_the_recursion_over_the_weights(builder: Any) -> None:
    module = nn.Linear(4, 3).double()
    optimizer, parameters = builder.build(module), list(module.parameters())
    expected: list[Tensor] = []
    for step in range(12):
        module(torch.randn(5, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        update_ema(optimizer, parameters, decay=0.5, step=step)
        # The first one is the weights themselves.
        keep = min(0.5, (1 + step) / (10 + step)) if step else 0.0
        before = expected or [it.detach() for it in parameters]
        expected = [
            keep * old + (1 - keep) * new.detach()
            for old, new in zip(before, parameters, strict=True)
        ]
    for parameter, average in zip(parameters, expected, strict=True):
        torch.testing.assert_close(
            optimizer.state[parameter]["ema"], average, rtol=1e-12, atol=1e-12
        )
        assert not torch.equal(optimizer.state[parameter]["ema"], parameter)


def test_a_parameter_that_has_never_moved_has_no_average_and_can_still_move() -> None:
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    module = nn.ModuleList([used, unused])
    optimizer, parameters = AdamW(lr=0.1).build(module), list(module.parameters())
    used(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    update_ema(optimizer, parameters, decay=0.5, step=0)
    assert "ema" in optimizer.state[used.weight]
    assert not optimizer.state.get(unused.weight)
    unused(torch.ones(1, 2)).sum().backward()
    optimizer.step()  # torch's optimizers make their own state where there is none at all
    update_ema(optimizer, parameters, decay=0.5, step=1)
    assert torch.equal(optimizer.state[unused.weight]["ema"], unused.weight)


def test_an_exchange_shows_the_average_and_another_one_takes_it_back_bit_for_bit() -> None:
    module = nn.Linear(3, 3)
    optimizer, parameters = AdamW(lr=0.1).build(module), list(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    for step in range(2):
        optimizer.step()
        update_ema(optimizer, parameters, decay=0.5, step=step)
    weight, average = module.weight.detach().clone(), optimizer.state[module.weight]["ema"].clone()
    exchange_ema(optimizer, parameters)
    assert torch.equal(module.weight, average)
    exchange_ema(optimizer, parameters)
    assert torch.equal(module.weight, weight)
    assert torch.equal(optimizer.state[module.weight]["ema"], average)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("builder", [AdamW, Muon])
def test_a_decay_out_of_range_is_refused(builder: Any, decay: float) -> None:
    with pytest.raises(ConfigError, match=f"ema_decay={decay}: must be above 0 and below 1"):
        builder(lr=0.1, ema_decay=decay)


# Runs.

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("DDPStrategy", {}),
    "fsdp": ("FSDPStrategy", {}),
    "zero1": ("DeepSpeedStrategy", {"stage": 1}),
    "zero2": ("DeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "zero3": ("DeepSpeedStrategy", {"stage": 3}),
    "megatron replicas": ("MegatronStrategy", {}),
    "megatron tensor": ("MegatronStrategy", {"tensor_parallel": 2}),
    "megatron pipeline": ("MegatronStrategy", {"pipeline_parallel": 2}),
}
STEPS, SAVED_AT = 6, 3


class StateTaker(pl.Callback):
    """Takes the optimizer state at the start of training, as far as this rank holds it, and validates an average."""

    def __init__(self, val_weights: str = "model") -> None:
        self.val_weights = val_weights
        self.state: dict[str, Tensor] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        model: Any = pl_module
        model.val_weights = self.val_weights

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.state = {
            name: (it.to_local() if isinstance(it, DTensor) else it).clone()
            for name, it in strategy.collect_tensors()[1].items()
        }


def run(
    plan: str = "ddp",
    devices: int = 1,
    *,
    val_weights: str = "model",
    decay: float | None = 0.8,
    **options: Any,
) -> dict[str, Any]:
    name, settings = PLANS[plan]
    taker = StateTaker(val_weights)
    result = rehearse(
        getattr(nemo_like.strategies, name)(**{"micro_batch_size": 2, **settings}),
        devices=devices,
        optim=options.pop("optim", AdamW(lr=1e-3, ema_decay=decay)),
        network={"num_layers": 2},
        callbacks=[taker, *options.pop("callbacks", ())],
        **{"steps": STEPS, "every_n_steps": SAVED_AT, "limit_val_batches": 0, **options},
    )
    return {**result, "state": taker.state}


def read_averages(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    names = [it for it in checkpoint.tensor_names("optimizer") if it.endswith("/ema")]
    return checkpoint.read_tensors("optimizer", names)


def checkpoint_at(folder: Path, step: int = STEPS) -> Path:
    return folder / f"step_{step:08d}"


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_interrupted_equals_uninterrupted_bit_for_bit_with_an_average(
    optim: str, tmp_path: Path
) -> None:
    def build() -> Any:
        return Muon(lr=0.02, ema_decay=0.8) if optim == "muon" else AdamW(lr=1e-2, ema_decay=0.8)

    run(folder=tmp_path / "whole", optim=build())
    half = checkpoint_at(tmp_path / "whole", SAVED_AT)
    run(folder=tmp_path / "resumed", resume=half, optim=build())
    for part in ("model", "optimizer"):
        whole, resumed = (
            open_checkpoint(checkpoint_at(tmp_path / it)) for it in ("whole", "resumed")
        )
        names = whole.tensor_names(part)
        assert names == resumed.tensor_names(part)
        expected, found = whole.read_tensors(part, names), resumed.read_tensors(part, names)
        for name in names:
            assert torch.equal(found[name], expected[name]), name


def run_plans(folder: str, starts: dict[str, str | None], devices: int) -> None:
    for plan, start in starts.items():
        resume = None if start is None else Path(start)
        run(plan, devices, folder=Path(folder) / plan, resume=resume)


@pytest.mark.slow
@pytest.mark.dist
def test_the_average_is_the_same_under_every_plan_and_goes_on_under_every_other(
    tmp_path: Path,
) -> None:
    run(folder=tmp_path / "single")
    expected = read_averages(checkpoint_at(tmp_path / "single"))
    run_world(2, run_plans, str(tmp_path), dict.fromkeys(PLANS), 2, timeout_s=250)
    for plan in PLANS:
        assert_close(read_averages(checkpoint_at(tmp_path / plan)), expected)
    # Each goes on with what the plan before it saved.
    names = list(PLANS)
    starts = {
        plan: str(checkpoint_at(tmp_path / before, SAVED_AT))
        for plan, before in zip(names, [names[-1], *names[:-1]], strict=True)
    }
    run_world(2, run_plans, str(tmp_path / "on"), starts, 2, timeout_s=250)
    for plan in PLANS:
        assert_close(read_averages(checkpoint_at(tmp_path / "on" / plan)), expected)
    # Saved on two ranks and loaded on one, to the bit.
    for plan in ("fsdp", "zero3"):
        saved = checkpoint_at(tmp_path / plan, SAVED_AT)
        state = run(resume=saved)["state"]
        averages = read_averages(saved)
        assert averages
        for name, average in averages.items():
            assert torch.equal(state[name], average), (plan, name)


def test_a_run_without_an_average_drops_one_and_a_run_with_one_can_start_later(
    tmp_path: Path,
) -> None:
    run(folder=tmp_path / "with", steps=SAVED_AT)
    run(folder=tmp_path / "without", resume=checkpoint_at(tmp_path / "with", SAVED_AT), decay=None)
    assert not read_averages(checkpoint_at(tmp_path / "without"))
    run(folder=tmp_path / "later", resume=checkpoint_at(tmp_path / "without"), steps=STEPS + 1)
    later = open_checkpoint(checkpoint_at(tmp_path / "later", STEPS + 1))
    name = "network.layers.0.mlp.up.weight"
    average = later.read_tensors("optimizer", [f"{name}/ema"])[f"{name}/ema"]
    assert torch.equal(average, later.read_tensors("model", [name])[name])


# Validation.


class Breaking(pl.Callback):
    """Saves in the middle of a validation, then leaves it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.during: dict[str, Tensor] = {}

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: Any
    ) -> None:
        self.module, self.during = pl_module, copy(pl_module)
        trainer.save_checkpoint(self.folder)
        raise RuntimeError("in the middle")


def copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_an_interrupted_validation_leaves_the_weights_and_saves_those_that_are_trained(
    tmp_path: Path,
) -> None:
    plain = run()
    breaking = Breaking(tmp_path / "step_00000006")
    with pytest.raises(RuntimeError, match="in the middle"):
        run(val_weights="ema", callbacks=[breaking], limit_val_batches=1.0)
    saved, after = open_checkpoint(breaking.folder), copy(breaking.module)
    for name, tensor in plain["weights"].items():
        average = saved.read_tensors("optimizer", [f"{name}/ema"])[f"{name}/ema"]
        assert torch.equal(breaking.during[name], average), name
        assert not torch.equal(average, tensor), name
        assert torch.equal(after[name], tensor), name
        assert torch.equal(saved.read_tensors("model", [name])[name], tensor), name


def validate_averages(devices: int) -> dict[str, Any]:
    options: dict[str, Any] = {"limit_val_batches": 1.0, "val_check_interval": SAVED_AT}
    return {
        plan: {
            weights: run(plan, devices, val_weights=weights, **options)
            for weights in ("model", "ema")
        }
        for plan in PLANS
        if not plan.startswith("zero") and (plan == "ddp" or devices > 1)
    }


def test_validating_the_average_changes_the_figure_and_nothing_else(tmp_path: Path) -> None:
    runs = validate_averages(1)["ddp"]
    assert runs["ema"]["val"]["val/loss"] != runs["model"]["val"]["val/loss"]
    assert runs["ema"]["steps"] == runs["model"]["steps"]
    for name, tensor in runs["model"]["weights"].items():
        assert torch.equal(runs["ema"]["weights"][name], tensor), name
    # The figure is the one of a model that has the average for its weights.
    run(folder=tmp_path)
    checkpoint = open_checkpoint(checkpoint_at(tmp_path))
    averages = read_weights(checkpoint, list(runs["model"]["weights"]), weights="ema")

    class Replacing(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            pl_module.load_state_dict(averages)

    replaced = run(limit_val_batches=1.0, val_check_interval=STEPS, callbacks=[Replacing()])
    assert replaced["val"]["val/loss"] == runs["ema"]["val"]["val/loss"]


@pytest.mark.slow
@pytest.mark.dist
def test_every_plan_that_can_validates_the_average_alike() -> None:
    expected = validate_averages(1)["ddp"]
    for rank in run_world(2, validate_averages, 2, timeout_s=250):
        for plan, runs in rank.items():
            for weights in ("model", "ema"):
                figure = runs[weights]["val"]["val/loss"]
                assert figure == pytest.approx(expected[weights]["val"]["val/loss"], rel=2e-5), plan
            for name, tensor in runs["model"]["weights"].items():
                assert torch.equal(runs["ema"]["weights"][name], tensor), (plan, name)


def test_an_average_that_is_not_there_or_lies_in_pieces_is_not_validated() -> None:
    with pytest.raises(
        ConfigError, match=r"val_weights=ema: there is no average .* optim.ema_decay=0.999"
    ):
        run(val_weights="ema", decay=None)
    with pytest.raises(
        ConfigError, match=r"val_weights=ema: DeepSpeedStrategy keeps the average in pieces"
    ):
        run("zero2", val_weights="ema")


def test_the_configuration_is_refused_before_anything_starts() -> None:
    arguments = ["+conf=llm/quickstart", "trainer.val_weights=ema"]
    (fault,) = check_run("pretrain", arguments)
    assert "trainer.val_weights=ema: nemo_like.optim.Muon keeps no average" in fault
    assert not check_run("pretrain", [*arguments, "optim.ema_decay=0.99"])


# Reading.


def test_the_average_can_be_read_in_the_place_of_the_weights(tmp_path: Path) -> None:
    run(folder=tmp_path)
    checkpoint = open_checkpoint(checkpoint_at(tmp_path))
    names = checkpoint.tensor_names("model")[:3]
    averages = checkpoint.read_tensors("optimizer", [f"{name}/ema" for name in names])
    for name, tensor in read_weights(checkpoint, names, weights="ema").items():
        assert torch.equal(tensor, averages[f"{name}/ema"]), name
    plain = checkpoint.read_tensors("model", names)
    for name, tensor in read_weights(checkpoint, names, weights="model").items():
        assert torch.equal(tensor, plain[name]), name


def test_a_checkpoint_without_averages_says_so(tmp_path: Path) -> None:
    run(folder=tmp_path, decay=None)
    checkpoint = open_checkpoint(checkpoint_at(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"step_00000006: keeps no average .* take weights=model"
    ):
        read_weights(checkpoint, checkpoint.tensor_names("model"), weights="ema")


def test_a_model_opens_with_its_average_for_evaluation_and_export(tmp_path: Path) -> None:
    run(folder=tmp_path / "checkpoints")
    checkpoint = open_checkpoint(checkpoint_at(tmp_path / "checkpoints"))
    state = DecoderModel.load(checkpoint.folder, weights="ema").state_dict()
    for name, average in read_weights(checkpoint, list(state), weights="ema").items():
        assert torch.equal(state[name], average), name
    name = "layers.0.mlp.up.weight"
    read = open_source(tmp_path, weights="ema").read([name])  # of a run folder
    assert torch.equal(read[name], state[f"network.{name}"])
    assert not torch.equal(read[name], open_source(tmp_path).read([name])[name])


def test_a_hugging_face_folder_has_no_average(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"weights=ema: only checkpoints .* take weights=model"
    ):
        open_source(tmp_path, weights="ema")


def test_the_planner_counts_four_bytes_a_parameter_for_the_average() -> None:
    shape = DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        max_positions=16,
    )
    work = Work(shape=shape, seq_len=16, global_batch_size=8)
    plain, averaged = (
        estimate(Plan(strategy="ddp", ranks=1), replace(work, keeps_average=keeps)).optimizer
        for keeps in (False, True)
    )
    assert averaged - plain == 4 * shape.count_parameters()
