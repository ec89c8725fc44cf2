"""micro_batch_size=auto: it settles at what fits, leaves nothing behind, and is remembered."""

from __future__ import annotations

import json
import logging
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_like.core.compose import compose
from nemo_like.core.errors import ConfigError, DeviceMemoryError
from nemo_like.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, MegatronStrategy
from nemo_like.strategies.micro_batch import MEMORY_FILE, is_out_of_memory
from nemo_like.strategies.planning.choice import list_halves
from nemo_like.testing.fit import QUIET, FusedAdamW, fit_toy
from nemo_like.testing.toy import ToyBatch, ToyDataModule, ToyModel
from nemo_like.testing.world import run_world

# Said by Lightning about its own use of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")

ERRORS: dict[str, Callable[[], Exception]] = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cuda": lambda: RuntimeError("CUDA error: out of memory"),
    "cublas": lambda: RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    "cpu": lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 7"),
    "python": lambda: MemoryError(),
}


class LimitedStrategy(DDPStrategy):
    """A device on which so many samples fit and no more.

    Args:
        limits: Samples, by rank.
        error: A key of ``ERRORS``.
        later: Limit of the training steps, where it is another one.
    """

    def __init__(
        self, *, limits: list[int], error: str = "torch", later: int = 99, **options: Any
    ) -> None:
        super().__init__(**{"micro_batch_size": "auto", **options})
        self.limits, self.error, self.later = limits, error, later
        self.tried: list[int] = []
        self.is_trial = False

    def setup(self, trainer: pl.Trainer) -> None:
        self.is_trial = True
        super().setup(trainer)
        self.is_trial = False

    def compute_loss_sum(self, micro_batch: ToyBatch) -> Tensor:
        size = len(micro_batch.x_BTC)
        if self.is_trial:
            self.tried.append(size)
        loss_sum = super().compute_loss_sum(micro_batch)
        # After the forward pass, with everything in hand that a trial could leave behind.
        if size > (self.limits[self.global_rank] if self.is_trial else self.later):
            raise ERRORS[self.error]()
        return loss_sum


def fit(strategy: DDPStrategy, **options: Any) -> dict[str, Any]:
    return {**fit_toy(strategy=strategy, **options), "size": strategy.micro_batch_size}


def assert_same_bits(run: dict[str, Any], reference: dict[str, Any]) -> None:
    assert run["steps"] == reference["steps"]
    assert run["sample_ids"] == reference["sample_ids"]
    assert run["position"] == reference["position"]
    for name, tensor in reference["weights"].items():
        assert torch.equal(run["weights"][name], tensor), name


@pytest.mark.parametrize("error", ERRORS)
def test_it_takes_half_as_long_as_memory_runs_out_and_the_run_is_that_of_the_number(
    error: str,
) -> None:
    strategy = LimitedStrategy(limits=[3], error=error)
    run = fit(strategy, dropout=0.3)
    # A size that fits is tried twice, the second time with gradients there.
    assert (run["size"], strategy.tried) == (2, [8, 4, 2, 2])
    assert_same_bits(run, fit_toy(micro_batch_size=2, dropout=0.3))


def test_what_fits_at_once_is_computed_at_once() -> None:
    assert fit(LimitedStrategy(limits=[99]))["size"] == 8


class CountingModel(ToyModel):
    """Changes what a trial has to put back."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def compute_loss_sum(self, micro_batch: ToyBatch) -> Tensor:
        self.calls += 1
        self.step_metrics["train/calls"] = self.calls
        random.random(), np.random.rand(), torch.rand(1)
        return super().compute_loss_sum(micro_batch)


class Looking(pl.Callback):
    """Notes what is there when the first step begins."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.draws = random.random(), float(np.random.rand()), float(torch.rand(1))
        self.buffers = {name: it.clone() for name, it in pl_module.named_buffers()}
        self.weights = {name: it.clone() for name, it in pl_module.state_dict().items()}
        self.gradients = [it.grad for it in pl_module.parameters()]
        self.metrics = dict(pl_module.step_metrics)  # type: ignore[arg-type]
        self.limit = resource.getrlimit(resource.RLIMIT_AS)


def look(strategy: DDPStrategy) -> Looking:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    model, looking = CountingModel(), Looking()
    model.optim, model.seed = FusedAdamW(), 3
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=1, max_epochs=-1,
        callbacks=[looking], **QUIET,
    )  # fmt: skip
    trainer.fit(model, datamodule=ToyDataModule())
    return looking


def test_trials_leave_no_trace() -> None:
    tried, given = look(LimitedStrategy(limits=[2])), look(DDPStrategy(micro_batch_size=2))
    assert tried.draws == given.draws
    assert tried.limit == given.limit
    assert tried.metrics == given.metrics == {}
    assert tried.gradients == given.gradients == [None] * 4
    for name, tensor in {**given.buffers, **given.weights}.items():
        assert torch.equal({**tried.buffers, **tried.weights}[name], tensor), name
    assert int(tried.buffers["calls"]) == 0


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied (2x3 and 4x5)"))
    assert not is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(ZeroDivisionError):
        fit(BrokenStrategy(micro_batch_size="auto"))


class BrokenStrategy(DDPStrategy):
    def compute_loss_sum(self, micro_batch: ToyBatch) -> Tensor:
        raise ZeroDivisionError


def test_where_not_even_one_sample_fits_it_says_what_would_help() -> None:
    with pytest.raises(
        DeviceMemoryError, match=r"not even one sample fits on cpu, [\d.]+ GiB"
    ) as it:
        fit(LimitedStrategy(limits=[0]))
    assert "strategy.activation_checkpointing=full" in str(it.value)


def fit_rank(options: dict[str, Any]) -> dict[str, Any]:
    strategy = (
        LimitedStrategy(limits=[4, 1]) if options.pop("auto") else DDPStrategy(micro_batch_size=1)
    )
    return fit(strategy, devices=2, **options)


@pytest.mark.dist
def test_all_ranks_take_what_fits_on_each_and_the_run_is_that_of_the_number() -> None:
    runs = run_world(2, fit_rank, {"auto": True, "dropout": 0.2})
    for run, reference in zip(
        runs, run_world(2, fit_rank, {"auto": False, "dropout": 0.2}), strict=True
    ):
        assert run["size"] == 1
        assert_same_bits(run, reference)


def test_a_resumed_run_takes_what_it_had_and_searches_again_on_other_devices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nemo_like")
    options = {"dropout": 0.3, "default_root_dir": tmp_path}
    whole = fit(LimitedStrategy(limits=[4]), steps=6, folder=tmp_path / "whole", **options)
    found = json.loads((tmp_path / MEMORY_FILE).read_text())
    assert (found["micro_batch_size"], found["found_for"]["ranks"]) == (4, 1)
    assert [(it["size"], it["fits"]) for it in found["tried"]] == [(8, False), (4, True)]
    assert all(it["peak_bytes"] > 0 for it in found["tried"])
    assert "micro_batch_size=4 is taken, 2 micro-batches a step on each of 1 ranks" in caplog.text

    def go_on() -> tuple[dict[str, Any], list[int]]:
        # More would fit now; the run would not be the same in the last bit.
        strategy = LimitedStrategy(limits=[8])
        resumed = fit(strategy, steps=6, resume=tmp_path / "whole/step_00000002", **options)
        return resumed, strategy.tried

    resumed, tried = go_on()
    assert (resumed["size"], tried) == (4, [])
    assert resumed["steps"] == whole["steps"][2:]
    for name, tensor in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor)
    found["found_for"]["device"] = "NVIDIA H100, 80.0 GiB"
    (tmp_path / MEMORY_FILE).write_text(json.dumps(found))
    assert go_on()[0]["size"] == 8
    assert "device: cpu, " in caplog.text
    assert ", it was NVIDIA H100, 80.0 GiB" in caplog.text
    (tmp_path / MEMORY_FILE).write_text("{")
    assert go_on()[0]["size"] == 8
    assert f"{MEMORY_FILE} cannot be read" in caplog.text


def test_a_new_run_in_an_old_folder_searches(tmp_path: Path) -> None:
    fit(LimitedStrategy(limits=[2]), default_root_dir=tmp_path)
    assert fit(LimitedStrategy(limits=[4]), default_root_dir=tmp_path)["size"] == 4


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_batches_that_cannot_follow_the_size_are_refused() -> None:
    model = ToyModel()
    model.optim = FusedAdamW()
    data = ToyDataModule()
    strategy = DDPStrategy(micro_batch_size="auto")
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, **QUIET)
    loader: Any = [data.make_batch([0])]
    with pytest.raises(
        ConfigError, match=r"needs a nemo_like DataModule.*the trainer has NoneType"
    ):
        trainer.fit(model, train_dataloaders=loader)


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy, MegatronStrategy])
def test_strategies_whose_passes_communicate_refuse(strategy: Any) -> None:
    with pytest.raises(ValueError, match="micro_batch_size=auto: a rank tries sizes alone"):
        strategy(micro_batch_size="auto")


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed", "megatron"])
def test_a_configuration_that_asks_for_it_there_is_refused(strategy: str) -> None:
    line = ["+conf=llm/quickstart", f"strategy={strategy}", "strategy.micro_batch_size=auto"]
    with pytest.raises(ConfigError, match=r"strategy.micro_batch_size=auto: .*nemo-like plan"):
        compose("pretrain", line)
    for possible in ("ddp", "auto"):
        line[1] = f"strategy={possible}"
        assert compose("pretrain", line).config.strategy["micro_batch_size"] == "auto"


def test_memory_that_runs_out_in_a_step_is_explained_with_what_would_help() -> None:
    with pytest.raises(DeviceMemoryError) as it:
        fit(LimitedStrategy(limits=[9], later=3, micro_batch_size=4))
    text = str(it.value)
    assert text.startswith(
        "rank 0: memory ran out in step 1 with strategy.micro_batch_size=4 (CUDA out of memory. Tried"
    )
    assert "strategy.micro_batch_size=2, or =auto, which tries what fits" in text
    assert "strategy.activation_checkpointing=full" in text
    assert isinstance(it.value.__cause__, torch.OutOfMemoryError)
    with pytest.raises(DeviceMemoryError) as it:
        fit(LimitedStrategy(limits=[9], later=0, micro_batch_size=1))
    assert "strategy.micro_batch_size=1 (" in str(it.value)
    assert "micro_batch_size=0" not in str(it.value)


def test_sizes_are_equal_parts_of_a_share() -> None:
    assert list(list_halves(8)) == [8, 4, 2, 1]
    assert list(list_halves(12)) == [12, 6, 3, 2, 1]
    assert list(list_halves(5)) == [5, 3, 2, 1]
    assert list(list_halves(1)) == [1]


def plan(*arguments: str) -> str:
    command = [sys.executable, "-m", "nemo_like.cli.main", "plan", "+conf=llm/quickstart"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return done.stdout


def test_the_planner_says_what_it_assumes() -> None:
    asked = ["strategy=ddp", "strategy.micro_batch_size=auto"]
    assert (
        "strategy.micro_batch_size=auto: 8 is assumed, the largest that fits by this estimate; the run itself tries "
        "what fits" in plan(*asked, "--device-memory=80GiB")
    )
    assert "1 is assumed, the smallest, and it does not fit" in plan(
        *asked, "--device-memory=50MiB"
    )


REAL = """
import resource, sys
import lightning.pytorch as pl, psutil, torch
from nemo_like.strategies import DDPStrategy, micro_batch
from nemo_like.testing.fit import QUIET, FusedAdamW
from nemo_like.testing.toy import ToyDataModule, ToyModel

# A sample keeps 5 x 400,000 floats for the backward pass twice: 16 MB; 64 of them more than 1 GB.
model, data = ToyModel(width=400_000), ToyDataModule(num_samples=64, global_batch_size=64)
model.optim, model.seed = FusedAdamW(), 3
size, limit = sys.argv[1:]
if limit == "address space":
    room = psutil.Process().memory_info().vms + 700_000_000
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
if limit == "machine":
    micro_batch.measure_available_bytes = lambda: 700_000_000
strategy = DDPStrategy(micro_batch_size=size if size == "auto" else int(size))
trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=2, max_epochs=-1, **QUIET)
trainer.fit(model, datamodule=data)
print("took", strategy.micro_batch_size, "at step", trainer.global_step)
"""


@pytest.mark.slow
def test_real_memory_that_runs_out_is_met_with_a_size_that_trains() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", REAL, *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    # Linux would promise what a machine does not have, and end the process that takes it.
    for limit in ("address space", "machine"):
        found = run("auto", limit)
        assert found.returncode == 0, found.stderr
        words = found.stdout.split()
        assert words[0] == "took"
        assert 4 <= int(words[1]) < 64
        assert words[-1] == "2"
    # All at once is too much, and is said so.
    failed = run("64", "address space")
    assert failed.returncode != 0
    assert (
        "DeviceMemoryError: rank 0: memory ran out in step 1 with strategy.micro_batch_size=64"
        in (failed.stderr)
    )
    assert "can't allocate memory" in failed.stderr
