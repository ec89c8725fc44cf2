"""Activations that are computed again, or kept on the host, change memory and nothing else."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from nemo_like.collections.llm.decoder import DecoderModel
from nemo_like.collections.llm.decoder.config import DecoderConfig
from nemo_like.collections.llm.testing import TinyTextDataModule, rehearse
from nemo_like.strategies import DDPStrategy, FSDPStrategy
from nemo_like.strategies.activation import (
    _choose,
    checkpoint_activations,
    offload_activations,
)
from nemo_like.testing.toy import ToyModel
from nemo_like.testing.world import run_world

DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1}
WAYS: dict[str, dict[str, Any]] = {
    "offload": {"activation_offload": True},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "selective, offload": {"activation_checkpointing": "selective", "activation_offload": True},
    "full, offload": {"activation_checkpointing": "full", "activation_offload": True},
}


def run(build: Any, way: dict[str, Any], devices: int = 1) -> dict[str, Any]:
    strategy = build(micro_batch_size=2, **way)
    return rehearse(strategy, devices=devices, steps=4, network=DROPOUT)


def assert_identical(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["steps"] == other["steps"]
    assert one["val"] == other["val"]
    for name, tensor in other["weights"].items():
        assert torch.equal(one["weights"][name], tensor), name


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return run(DDPStrategy, {})


@pytest.mark.parametrize("way", WAYS)
def test_a_run_with_dropout_is_the_plain_one_bit_for_bit(way: str, plain: dict[str, Any]) -> None:
    assert_identical(run(DDPStrategy, WAYS[way]), plain)


def run_all(devices: int) -> list[tuple[str, Any, list[Any]]]:
    return [
        (build.__name__, run(build, {}, devices), [run(build, way, devices) for way in ways])
        for build, ways in (
            (DDPStrategy, [WAYS["full"], WAYS["selective, offload"]]),
            (FSDPStrategy, [WAYS["selective"], WAYS["full, offload"]]),
        )
    ]


@pytest.mark.dist
def test_two_ranks_are_the_plain_ones_bit_for_bit() -> None:
    for results in run_world(2, run_all, 2):
        assert [name for name, *_ in results] == ["DDPStrategy", "FSDPStrategy"]
        for _, expected, others in results:
            for it in others:
                assert_identical(it, expected)


class LiveBytes(TorchDispatchMode):
    """Counts the memory that operations gave and that is still held."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return result

    def count(self) -> int:
        return sum(size for it, size in self.storages.values() if it() is not None)


def build_model() -> DecoderModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "num_layers": 4, "num_heads": 4}
    return DecoderModel(network=DecoderConfig(**shape, intermediate_size=96, max_positions=16))


def count_kept(mode: Any) -> int:
    """Bytes that a forward pass of the tiny decoder leaves for its backward pass."""
    model = build_model()
    checkpoint_activations(model, mode)
    batch = TinyTextDataModule().make_batch([0, 1, 2, 3])
    with LiveBytes() as live:
        loss = model.compute_loss_sum(batch)
        kept = live.count()
    loss.backward()
    return kept


def test_more_checkpointing_keeps_less() -> None:
    none, selective, full = (count_kept(mode) for mode in ("none", "selective", "full"))
    assert full < 0.35 * none
    assert full < selective < 0.75 * none


def test_offloading_moves_activations_and_leaves_parameters() -> None:
    weight_32_32 = nn.Parameter(torch.randn(32, 32))
    x_4_32, scale_32 = torch.randn(4, 32), torch.randn(32, requires_grad=True)
    with offload_activations(torch.device("cpu")):
        y_4_32 = nn.functional.linear(x_4_32 * scale_32, weight_32_32)
        same_4_32 = y_4_32.tanh()
    saved = [
        getattr(node, name).data_ptr()
        for node in (y_4_32.grad_fn, same_4_32.grad_fn)
        for name in ("_saved_mat2", "_saved_result")
        if hasattr(node, name)
    ]
    assert weight_32_32.data_ptr() in saved
    assert same_4_32.data_ptr() not in saved
    assert len(saved) == 2


def test_the_layout_of_what_is_kept_on_the_host_is_that_of_the_original() -> None:
    x_3_5 = torch.randn(5, 3).t().requires_grad_()
    with offload_activations(torch.device("cpu")):
        y_3_5 = (x_3_5 * 2).exp()
    kept: Tensor = y_3_5.grad_fn._saved_result  # type: ignore[union-attr]
    assert torch.equal(kept, y_3_5)
    assert kept.stride() == y_3_5.stride() == (1, 3)


def test_attention_is_kept_unless_it_draws() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert _choose(None, attention, 0, 0, 0, 0.0) is CheckpointPolicy.MUST_SAVE
    assert _choose(None, attention, 0, 0, 0) is CheckpointPolicy.MUST_SAVE
    assert _choose(None, attention, 0, 0, 0, 0.1) is CheckpointPolicy.PREFER_RECOMPUTE
    assert _choose(None, attention, 0, 0, 0, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"=full: ToyModel.blocks\(\) is empty"):
        checkpoint_activations(ToyModel(), "full")


@pytest.mark.parametrize(("is_training", "times"), [(True, 2), (False, 1)])
def test_blocks_run_twice_in_training_only(is_training: bool, times: int) -> None:
    model, calls = build_model(), []
    checkpoint_activations(model, "full")
    checkpoint_activations(model, "full")  # as a second call of a trainer does
    model.network.layers[0].mlp.register_forward_pre_hook(lambda *arguments: calls.append(1))
    loss = model.train(is_training).compute_loss_sum(TinyTextDataModule().make_batch([0]))
    loss.backward()
    assert len(calls) == times
