"""Impossible requests are refused by the composed configuration, all at once, with what would do."""

from __future__ import annotations

import pytest

from nemo_like.core.compose import compose_template
from nemo_like.core.errors import ConfigError
from nemo_like.strategies.planning.limits import name_nearest

# 8 query and 4 key/value heads, 8 layers, 16 samples of 64 tokens a step.
RUN = [
    "+conf=llm/quickstart",
    "model.network.hidden_size=64",
    "model.network.num_heads=8",
    "model.network.num_kv_heads=4",
    "model.network.num_layers=8",
    "model.network.intermediate_size=192",
    "data.seq_len=64",
    "data.global_batch_size=16",
    "strategy.micro_batch_size=2",
    "trainer.devices=8",
]


def faults(*overrides: str) -> list[str]:
    try:
        compose_template("pretrain", [*RUN, *overrides])
    except ConfigError as error:
        return error.faults
    return []


MEGATRON = "strategy=megatron"
CASES = {
    ("strategy.tensor_parallel=8",): (
        "strategy.tensor_parallel=8: must divide num_kv_heads=4 of the network",
        "the nearest possible is 4",
    ),
    ("strategy.tensor_parallel=3", "trainer.devices=3"): (
        "strategy.tensor_parallel=3: must divide num_heads=8 and num_kv_heads=4 of the network",
        "the nearest possible are 2 and 4",
    ),
    ("strategy.pipeline_parallel=3", "trainer.devices=3"): (
        "strategy.pipeline_parallel=3: must divide num_layers=8 of the network",
        "the nearest possible are 2 and 4",
    ),
    ("strategy.pipeline_parallel=2", "strategy.virtual_pipeline=3"): (
        "strategy.virtual_pipeline=3: times 2, must divide num_layers=8 of the network",
        "the nearest possible are 2 and 4",
    ),
    ("strategy.pipeline_parallel=4", "trainer.devices=6"): (
        "strategy.pipeline_parallel=4: tensor_parallel x pipeline_parallel = 4 must divide the ranks",
        "trainer.devices x trainer.num_nodes is 6; the nearest possible are 3 and 6, or take a multiple of 4 ranks",
    ),
    ("trainer.devices=6",): (
        "strategy.micro_batch_size=2: data.global_batch_size=16 cannot be divided over 6 data-parallel shares",
        "of global_batch_size the nearest possible are 12 and 18",
    ),
    ("strategy.micro_batch_size=3", "trainer.devices=2"): (
        "strategy.micro_batch_size=3: must divide the 8 samples that each of 2 data-parallel shares has",
        "the nearest possible are 2 and 4",
    ),
    ("strategy.pipeline_parallel=4", "strategy.virtual_pipeline=2", "strategy.micro_batch_size=8",
     "trainer.devices=4"): (
        "strategy.virtual_pipeline=2: interleaves micro-batches in groups of pipeline_parallel=4, and a step has 2",
        "micro_batch_size: the nearest possible is 4",
    ),
    ("strategy.sequence_parallel=true",): (
        "strategy.sequence_parallel=true: cuts sequences over the tensor-parallel ranks, of which tensor_parallel=1",
        "set tensor_parallel to 2 or more",
    ),
    ("strategy.tensor_parallel=4", "strategy.sequence_parallel=true", "data.seq_len=66"): (
        "strategy.sequence_parallel=true: cuts samples into tensor_parallel=4 equal parts, which data.seq_len=66",
        "the nearest possible are 64 and 68",
    ),
    ("strategy.virtual_pipeline=2",): (
        "strategy.virtual_pipeline=2: interleaves chunks over stages, of which pipeline_parallel=1 has one",
        "or virtual_pipeline=null",
    ),
    ("trainer.precision=fp16-mixed",): (
        "override 'trainer.precision=fp16-mixed': trainer.precision=fp16-mixed: strategy=megatron scales no losses",
        "take trainer.precision=bf16-mixed or fp32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_megatron_says_what_would_be_possible(overrides: tuple[str, ...]) -> None:
    what, remedy = CASES[overrides]
    (fault,) = faults(MEGATRON, *overrides)
    assert what in fault
    assert remedy in fault


def test_all_faults_come_at_once_with_their_places() -> None:
    found = faults(
        MEGATRON, "strategy.tensor_parallel=3", "strategy.pipeline_parallel=5", "trainer.devices=4"
    )
    assert [it.partition(": ")[0] for it in found] == [
        "override 'strategy.tensor_parallel=3'",
        "override 'strategy.pipeline_parallel=5'",
        "override 'strategy.tensor_parallel=3'",
    ]


def test_what_is_possible_is_not_refused() -> None:
    assert faults(
        MEGATRON,
        "strategy.tensor_parallel=2",
        "strategy.pipeline_parallel=2",
        "strategy.virtual_pipeline=2",
        "strategy.sequence_parallel=true",
    ) == []  # fmt: skip
    assert faults("strategy=fsdp", "strategy.replicate=2") == []
    assert faults("strategy=deepspeed", "optim=adamw", "optim.lr=1e-3") == []
    assert faults("strategy=auto", "strategy.device_memory=80GiB") == []


def test_ranks_are_not_judged_before_they_are_known() -> None:
    assert faults(MEGATRON, "strategy.pipeline_parallel=4", "trainer.devices=auto") == []


def test_replicas_must_divide_the_ranks() -> None:
    (fault,) = faults("strategy=fsdp", "strategy.replicate=3")
    assert "strategy.replicate=3: must divide the ranks" in fault
    assert "is 8; the nearest possible are 2 and 4" in fault


def test_offloading_to_the_host_needs_another_memory() -> None:
    (fault,) = faults("strategy=fsdp", "strategy.cpu_offload=true", "trainer.accelerator=cpu")
    assert "strategy.cpu_offload=true: has no effect with trainer.accelerator=cpu" in fault


def test_parameters_are_offloaded_with_stage_3_only() -> None:
    (fault,) = faults(
        "strategy=deepspeed", "optim=adamw", "optim.lr=1", "strategy.offload_parameters=true"
    )
    assert "strategy.offload_parameters=true: stage=2 keeps parameters whole" in fault


def test_muon_is_refused_where_matrices_are_cut_flat() -> None:
    (fault,) = faults("strategy=deepspeed")
    assert (
        "strategy.stage: ZeRO cuts parameters into flat pieces, and optim=muon needs whole" in fault
    )


def test_a_size_of_memory_is_checked() -> None:
    (fault,) = faults("strategy=auto", "strategy.device_memory=80Gb/s")
    assert "strategy.device_memory='80Gb/s': must be a size of memory above 0" in fault


def test_the_nearest_values_are_one_below_and_one_above() -> None:
    assert name_nearest(3, [1, 2, 4, 8]) == "the nearest possible are 2 and 4"
    assert name_nearest(9, [1, 2, 4, 8]) == "the nearest possible is 8"
    assert name_nearest(1, [1]) == "nothing else is possible"
