"""A run in Megatron's modules is the run of the single process: figures, weights, checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_like.collections.llm.data import IGNORE_INDEX, TextBatch
from nemo_like.collections.llm.decoder.config import DecoderConfig, RopeScalingConfig
from nemo_like.collections.llm.decoder.megatron import MegatronDecoder, find_faults
from nemo_like.collections.llm.testing import rehearse
from nemo_like.core.checkpoint import open_checkpoint
from nemo_like.core.errors import ConfigError
from nemo_like.optim import AdamW
from nemo_like.strategies import DDPStrategy, MegatronStrategy, register
from nemo_like.testing.numerics import TOLERANCE, assert_close
from nemo_like.testing.world import run_world

TP: dict[str, Any] = {"tensor_parallel": 2}
SP: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True}
PP: dict[str, Any] = {"pipeline_parallel": 2}
VP: dict[str, Any] = {"pipeline_parallel": 2, "virtual_pipeline": 2}
BOTH: dict[str, Any] = {"tensor_parallel": 2, "pipeline_parallel": 2}

LLAMA: dict[str, Any] = {}
SHORT: dict[str, Any] = {"steps": 3}
TIED: dict[str, Any] = {"network": {"tie_embeddings": True}}
# 65 words are 33 for each of two ranks: one row is filled up.
PADDED: dict[str, Any] = {"network": {"vocab_size": 65}}
QWEN2: dict[str, Any] = {"network": {"tie_embeddings": True, "qkv_bias": True, "output_bias": True}}
QWEN3: dict[str, Any] = {"network": {"qk_norm": True, "head_dim": 12, "tie_embeddings": True}}
# A window shorter than the samples; llama3 scaling with a context of 8.
WINDOW: dict[str, Any] = {
    "steps": 3,
    "network": {
        "sliding_window": 5,
        "rope_theta": 500.5,
        "rope_scaling": RopeScalingConfig(
            kind="llama3",
            factor=4.0,
            low_frequency_factor=1.0,
            high_frequency_factor=4.0,
            original_max_positions=8,
        ),
    },
}
SHAPES = {
    "llama": LLAMA,
    "short": SHORT,
    "tied": TIED,
    "padded": PADDED,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "window": WINDOW,
    "muon": {"optim": "muon"},
}
Case = tuple[dict[str, Any], dict[str, Any]]
"""Options of MegatronStrategy, options of rehearse."""

TWO: dict[str, Case] = {
    "tp": (TP, PADDED),
    "sp": (SP, QWEN3),
    "pp": (PP, QWEN2),
    "interleaved": (VP, TIED),
    "dp": ({}, {"optim": "muon"}),
    # Three steps are an epoch with its short step.
    "interleaved, odd micro-batches": ({**VP, "micro_batch_size": 3}, SHORT),
    "window": (TP, WINDOW),
    "recomputed": ({**SP, "activation_checkpointing": "full", "activation_offload": True}, SHORT),
    "partly recomputed": ({**PP, "activation_checkpointing": "selective"}, SHORT),
}
FOUR: dict[str, Case] = {
    "tp x pp": (BOTH, {"optim": "muon"}),
    "tp x dp": (TP, TIED),
    "pp x dp": ({**PP, "shard_optimizer": False}, TIED),
}


def train(strategy: Any, devices: int, options: dict[str, Any]) -> dict[str, Any]:
    # Adam's first steps have the size of the learning rate whatever the gradient, so rounding in gradients near zero
    # shows in the weights; a hundredth would multiply it beyond the tolerance.
    return rehearse(strategy, devices=devices, **{"optim": AdamW(lr=1e-3), **options})


def train_rank(devices: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [
        train(MegatronStrategy(**{"micro_batch_size": 2, **strategy}), devices, options)
        for strategy, options in cases
    ]


@functools.cache
def run_all(devices: int) -> dict[str, list[dict[str, Any]]]:
    """What each rank returned, by case; one world for all of them, because starting one takes longer."""
    cases = {2: TWO, 4: FOUR}[devices]
    ranks = run_world(devices, train_rank, devices, list(cases.values()))
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(cases)}


@functools.cache
def run_alone(name: str) -> dict[str, Any]:
    """The same run in a single process."""
    return train(DDPStrategy(micro_batch_size=2), 1, SHAPES[name])


def alone(options: dict[str, Any]) -> dict[str, Any]:
    (name,) = [name for name, shape in SHAPES.items() if shape == options]
    return run_alone(name)


def figures(run: dict[str, Any], key: str) -> torch.Tensor:
    return torch.tensor([step[f"train/{key}"] for step in run["steps"]])


def assert_same_run(run: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(run["steps"]) == len(expected["steps"]) > 0
    for key in ("loss", "grad_norm", "lr", "units"):
        assert_close(figures(run, key), figures(expected, key))
    assert_close(run["weights"], expected["weights"])
    assert run["val"]["val/loss"] == pytest.approx(expected["val"]["val/loss"], rel=2e-5)
    assert run["position"] == expected["position"]


@pytest.mark.dist
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_are_the_single_process(name: str) -> None:
    for run in run_all(2)[name]:
        assert_same_run(run, alone(TWO[name][1]))


@pytest.mark.dist
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_are_the_single_process(name: str) -> None:
    for run in run_all(4)[name]:
        assert_same_run(run, alone(FOUR[name][1]))


@pytest.mark.dist
def test_bf16_is_close_to_bf16_in_a_single_process() -> None:
    options = {"precision": "bf16-mixed", "steps": 5}
    expected = train(DDPStrategy(micro_batch_size=2), 1, options)
    for cases in run_world(2, train_rank, 2, [(SP, options), (PP, options)]):
        for run in cases:
            for key in ("loss", "grad_norm"):
                assert_close(
                    figures(run, key), figures(expected, key), tolerance=TOLERANCE[torch.bfloat16]
                )


def train_on_unclean_memory() -> dict[str, Any]:
    # Fills memory that nobody has written to with nan.
    torch.use_deterministic_algorithms(True)
    return train(MegatronStrategy(micro_batch_size=2, **TP), 2, {**PADDED, "steps": 2})


@pytest.mark.dist
def test_rows_that_fill_up_the_vocabulary_are_never_uninitialised() -> None:
    for run in run_world(2, train_on_unclean_memory):
        expected = figures(run_alone("padded"), "loss")[:2]
        assert_close(figures(run, "loss"), expected)


def test_a_plain_trainer_takes_it_by_name() -> None:
    register()
    run, expected = train("nemo_megatron", 1, SHORT), run_alone("short")
    assert_close(figures(run, "loss"), figures(expected, "loss"))


def test_one_process_needs_no_launcher_and_leaves_nothing_behind() -> None:
    cuda = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    (run,) = train_rank(1, [({}, LLAMA)])
    assert_same_run(run, alone(LLAMA))
    assert {name: getattr(torch.cuda, name) for name in dir(torch.cuda)} == cuda
    assert torch.overrides._get_current_function_mode() is None
    assert not dist.is_initialized()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_on_any_plan_is_the_single_process(shape: str) -> None:
    plans = {
        2: [TP, SP, PP, VP, {}, {"shard_optimizer": False}],
        4: [BOTH, {**BOTH, **VP, "sequence_parallel": True}, SP, VP, PP, TP],
    }
    for devices, strategies in plans.items():
        cases = [(strategy, SHAPES[shape]) for strategy in strategies]
        for rank in run_world(devices, train_rank, devices, cases, timeout_s=280):
            for run in rank:
                assert_same_run(run, run_alone(shape))


# Randomness.

DROPOUT: dict[str, Any] = {"network": {"dropout": 0.2, "attention_dropout": 0.2}, "steps": 2}


class SeedTaker(MegatronStrategy):
    """Notes where the generators were set to in each step: that of the rank, that of tensor-parallel regions."""

    seeds: list[tuple[int, int]]

    def _seed(self, seed: int, step: int) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        super()._seed(seed, step)
        (tensor,) = get_cuda_rng_tracker().seeds_
        self.seeds.append((torch.initial_seed(), tensor))


def train_with_dropout(devices: int) -> list[tuple[dict[str, Any], list[tuple[int, int]]]]:
    out = []
    for options in (TP, TP, {**TP, "activation_checkpointing": "full"}, SP, PP, {}):
        strategy = SeedTaker(micro_batch_size=2, **options)
        strategy.seeds = []
        out.append((train(strategy, devices, DROPOUT), strategy.seeds))
    return out


@pytest.mark.dist
def test_dropout_agrees_where_it_must_and_differs_where_it_must() -> None:
    first, second = run_world(2, train_with_dropout, 2)
    tensor, again, recomputed, sequence, pipeline, data = zip(first, second, strict=True)
    for case in (tensor, sequence):
        # Whole parameters are moved on each tensor-parallel rank by itself: they stay equal only if dropout on the
        # residual stream was equal.
        (one, one_seeds), (other, other_seeds) = case
        assert one["steps"] == other["steps"]
        assert all(torch.equal(one["weights"][it], other["weights"][it]) for it in one["weights"])
        assert [it[0] for it in one_seeds] == [it[0] for it in other_seeds]
        assert all(a[1] != b[1] for a, b in zip(one_seeds, other_seeds, strict=True))
        assert len(set(one_seeds)) == len(one_seeds) == 2
    for case in (pipeline, data):
        (_, one_seeds), (_, other_seeds) = case
        assert all(a[0] != b[0] for a, b in zip(one_seeds, other_seeds, strict=True))
    plain = train(DDPStrategy(micro_batch_size=2), 1, {**DROPOUT, "network": {}})
    assert tensor[0][0]["steps"][0]["train/loss"] != plain["steps"][0]["train/loss"]
    assert again[0][0]["steps"] == tensor[0][0]["steps"]
    # Computed again with the very numbers of the forward pass.
    assert recomputed[0][0]["steps"] == tensor[0][0]["steps"]


# Communication.


def count_gradient_sums(devices: int) -> list[int]:
    counts = []
    original = dist.all_reduce
    for micro_batch_size in (4, 1):
        sizes: list[int] = []

        def count(tensor: torch.Tensor, *rest: Any, sizes: Any = sizes, **options: Any) -> Any:
            sizes.append(tensor.numel())
            return original(tensor, *rest, **options)

        dist.all_reduce = count
        try:
            train(MegatronStrategy(micro_batch_size=micro_batch_size), devices, SHORT)
        finally:
            dist.all_reduce = original
        counts.append(sum(size > 1000 for size in sizes))
    return counts


@pytest.mark.dist
def test_gradients_are_summed_once_a_step_however_many_micro_batches() -> None:
    # One bucket, three steps.
    assert run_world(2, count_gradient_sums, 2) == [[3, 3], [3, 3]]


# Checkpoints.


SAVED: dict[str, Any] = {**TIED, "steps": 6, "every_n_steps": 3}


def continue_elsewhere(devices: int, folder: Path) -> list[dict[str, Any]]:
    """Saves under one plan, goes on under others."""
    whole = train(
        MegatronStrategy(micro_batch_size=2, **BOTH), devices, {**SAVED, "folder": folder / "mega"}
    )
    saved = folder / "mega" / "step_00000003"
    others = [BOTH, {**VP, "micro_batch_size": 1}, SP]
    return [
        whole,
        *(
            train(
                MegatronStrategy(**{"micro_batch_size": 2, **plan}),
                devices,
                {**SAVED, "resume": saved},
            )
            for plan in others
        ),
        train(
            MegatronStrategy(micro_batch_size=2, **BOTH),
            devices,
            {**SAVED, "resume": folder / "ddp" / "step_00000003"},
        ),
    ]


def assert_continues(run: dict[str, Any], whole: dict[str, Any]) -> None:
    for key in ("loss", "grad_norm", "lr"):
        assert_close(figures(run, key), figures(whole, key)[3:])
    assert_close(run["weights"], whole["weights"])
    assert run["position"] == whole["position"]


@pytest.mark.slow
@pytest.mark.dist
def test_a_checkpoint_goes_on_under_any_plan(tmp_path: Path) -> None:
    alone = train(DDPStrategy(micro_batch_size=2), 1, {**SAVED, "folder": tmp_path / "ddp"})
    for rank in run_world(4, continue_elsewhere, 4, tmp_path):
        whole, same, *others, from_ddp = rank
        # The same plan again: bit for bit.
        assert same["steps"] == whole["steps"][3:]
        assert all(
            torch.equal(same["weights"][it], whole["weights"][it]) for it in whole["weights"]
        )
        for run in (*others, from_ddp):
            assert_continues(run, whole)
    saved = tmp_path / "mega" / "step_00000003"
    resumed = train(DDPStrategy(micro_batch_size=2), 1, {**SAVED, "resume": saved})
    assert_continues(resumed, alone)
    for part in ("model", "optimizer"):
        names = [
            open_checkpoint(folder / "step_00000003").tensor_names(part)
            for folder in (tmp_path / "mega", tmp_path / "ddp")
        ]
        assert names[0] == names[1]


# What cannot be.


def context(**options: Any) -> Any:
    plan = {"tensor_parallel": 1, "pipeline_parallel": 1, "virtual_pipeline": None}
    return SimpleNamespace(**{**plan, "tensor_rank": 0, "sequence_parallel": False, **options})


def shape(**options: Any) -> DecoderConfig:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 4, "num_heads": 8}
    return DecoderConfig(**{**sizes, "intermediate_size": 48, "max_positions": 16, **options})


def test_a_shape_that_cannot_be_cut_is_refused_with_all_faults_at_once() -> None:
    faults = list(
        find_faults(
            shape(num_kv_heads=2, num_layers=6),
            context(tensor_parallel=4, pipeline_parallel=2, virtual_pipeline=2),
        )
    )
    assert faults == [
        "strategy.tensor_parallel=4: must divide model.network.num_kv_heads=2; the nearest smaller one is 2",
        "strategy.pipeline_parallel=2 x virtual_pipeline=2: 4 chunks must divide model.network.num_layers=6",
    ]
    assert list(find_faults(shape(num_kv_heads=4), context(tensor_parallel=4))) == []
    with pytest.raises(ConfigError, match="num_kv_heads=2; the nearest smaller one is 2"):
        MegatronDecoder(shape(num_kv_heads=2), context(tensor_parallel=4))


def unmeasured(**options: Any) -> MegatronDecoder:
    decoder = object.__new__(MegatronDecoder)
    decoder.shape, decoder.context = shape(), context(**options)
    return decoder


def test_sequences_that_cannot_be_cut_are_refused() -> None:
    batch = TextBatch(torch.zeros(2, 15, dtype=torch.int64), torch.zeros(2, 15, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"samples of 15 tokens.*multiple of 2"):
        unmeasured(tensor_parallel=2, sequence_parallel=True).measure(batch)
    assert unmeasured(tensor_parallel=2).measure(batch) == (15, 2)


def test_a_blank_micro_batch_has_no_targets() -> None:
    tokens_BT = torch.arange(6).view(2, 3)
    blank = unmeasured().blank(TextBatch(tokens_BT, tokens_BT, tokens_BT.int()))
    assert torch.equal(blank.targets_BT, torch.full((1, 3), IGNORE_INDEX))
    assert torch.equal(blank.tokens_BT, tokens_BT[:1])
    assert blank.segments_BT is not None
    assert unmeasured().blank(TextBatch(tokens_BT, tokens_BT)).segments_BT is None
