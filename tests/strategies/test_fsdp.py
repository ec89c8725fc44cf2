"""A sharded run is the run of a single process: losses, norms, weights, validation, and what is saved."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from nemo_like.collections.llm.testing import rehearse
from nemo_like.core.errors import ConfigError
from nemo_like.strategies import DDPStrategy, FSDPStrategy, register
from nemo_like.strategies.mesh import build_mesh, split_ranks
from nemo_like.testing.fit import FusedAdamW, fit_toy
from nemo_like.testing.numerics import assert_close
from nemo_like.testing.toy import ToyDataModule, ToyModel
from nemo_like.testing.world import WorldError, run_world

STRATEGIES = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}
Plan = tuple[dict[str, Any], dict[str, Any]]
"""Options of FSDPStrategy, options of rehearse."""

TWO: dict[str, Plan] = {
    "full": ({}, {}),
    "whole": ({"accumulate": "whole"}, {}),
    "gradients": ({"shard": "gradients", "accumulate": "whole"}, {}),
    "tied": ({}, {"network": {"tie_embeddings": True}}),
    "muon": ({}, {"optim": "muon"}),
    "bf16": ({}, {"precision": "bf16-mixed"}),
}
FOUR: dict[str, Plan] = {
    "full": ({}, {}),
    "hybrid": ({"replicate": 2}, {}),
    "hybrid whole": ({"replicate": 2, "accumulate": "whole"}, {}),
    "hybrid muon": ({"replicate": 2, "shard": "gradients"}, {"optim": "muon"}),
}


def run_plans(devices: int, plans: dict[str, Plan]) -> dict[str, dict[str, Any]]:
    return {
        name: rehearse(FSDPStrategy(micro_batch_size=2, **strategy), devices=devices, **options)
        for name, (strategy, options) in plans.items()
    }


def run_ranks(devices: int, plans: dict[str, Plan]) -> dict[str, list[dict[str, Any]]]:
    """What each rank returned, by plan; one world for all of them, because starting one takes longer."""
    ranks = run_world(devices, run_plans, devices, plans)
    return {name: [rank[name] for rank in ranks] for name in plans}


@pytest.fixture(scope="module")
def two() -> dict[str, list[dict[str, Any]]]:
    return run_ranks(2, TWO)


@pytest.fixture(scope="module")
def four() -> dict[str, list[dict[str, Any]]]:
    return run_ranks(4, FOUR)


@functools.cache
def run_alone(options: str) -> dict[str, Any]:
    """The same run in a single process."""
    return rehearse(DDPStrategy(micro_batch_size=2), **eval(options))


def alone(**options: Any) -> dict[str, Any]:
    return run_alone(repr(options))


def figures(run: dict[str, Any], key: str) -> torch.Tensor:
    return torch.tensor([step[f"train/{key}"] for step in run["steps"]])


def assert_same_run(run: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(run["steps"]) == len(expected["steps"]) > 0
    for key in ("loss", "grad_norm", "lr"):
        assert_close(figures(run, key), figures(expected, key))
    assert_close(run["weights"], expected["weights"])
    assert run["val"]["val/loss"] == pytest.approx(expected["val"]["val/loss"], rel=2e-5)


@pytest.mark.dist
@pytest.mark.parametrize("plan", [name for name in TWO if name != "bf16"])
def test_two_shards_are_the_single_process(two: dict[str, Any], plan: str) -> None:
    for run in two[plan]:
        assert_same_run(run, alone(**TWO[plan][1]))


@pytest.mark.dist
@pytest.mark.parametrize("plan", FOUR)
def test_four_ranks_are_the_single_process(four: dict[str, Any], plan: str) -> None:
    for run in four[plan]:
        assert_same_run(run, alone(**FOUR[plan][1]))


@pytest.mark.dist
def test_bf16_shards_are_close_to_bf16_in_a_single_process(two: dict[str, Any]) -> None:
    # Embeddings and norms are rounded as well, and Adam's first steps have the size of the learning rate whatever the
    # gradient: weights may differ by some steps where gradients are near zero.
    expected = alone(precision="bf16-mixed")
    for run in two["bf16"]:
        assert_close(figures(run, "loss"), figures(expected, "loss"), tolerance=2e-2)
        assert_close(
            figures(run, "grad_norm")[:3], figures(expected, "grad_norm")[:3], tolerance=2e-2
        )
        assert run["val"]["val/loss"] == pytest.approx(expected["val"]["val/loss"], rel=2e-2)
        assert all(tensor.dtype is torch.float32 for tensor in run["weights"].values())
        assert not torch.equal(figures(run, "loss"), figures(alone(), "loss"))


def test_one_process_is_a_mesh_of_size_one() -> None:
    assert_same_run(run_plans(1, {"": ({}, {})})[""], alone())


class WatchTypes(pl.Callback):
    """Notes the types that a block of the network sees."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.dtype] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        mlp = pl_module.network.layers[1].mlp

        def note(module: Any, arguments: Any, output: torch.Tensor) -> None:
            self.seen["norm"] = arguments[0].dtype
            self.seen["weight"] = mlp.gate.weight.dtype
            self.seen["product"] = output.dtype

        mlp.register_forward_hook(note)


class WatchedStrategy(FSDPStrategy):
    """FSDP with a look inside."""

    def setup(self, trainer: pl.Trainer) -> None:
        self.watch = WatchTypes()
        trainer.callbacks.append(self.watch)  # type: ignore[attr-defined]
        super().setup(trainer)


def test_weights_are_gathered_in_bf16_and_the_residual_stream_stays_fp32() -> None:
    strategy = WatchedStrategy()
    rehearse(strategy, steps=1, precision="bf16-mixed")
    assert strategy.watch.seen == {
        "norm": torch.float32,
        "weight": torch.bfloat16,
        "product": torch.bfloat16,
    }


# What is communicated, and what is kept.


def count_collectives(devices: int, plans: dict[str, Plan]) -> dict[str, dict[str, int]]:
    counts = {}
    for name, (strategy, options) in plans.items():
        options = dict(options)
        build = STRATEGIES[options.pop("strategy", "fsdp")]
        with CommDebugMode() as mode:
            rehearse(build(**strategy), devices=devices, steps=1, limit_val_batches=0, **options)
        counts[name] = {
            str(key).rpartition(".")[2]: value for key, value in mode.get_comm_counts().items()
        }
    return counts


@pytest.mark.dist
def test_accumulating_gradients_does_not_communicate_them() -> None:
    plans: dict[str, Plan] = {}
    for micro_batch_size in (4, 1):  # one and four micro-batches on each of two ranks
        size = {"micro_batch_size": micro_batch_size}
        plans[f"sharded {micro_batch_size}"] = (size, {})
        size = {**size, "accumulate": "whole"}
        plans[f"whole {micro_batch_size}"] = (size, {})
        plans[f"gradients {micro_batch_size}"] = ({**size, "shard": "gradients"}, {})
        plans[f"ddp {micro_batch_size}"] = (
            {"micro_batch_size": micro_batch_size},
            {"strategy": "ddp"},
        )
    counts = run_world(2, count_collectives, 2, plans)[0]
    # Four blocks and the rest.
    assert counts["whole 1"]["_reduce_scatter_base_"] == 5
    assert counts["whole 4"]["_reduce_scatter_base_"] == 5
    # What it takes to keep slices only: once a micro-batch.
    assert counts["sharded 4"]["_reduce_scatter_base_"] == 5
    assert counts["sharded 1"]["_reduce_scatter_base_"] == 5 * 4
    # Per micro-batch the four blocks are gathered forward and backward, but the last one, which is still there.
    assert counts["whole 4"]["_allgather_base_"] == 5 + 4
    assert counts["whole 1"]["_allgather_base_"] == (5 + 4) * 4
    assert counts["gradients 1"] == counts["gradients 4"]
    assert counts["gradients 1"]["_allgather_base_"] == 5
    assert counts["ddp 1"] == counts["ddp 4"]
    assert counts["ddp 1"]["allreduce_"] > 0


class ShareStrategy(FSDPStrategy):
    """Notes at the end how many numbers lie on this rank."""

    def gather_weights(self) -> dict[str, torch.Tensor]:
        state = self.optimizers[0].state.values()
        tensors = [*self.module.parameters(), *(it for s in state for it in s.values() if it.ndim)]
        assert all(isinstance(it, DTensor) for it in tensors)
        self.share = sum(it.to_local().numel() for it in tensors) / sum(
            it.numel() for it in tensors
        )  # type: ignore[attr-defined]
        return super().gather_weights()


class FreezingFSDP(FSDPStrategy):
    """With embedding and first block frozen, and different weights on each rank to start with."""

    def wrap_model(self) -> None:
        freeze(self.module)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(1 + self.global_rank)
        super().wrap_model()


class FreezingDDP(DDPStrategy):
    """With embedding and first block frozen."""

    def wrap_model(self) -> None:
        freeze(self.module)
        super().wrap_model()


def freeze(model: Any) -> None:
    model.network.embedding.requires_grad_(False)
    model.network.layers[0].requires_grad_(False)


class EmptyFSDP(FSDPStrategy):
    """With a model that is made without weights, and drawn slice by slice."""

    def wrap_model(self) -> None:
        self.module.to("meta")
        super().wrap_model()


class DrawingDDP(DDPStrategy):
    """With a model that is drawn anew in the same way."""

    def wrap_model(self) -> None:
        parameters = dict(self.module.named_parameters())
        for name, tensor in self.module.draw_weights():
            parameters[name].data.copy_(tensor)
        super().wrap_model()


class BrokenOnOneRank(FSDPStrategy):
    """With an infinite gradient in the second step, on the last rank only."""

    def run_micro_batches(self, batch: Any) -> torch.Tensor:
        loss = super().run_micro_batches(batch)
        self.scales = [*getattr(self, "scales", []), self.precision_plugin.scaler.get_scale()]  # type: ignore[attr-defined]
        if len(self.scales) == 2 and self.global_rank == self.world_size - 1:
            gradient = self.module.network.layers[1].mlp.up.weight.grad
            gradient.to_local()[0, 0] = torch.inf
        return loss


def run_corners(devices: int) -> dict[str, Any]:
    share = ShareStrategy(micro_batch_size=2)
    rehearse(share, devices=devices, steps=1)
    broken = BrokenOnOneRank(micro_batch_size=2)
    before = rehearse(
        BrokenOnOneRank(micro_batch_size=2), devices=devices, steps=1, precision="fp16-mixed"
    )
    after = rehearse(broken, devices=devices, steps=2, precision="fp16-mixed")
    return {
        "share": share.share,
        "frozen": rehearse(FreezingFSDP(micro_batch_size=2), devices=devices),
        "empty": rehearse(EmptyFSDP(micro_batch_size=2), devices=devices),
        "scales": [*broken.scales, broken.precision_plugin.scaler.get_scale()],  # type: ignore[attr-defined]
        "skipped": [before["weights"], after["weights"]],
    }


@pytest.fixture(scope="module")
def corners() -> list[dict[str, Any]]:
    return run_world(2, run_corners, 2)


@pytest.mark.dist
def test_each_rank_holds_its_share_of_weights_and_optimizer_state(corners: Any) -> None:
    assert [rank["share"] for rank in corners] == [0.5, 0.5]


@pytest.mark.dist
def test_frozen_parameters_stay_and_all_ranks_start_from_the_first(corners: Any) -> None:
    expected = rehearse(FreezingDDP(micro_batch_size=2))
    for rank in corners:
        assert_same_run(rank["frozen"], expected)


@pytest.mark.dist
def test_a_model_made_without_weights_is_drawn_slice_by_slice(corners: Any) -> None:
    expected = rehearse(DrawingDDP(micro_batch_size=2))
    for rank in corners:
        assert_same_run(rank["empty"], expected)


@pytest.mark.dist
def test_an_overflow_on_one_rank_is_skipped_by_all(corners: Any) -> None:
    for rank in corners:
        assert rank["scales"] == [65536, 65536, 32768]
        before, after = rank["skipped"]
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor), name


# Saving under one plan, going on under another.

EVERY: dict[str, tuple[int, str, dict[str, Any]]] = {
    "single": (1, "ddp", {}),
    "ddp 2": (2, "ddp", {}),
    "fsdp 2": (2, "fsdp", {}),
    "gradients 2": (2, "fsdp", {"shard": "gradients", "micro_batch_size": 1}),
    "fsdp 4": (4, "fsdp", {}),
    "hybrid 4": (4, "fsdp", {"replicate": 2}),
}


def run_saved(devices: int, strategy: str, options: dict[str, Any], **others: Any) -> Any:
    return rehearse(
        STRATEGIES[strategy](**{"micro_batch_size": 2, **options}), devices=devices, **others
    )


def save_and_resume(plan: str, folder: Path, resume: Path, others: dict[str, Any]) -> Any:
    """A whole run that saves, and one that goes on from what is given."""
    whole = run_saved(*EVERY[plan], folder=folder, **others)
    return whole, run_saved(*EVERY[plan], resume=resume, **others)


def assert_continued(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    assert_same_run(resumed, {**whole, "steps": whole["steps"][5:]})
    assert resumed["position"] == whole["position"]


def assert_identical(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    assert resumed["steps"] == whole["steps"][5:]
    assert resumed["val"] == whole["val"]
    for name, tensor in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor), name


def save_and_resume_each(folder: Path, each: list[dict[str, Any]]) -> list[Any]:
    return [
        save_and_resume(
            "fsdp 2", folder / str(index), folder / str(index) / "step_00000005", options
        )
        for index, options in enumerate(each)
    ]


@pytest.mark.dist
def test_the_same_plan_goes_on_bit_for_bit(tmp_path: Path) -> None:
    each = [{"optim": "muon"}, {"precision": "bf16-mixed"}]
    for rank in run_world(2, save_and_resume_each, tmp_path, each):
        for whole, resumed in rank:
            assert_identical(resumed, whole)


@pytest.mark.dist
def test_what_four_shards_saved_goes_on_in_one_process_and_back(tmp_path: Path) -> None:
    single = run_saved(*EVERY["single"], folder=tmp_path / "single")
    saved = tmp_path / "single" / "step_00000005"
    whole, resumed = run_world(4, save_and_resume, "hybrid 4", tmp_path / "four", saved, {})[0]
    assert_continued(resumed, single)
    back = run_saved(*EVERY["single"], resume=tmp_path / "four" / "step_00000005")
    assert_continued(back, whole)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("optim", [None, "muon"])
def test_any_of_these_plans_goes_on_under_any_other(optim: str | None, tmp_path: Path) -> None:
    others = {"optim": optim}
    wholes = {}
    for plan, (devices, *_) in EVERY.items():
        saved = tmp_path / plan / "step_00000005"
        runs = run_world(devices, save_and_resume, plan, tmp_path / plan, saved, others)
        wholes[plan], resumed = runs[0]
        assert_identical(resumed, wholes[plan])
    for plan, (devices, *_) in EVERY.items():
        folders = [tmp_path / it / "step_00000005" for it in EVERY if it != plan]
        for resumed in run_world(devices, resume_all, plan, folders, others)[0]:
            assert_continued(resumed, wholes["single"])


def resume_all(plan: str, folders: list[Path], others: dict[str, Any]) -> list[Any]:
    return [run_saved(*EVERY[plan], resume=folder, **others) for folder in folders]


# What is refused.


def test_copies_must_divide_the_ranks() -> None:
    assert split_ranks(6, replicate=3) == {"replicate": 3, "shard": 2}
    with pytest.raises(ConfigError, match=r"replicate=4: must divide the 6 ranks.*nearest: 3, 6"):
        split_ranks(6, replicate=4)
    with pytest.raises(ConfigError, match="replicate=2: must divide the 1 ranks"):
        rehearse(FSDPStrategy(replicate=2))


def test_a_mesh_takes_all_ranks() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert build_mesh("cpu", {"replicate": 1, "shard": 1}).mesh_dim_names == ("replicate", "shard")
    with pytest.raises(ValueError, match="replicate=2 x shard=3 is 6 ranks, there are 1"):
        build_mesh("cpu", {"replicate": 2, "shard": 3})


def test_offloading_from_the_cpu_to_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cpu_offload=true.*set strategy.cpu_offload=false"):
        rehearse(FSDPStrategy(cpu_offload=True))


def test_a_failure_before_there_are_weights_is_told_as_it_is() -> None:
    with pytest.raises(ConfigError, match="replicate=2: must divide the 1 ranks"):
        rehearse(EmptyFSDP(replicate=2))


def test_options_of_ddp_are_refused() -> None:
    with pytest.raises(TypeError, match=r"there is no option .*find_unused_parameters"):
        FSDPStrategy(find_unused_parameters=True)


class UnevenStrategy(FSDPStrategy):
    """On which rank 1 sees fewer validation batches."""

    def on_validation_start(self) -> None:
        if self.global_rank == 1:
            self.module.trainer.fit_loop.epoch_loop.val_loop._max_batches = [1]
        super().on_validation_start()


def run_uneven(devices: int) -> None:
    rehearse(UnevenStrategy(micro_batch_size=2), devices=devices, steps=1)


@pytest.mark.dist
def test_uneven_validation_is_refused_and_does_not_hang() -> None:
    with pytest.raises(WorldError, match="validation has 5 batches on one rank and 1 on another"):
        run_world(2, run_uneven, 2, timeout_s=60)


# From a plain Trainer.


class WatchShards(pl.Callback):
    """Checks between two validation batches that nothing stays gathered."""

    def __init__(self) -> None:
        self.are_cut: list[bool] = []

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, *arguments: Any) -> None:
        self.are_cut.append(all(isinstance(it, DTensor) for it in pl_module.parameters()))


def train_toy(accelerator: str, strategy: Any, **options: Any) -> tuple[pl.Trainer, ToyModel]:
    torch.manual_seed(0)
    model = ToyModel()
    model.optim, model.seed, model.schedule = FusedAdamW(), 3, lambda step: 1 / (1 + step)
    model.gradient_clip_norm = 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator=accelerator, devices=1, strategy=strategy, max_steps=5, max_epochs=-1,
            logger=False, enable_checkpointing=False, use_distributed_sampler=False,
            enable_progress_bar=False, enable_model_summary=False,
            check_val_every_n_epoch=None, val_check_interval=5, num_sanity_val_steps=0, **options,
        )  # fmt: skip
        trainer.fit(model, datamodule=ToyDataModule())
        trained = dict(model.val_metrics)
        trainer.validate(model, datamodule=ToyDataModule(), verbose=False)
    assert model.val_metrics == trained
    return trainer, model


def test_a_plain_trainer_takes_it_by_name_and_validates_afterwards() -> None:
    register()
    watch = WatchShards()
    trainer, model = train_toy("cpu", "nemo_fsdp", callbacks=[watch])
    assert isinstance(trainer.strategy, FSDPStrategy)
    assert watch.are_cut == [True] * 20
    weights = {name: it.full_tensor() for name, it in model.state_dict().items()}
    assert_close(weights, fit_toy(micro_batch_size=1)["weights"])


@pytest.mark.gpu
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_a_gpu_does_the_same_wherever_parameters_are_kept(cpu_offload: bool) -> None:
    _, model = train_toy("gpu", FSDPStrategy(cpu_offload=cpu_offload))
    weights = {name: it.full_tensor().cpu() for name, it in model.state_dict().items()}
    assert_close(weights, fit_toy(micro_batch_size=1)["weights"], tolerance=1e-4)
