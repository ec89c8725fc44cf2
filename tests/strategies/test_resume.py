"""What a strategy saves and restores, and what it refuses to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nemo_like.core.checkpoint import open_checkpoint
from nemo_like.core.errors import CheckpointError
from nemo_like.strategies.resume import (
    collect_optimizer_tensors,
    restore_optimizer,
    restore_progress,
)
from nemo_like.testing.fit import fit_toy
from nemo_like.testing.toy import ToyModel


def test_optimizer_state_has_the_names_of_the_parameters(tmp_path: Path) -> None:
    fit_toy(steps=2, folder=tmp_path)
    names = open_checkpoint(tmp_path / "step_00000002").tensor_names("optimizer")
    parameters = [name for name, _ in ToyModel().named_parameters()]
    assert names == sorted(
        f"{name}/{key}" for name in parameters for key in ("exp_avg", "exp_avg_sq", "step")
    )


def test_a_restored_optimizer_keeps_the_hyper_parameters_of_the_configuration(
    tmp_path: Path,
) -> None:
    fit_toy(steps=2, folder=tmp_path)
    model = ToyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    restore_optimizer(optimizer, model, open_checkpoint(tmp_path / "step_00000002"))
    assert optimizer.param_groups[0]["lr"] == 0.5
    state = optimizer.state[next(model.parameters())]
    assert float(state["step"]) == 2
    assert state["exp_avg"].abs().sum() > 0


def test_a_state_that_is_no_tensor_is_refused_by_name() -> None:
    model = ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.network[0].weight]["history"] = ["text"]
    with pytest.raises(CheckpointError, match=r"network\.0\.weight/history is list"):
        collect_optimizer_tensors(optimizer, model)


def test_a_schedule_that_is_no_function_of_the_step_is_refused(tmp_path: Path) -> None:
    fit_toy(steps=2, folder=tmp_path)
    model = ToyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    counters = SimpleNamespace(load_state_dict=lambda state: None)
    step = SimpleNamespace(total=SimpleNamespace())
    epoch_loop = SimpleNamespace(
        batch_progress=counters,
        manual_optimization=SimpleNamespace(optim_step_progress=step),
    )
    config = SimpleNamespace(scheduler=ReduceLROnPlateau(optimizer))
    model.trainer = SimpleNamespace(  # type: ignore[assignment]
        fit_loop=SimpleNamespace(epoch_loop=epoch_loop),
        strategy=SimpleNamespace(lr_scheduler_configs=[config]),
    )
    with pytest.raises(CheckpointError, match="ReduceLROnPlateau: only schedules"):
        restore_progress(open_checkpoint(tmp_path / "step_00000002"), model)
