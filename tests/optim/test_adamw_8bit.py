"""8-bit AdamW: close to AdamW, small, saved as plain tensors, and continued bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like.collections.llm.testing import rehearse
from nemo_like.core.checkpoint import find_checkpoints, open_checkpoint
from nemo_like.core.errors import ConfigError
from nemo_like.optim import AdamW, AdamW8bit
from nemo_like.optim.adamw_8bit import SMALLEST
from nemo_like.strategies import DDPStrategy
from nemo_like.testing.world import run_world

# bitsandbytes looks for GPUs when it is loaded.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:bitsandbytes")


def train(optim: Any, *, width: int, steps: int = 20) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))
    optimizer = optim.build(model)
    x, y = torch.randn(2, 32, 64)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_small_parameters_are_updated_as_torch_does() -> None:
    ours, _ = train(AdamW8bit(lr=1e-2), width=8)
    theirs, _ = train(AdamW(lr=1e-2), width=8)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_large_parameters_are_updated_nearly_as_torch_does() -> None:
    ours, _ = train(AdamW8bit(lr=1e-2), width=128)
    theirs, _ = train(AdamW(lr=1e-2), width=128)
    start, _ = train(AdamW(lr=1e-2), width=128, steps=0)
    for name, other in theirs.named_parameters():
        moved = (other - start.get_parameter(name)).norm()
        assert (ours.get_parameter(name) - other).norm() < 0.1 * moved, name


def test_the_state_takes_two_bytes_a_parameter() -> None:
    model, optimizer = train(AdamW8bit(lr=1e-2), width=1024, steps=1)
    matrix = model[0].weight
    assert matrix.numel() > SMALLEST
    state = optimizer.state[matrix]
    size = sum(it.numel() * it.element_size() for it in state.values())
    assert size / matrix.numel() < 2.1
    assert all(isinstance(it, torch.Tensor) for it in state.values())


def test_decay_spares_biases() -> None:
    _, optimizer = train(AdamW8bit(lr=1e-2, weight_decay=0.3), width=8, steps=1)
    decays = {
        p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decays == {2: 0.3, 1: 0.0}


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="weight_decay=-1"):
        AdamW8bit(lr=1e-3, weight_decay=-1)


def test_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "network": {"hidden_size": 64, "intermediate_size": 96, "dropout": 0.1, "num_layers": 1},
        "optim": AdamW8bit(lr=1e-2),
        "steps": 4,
    }
    whole = rehearse(DDPStrategy(micro_batch_size=4), folder=tmp_path, every_n_steps=2, **options)
    saved = find_checkpoints(tmp_path)[0]
    name = "network.layers.0.mlp.up.weight/exp_avg"
    assert f"{name}_scale" in open_checkpoint(saved).tensor_names("optimizer")
    assert open_checkpoint(saved).read_tensors("optimizer", [name])[name].dtype == torch.uint8
    resumed = rehearse(DDPStrategy(micro_batch_size=4), resume=saved, **options)
    assert resumed["steps"] == whole["steps"][2:]
    for weight, tensor in whole["weights"].items():
        assert torch.equal(resumed["weights"][weight], tensor), weight


def build_on_slices() -> str:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(64, 128)
    fully_shard(model)
    with pytest.raises(ConfigError) as caught:
        AdamW8bit(lr=1e-2).build(model)
    return str(caught.value)


@pytest.mark.dist
def test_parameters_cut_over_ranks_are_refused() -> None:
    (message,) = run_world(1, build_on_slices)
    assert "optim=AdamW8bit: its state cannot be cut over ranks; take optim=adamw" in message
