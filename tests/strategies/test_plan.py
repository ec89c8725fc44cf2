"""The memory model by closed forms, the choice by its rule, and ``strategy=auto``."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from nemo_like.collections.llm.decoder import DecoderConfig
from nemo_like.core.compose import compose_template
from nemo_like.core.errors import ConfigError
from nemo_like.strategies.auto import AutoStrategy
from nemo_like.strategies.planning.choice import Devices, choose, row_of
from nemo_like.strategies.planning.cost import estimate_cost
from nemo_like.strategies.planning.memory import Memory, estimate
from nemo_like.strategies.planning.plan import Plan, find_strategy, read_plan
from nemo_like.strategies.planning.size import format_bytes, parse_bytes
from nemo_like.strategies.planning.weights import count_stage, count_weights
from nemo_like.strategies.planning.work import Work

GIB = 2**30
SHAPE = DecoderConfig(
    vocab_size=4096,
    hidden_size=256,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=704,
    max_positions=512,
    tie_embeddings=False,
    qkv_bias=True,
    qk_norm=True,
)
WORK = Work(shape=SHAPE, seq_len=256, global_batch_size=64, platform="gpu")
# Llama 3 8B, 4 M tokens a step.
LARGE = Work(
    shape=DecoderConfig(
        vocab_size=128256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=14336,
        max_positions=8192,
        tie_embeddings=False,
    ),
    seq_len=8192,
    global_batch_size=512,
    precision="bf16-mixed",
)


def predict(work: Work = WORK, *, strategy: Any = "ddp", ranks: int = 1, **settings: Any) -> Memory:
    return estimate(Plan(strategy=strategy, ranks=ranks, **settings), work)


def test_weights_are_counted_as_the_network_has_them() -> None:
    for shape in (SHAPE, replace(SHAPE, tie_embeddings=True), LARGE.shape):
        assert count_weights(replace(WORK, shape=shape)).total == shape.count_parameters()


def test_stages_and_tensor_ranks_hold_all_weights_together() -> None:
    whole = count_weights(WORK)
    stages = [count_stage(WORK, stage=it, stages=4, tensor_parallel=2) for it in range(4)]
    assert sum(it.layers for it in stages) == whole.layers
    assert sum(it.embedding for it in stages) * 2 == whole.embedding
    assert sum(it.head for it in stages) * 2 == whole.head
    assert stages[0].matrices * 2 == whole.matrices
    # Of tied matrices the last stage has a copy.
    tied = replace(WORK, shape=replace(SHAPE, tie_embeddings=True))
    assert count_stage(tied, stage=3, stages=4, tensor_parallel=1).head == whole.embedding


def test_adamw_keeps_two_numbers_a_weight_and_muon_one_of_a_hidden_matrix() -> None:
    count = SHAPE.count_parameters()
    weights = count_weights(WORK)
    hidden = weights.layers * weights.matrices
    assert predict().parameters == 4 * count
    assert predict().optimizer == 8 * count
    assert predict(replace(WORK, optimizer="muon")).optimizer == 8 * count - 4 * hidden


@pytest.mark.parametrize(
    ("settings", "parameters", "optimizer"),
    [
        ({"strategy": "ddp"}, 1, 1),
        ({"strategy": "fsdp"}, 8, 8),
        ({"strategy": "fsdp", "replicate": 2}, 4, 4),
        ({"strategy": "fsdp", "cpu_offload": True}, None, None),
        ({"strategy": "megatron"}, 1, 8),
        ({"strategy": "megatron", "shard_optimizer": False}, 1, 1),
        ({"strategy": "megatron", "tensor_parallel": 4}, 4, 8),
    ],
    ids=str,
)
def test_each_strategy_cuts_what_it_says(
    settings: dict[str, Any], parameters: int | None, optimizer: int | None
) -> None:
    count = SHAPE.count_parameters()
    memory = predict(ranks=8, **settings)
    for part, found, size in (
        (parameters, memory.parameters, 4 * count),
        (optimizer, memory.optimizer, 8 * count),
    ):
        # Norms are whole on tensor-parallel ranks, and Megatron's optimizer has copies of interleaved matrices.
        assert found == (0 if part is None else pytest.approx(size / part, rel=0.12))
    assert (memory.host > 0) == settings.get("cpu_offload", False)


def test_zero_cuts_more_with_each_stage() -> None:
    one, two, three = (
        predict(LARGE, strategy="deepspeed", ranks=8, stage=stage, activation_checkpointing="full")
        for stage in (1, 2, 3)
    )
    assert one.total > two.total > three.total
    assert three.parameters == pytest.approx(one.parameters / 8)
    offloaded = predict(
        LARGE,
        strategy="deepspeed",
        ranks=8,
        stage=3,
        activation_checkpointing="full",
        offload_optimizer=True,
        offload_parameters=True,
    )
    assert (offloaded.parameters, offloaded.optimizer) == (0, 0)
    assert offloaded.host > three.parameters + three.optimizer


def test_what_is_computed_again_is_not_kept() -> None:
    for strategy in ("ddp", "megatron"):
        none, selective, full = (
            predict(LARGE, strategy=strategy, activation_checkpointing=mode).activations
            for mode in ("none", "selective", "full")
        )
        assert none > selective > full
    # The inputs of all blocks, and one block.
    tokens = 8192 * 4096
    assert full > 32 * 4 * tokens


def test_activations_grow_with_the_micro_batch_and_the_length() -> None:
    work = replace(WORK, packed=False)
    one = predict(work).activations
    assert predict(work, micro_batch_size=4).activations == pytest.approx(4 * one, rel=0.02)
    assert predict(replace(work, seq_len=1024)).activations == pytest.approx(4 * one, rel=0.02)
    # A mask grows with the square.
    assert predict(replace(WORK, seq_len=1024)).activations > 4.2 * predict(WORK).activations


def test_offloaded_activations_are_on_the_host() -> None:
    plain, offloaded = predict(LARGE), predict(LARGE, activation_offload=True)
    assert offloaded.total < plain.total - 20 * GIB
    assert offloaded.host > 20 * GIB


def test_the_first_stage_of_a_pipeline_holds_as_many_micro_batches_as_there_are_stages() -> None:
    two = predict(LARGE, strategy="megatron", ranks=2, pipeline_parallel=2)
    four = predict(LARGE, strategy="megatron", ranks=4, pipeline_parallel=4)
    # Half of the layers, twice the micro-batches.
    assert four.activations == pytest.approx(two.activations, rel=0.03)
    # Not more than there are.
    few = replace(LARGE, global_batch_size=1)
    assert predict(few, strategy="megatron", ranks=4, pipeline_parallel=4).activations < (
        0.4 * four.activations
    )


def test_tensor_parallelism_cuts_activations_and_sequence_parallelism_the_rest() -> None:
    plain, tensor, sequence = (
        predict(LARGE, strategy="megatron", ranks=8, tensor_parallel=parts, sequence_parallel=cut)
        for parts, cut in ((1, False), (8, False), (8, True))
    )
    assert plain.activations > tensor.activations > sequence.activations
    assert sequence.activations < plain.activations / 4


def test_a_single_device_gets_ddp_with_the_largest_micro_batch_that_fits() -> None:
    work = replace(WORK, platform="cpu")
    choice = choose(work, Devices(1, 1, 64 * GIB))
    assert choice.chosen is not None
    assert (choice.chosen.plan.strategy, choice.chosen.plan.micro_batch_size) == ("ddp", 64)
    tight = Devices(1, 1, GIB)
    chosen = choose(work, tight).chosen
    assert chosen is not None
    assert chosen.memory.total <= 0.9 * GIB
    larger = replace(chosen.plan, micro_batch_size=2 * chosen.plan.micro_batch_size)
    assert chosen.plan.activation_checkpointing == "none"
    assert not row_of(larger, work, tight).fits


def test_the_simplest_of_equal_plans_is_taken() -> None:
    chosen = choose(WORK, Devices(4, 4, 80 * GIB)).chosen
    assert chosen is not None
    assert chosen.plan.strategy == "ddp"


def test_tensor_parallelism_stays_within_a_node() -> None:
    choice = choose(LARGE, Devices(32, 4, 80 * GIB))
    assert {it.plan.tensor_parallel for it in choice.rows} == {1, 2, 4}


def test_what_fits_comes_first_and_nothing_chosen_is_too_large() -> None:
    devices = Devices(8, 8, 40 * GIB)
    choice = choose(LARGE, devices)
    assert choice.chosen in choice.rows
    fits = [it.fits for it in choice.rows]
    assert fits == sorted(fits, reverse=True)
    assert all(it.memory.total <= devices.usable for it in choice.rows if it.fits)
    assert choose(LARGE, Devices(1, 1, 4 * GIB)).chosen is None


def test_the_host_is_not_taken_to_be_endless() -> None:
    rows = choose(LARGE, Devices(1, 1, 24 * GIB)).rows
    (offloaded,) = [it for it in rows if it.plan.offload_parameters]
    assert offloaded.memory.total <= 0.9 * 24 * GIB
    assert offloaded.memory.host > 3 * 24 * GIB
    assert not offloaded.fits


def test_the_time_of_a_plan_follows_from_what_it_does() -> None:
    def cost(**settings: Any) -> Any:
        plan = Plan(**{"strategy": "megatron", "ranks": 16, **settings})
        return estimate_cost(plan, LARGE, devices_per_node=8)

    assert cost(pipeline_parallel=4).wait_s > cost(pipeline_parallel=2).wait_s > 0
    whole, chunks = cost(pipeline_parallel=4), cost(pipeline_parallel=4, virtual_pipeline=2)
    assert chunks.wait_s == pytest.approx(whole.wait_s / 2)
    assert cost(activation_checkpointing="full").recompute_s > 0
    within, across = cost(tensor_parallel=8), cost(tensor_parallel=16)
    assert across.communication_s > 5 * within.communication_s
    # A ring sends the gradients once around and the sums once more.
    sent = cost(strategy="ddp", ranks=4).sent_bytes
    assert sent == pytest.approx(2 * 3 / 4 * 4 * LARGE.shape.count_parameters())


def test_overrides_select_the_very_plan() -> None:
    run = ["+conf=llm/llama3_8b", "trainer.devices=8"]
    for row in choose(LARGE, Devices(8, 8, 80 * GIB)).rows:
        config = compose_template("pretrain", [*run, *row.plan.overrides()]).config
        strategy = find_strategy(config.strategy)
        assert strategy is not None
        assert read_plan(strategy, config.strategy, ranks=8) == row.plan


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 * GIB),
        ("80G", 80 * GIB),
        ("80 GB", 80 * 10**9),
        ("1.5TiB", 1536 * GIB),
        ("512", 512),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "0GiB", "GiB", "-1G", "80Gbit", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=repr(text)):
        parse_bytes(text)


def test_sizes_are_written_in_the_largest_unit() -> None:
    assert [format_bytes(it) for it in (0, 1536, 80 * GIB)] == ["0 B", "1.5 KiB", "80.0 GiB"]


def resolve(*overrides: str, devices: int = 1, memory: int | None = None) -> dict[str, Any]:
    composed = compose_template("pretrain", ["+conf=llm/quickstart", "strategy=auto", *overrides])
    return AutoStrategy.resolve(
        composed.config,
        devices=devices,
        devices_per_node=devices,
        device_memory_bytes=memory,
    )


def test_auto_gives_a_component_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("nemo_like").propagate = True
    with caplog.at_level(logging.INFO, logger="nemo_like.strategies.auto"):
        component = resolve("strategy.timeout_s=60")
    assert component == {
        "_target_": "nemo_like.strategies.DDPStrategy",
        "micro_batch_size": 8,
        "start_method": "popen",
        "process_group_backend": None,
        "timeout_s": 60.0,
    }
    text = caplog.text
    assert "3.0 M parameters, 8 samples of 192 tokens a step, fp32, Muon" in text
    assert "chosen: ddp, micro_batch_size 8" in text


def test_auto_takes_the_memory_that_it_is_told() -> None:
    assert resolve("strategy.device_memory=120MiB")["micro_batch_size"] < 8
    assert resolve("trainer.accelerator=cpu", memory=120 * 2**20)["micro_batch_size"] < 8


def test_auto_refuses_what_fits_nowhere() -> None:
    with pytest.raises(ConfigError, match=r"strategy=auto: no plan fits: .*needs .* MiB a device"):
        resolve("strategy.device_memory=20MiB")


def test_auto_needs_to_know_the_shape() -> None:
    with pytest.raises(ConfigError, match=r"strategy=auto: needs model\.network"):
        resolve("~model.network", "model.init_from=somewhere")


def test_auto_is_no_strategy_itself() -> None:
    with pytest.raises(ConfigError, match="strategy=auto: is for a run"):
        AutoStrategy()
