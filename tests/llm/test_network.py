# Shapes: B = blocks, T = tokens, D = width, V = vocabulary.
import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from nemo_like.collections.llm.decoder import (
    DecoderConfig,
    DecoderModelConfig,
    DecoderNetwork,
    RopeScalingConfig,
)
from nemo_like.collections.llm.decoder.sharding import SPLIT_DIMS, find_split_dims
from nemo_like.core.errors import ConfigError

TINY = DecoderConfig(
    vocab_size=50,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=40,
    max_positions=64,
    init_std=0.2,
)
SHAPES = {
    "llama": TINY,
    "mistral": dataclasses.replace(TINY, sliding_window=3, num_kv_heads=1, tie_embeddings=False),
    "qwen2": dataclasses.replace(TINY, qkv_bias=True, num_kv_heads=None),
    "qwen3": dataclasses.replace(TINY, qk_norm=True, head_dim=10, qkv_bias=True, output_bias=True),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def make_network(shape, dtype=torch.float64):
    torch.manual_seed(0)
    network = DecoderNetwork(shape).to(dtype)
    for name, parameter in network.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter)
    return network


def make_packed():
    torch.manual_seed(1)
    documents = [torch.randint(0, 50, (length,)) for length in (5, 1, 9, 7, 8)]
    tokens_BT = torch.stack([torch.cat(documents[:3]), torch.cat(documents[3:])])
    segments_BT = torch.tensor([[0] * 5 + [1] + [2] * 9, [0] * 7 + [1] * 8], dtype=torch.int32)
    return documents, tokens_BT, segments_BT


@every_shape
def test_packed_documents_equal_the_documents_run_alone(shape):
    network = make_network(shape)
    documents, tokens_BT, segments_BT = make_packed()
    packed = network(tokens_BT, segments_BT=segments_BT).flatten(0, 1).split([5, 1, 9, 7, 8])
    for document, logits in zip(documents, packed, strict=True):
        assert_close(logits, network(document[None])[0])


@every_shape
def test_packed_gradients_equal_those_of_the_documents_run_alone(shape):
    network = make_network(shape)
    documents, tokens_BT, segments_BT = make_packed()
    network(tokens_BT, segments_BT=segments_BT).logsumexp(-1).sum().backward()
    packed = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    network.zero_grad()
    sum(network(document[None]).logsumexp(-1).sum() for document in documents).backward()
    assert_close(packed, {name: parameter.grad for name, parameter in network.named_parameters()})


def test_one_segment_equals_no_segments():
    network = make_network(TINY)
    tokens_BT = torch.randint(0, 50, (2, 9))
    segments_BT = torch.full((2, 9), 3)
    assert_close(network(tokens_BT, segments_BT=segments_BT), network(tokens_BT))


@every_shape
def test_a_token_never_changes_the_past(shape):
    network = make_network(shape)
    tokens_BT = torch.randint(0, 50, (1, 12))
    changed_BT = tokens_BT.clone()
    changed_BT[0, 7] += 1
    changed_BT %= 50
    before, after = network(tokens_BT), network(changed_BT)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.isclose(before[0, 7], after[0, 7]).all()


def test_rows_do_not_see_each_other():
    network = make_network(TINY)
    tokens_BT = torch.randint(0, 50, (3, 8))
    assert_close(network(tokens_BT)[1:2], network(tokens_BT[1:2]))


def test_window_bounds_what_a_token_can_know():
    # Two layers of window 3 reach 2 tokens back each.
    network = make_network(SHAPES["mistral"])
    tokens_BT = torch.randint(0, 50, (1, 12))
    changed_BT = tokens_BT.clone()
    changed_BT[0, 2] = (changed_BT[0, 2] + 1) % 50
    before, after = network(tokens_BT), network(changed_BT)
    assert torch.equal(before[0, 7:], after[0, 7:])
    assert not torch.isclose(before[0, 6], after[0, 6]).all()


def test_given_positions_replace_counting():
    network = make_network(TINY)
    tokens_BT = torch.randint(0, 50, (2, 6))
    counted = network(tokens_BT)
    # Rotary scores depend on distance alone; the angles are float32.
    shifted = network(tokens_BT, positions_BT=torch.arange(5, 11)[None])
    assert_close(shifted, counted, rtol=0, atol=1e-5)
    doubled = network(tokens_BT, positions_BT=2 * torch.arange(6)[None])
    assert (doubled - counted).abs().max() > 1e-3


def test_linear_scaling_divides_positions():
    scaled = dataclasses.replace(TINY, rope_scaling=RopeScalingConfig(kind="linear", factor=4.0))
    tokens_BT = torch.randint(0, 50, (1, 6))
    positions_BT = 4 * torch.arange(6)[None]
    expected = make_network(TINY)(tokens_BT)
    assert_close(make_network(scaled)(tokens_BT, positions_BT=positions_BT), expected)


def test_logits_are_hidden_states_times_the_output_matrix():
    for shape in (TINY, SHAPES["mistral"]):
        network = make_network(shape)
        tokens_BT = torch.randint(0, 50, (2, 6))
        hidden_BTD = network.compute_hidden(tokens_BT)
        assert_close(network(tokens_BT), F.linear(hidden_BTD, network.output_weight_VD))
        assert (network.output_weight_VD is network.embedding.weight) == shape.tie_embeddings


def test_dropout_acts_in_training_only():
    network = make_network(dataclasses.replace(TINY, dropout=0.5))
    tokens_BT = torch.randint(0, 50, (2, 6))
    assert not torch.equal(network(tokens_BT), network(tokens_BT))
    network.eval()
    assert_close(network(tokens_BT), make_network(TINY)(tokens_BT))


def test_dropout_follows_the_seed():
    network = make_network(dataclasses.replace(TINY, dropout=0.5, attention_dropout=0.5))
    tokens_BT = torch.randint(0, 50, (2, 6))
    torch.manual_seed(3)
    first = network(tokens_BT)
    torch.manual_seed(3)
    assert torch.equal(first, network(tokens_BT))


def test_weights_start_at_the_stated_widths():
    shape = dataclasses.replace(
        TINY, vocab_size=400, hidden_size=128, intermediate_size=300, num_layers=8, init_std=0.02
    )
    torch.manual_seed(0)
    for name, parameter in DecoderNetwork(shape).named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        narrow = name.endswith(("attention.output.weight", "mlp.down.weight"))
        width = 0.02 / math.sqrt(16) if narrow else 0.02
        assert_close(parameter.std().item(), width, rtol=0.05, atol=0, msg=name)


@every_shape
def test_meta_construction_then_reset_gives_the_same_weights(shape):
    torch.manual_seed(5)
    direct = DecoderNetwork(shape)
    with torch.device("meta"):
        later = DecoderNetwork(shape)
    later.to_empty(device="cpu")
    torch.manual_seed(5)
    later.reset_parameters()
    for name, parameter in direct.named_parameters():
        assert torch.equal(parameter, later.get_parameter(name)), name
    tokens_BT = torch.randint(0, 50, (1, 5))
    assert torch.equal(direct(tokens_BT), later(tokens_BT))


@every_shape
def test_parameters_are_counted_without_building_them(shape):
    expected = sum(parameter.numel() for parameter in DecoderNetwork(shape).parameters())
    assert shape.count_parameters() == expected


def test_every_parameter_has_one_split_and_every_pattern_a_parameter():
    untied = dataclasses.replace(SHAPES["qwen3"], tie_embeddings=False)
    used = set()
    for name, parameter in DecoderNetwork(untied).named_parameters():
        dims = find_split_dims(name)
        assert all(dim < parameter.dim() for dim in dims.values()), name
        used.add(".".join("*" if part.isdigit() else part for part in name.split(".")))
    assert used == set(SPLIT_DIMS)


def test_split_of_an_unknown_parameter_is_refused():
    with pytest.raises(KeyError, match=r"layers\.3\.mlp\.gate2\.weight: no pattern"):
        find_split_dims("layers.3.mlp.gate2.weight")


def test_kernel_of_a_network_is_reported():
    network = DecoderNetwork(dataclasses.replace(TINY, attention_dropout=0.1))
    assert network.attention_kernel(8) == "cpu math"
    network.eval()
    assert network.attention_kernel(8) == "cpu flash"
    assert network.attention_kernel(8, packed=True) == "cpu flash"
    assert network.describe_attention(dtype=torch.bfloat16) == "attention: cpu flash"


def test_length_of_a_sample_is_checked():
    config = DecoderModelConfig(network=TINY, sample_tokens=-1)
    assert list(config.check()) == ["sample_tokens=-1: must be at least 0"]


def test_autocast_gives_bfloat16_logits_close_to_float32():
    network = make_network(SHAPES["qwen3"], torch.float32)
    _, tokens_BT, segments_BT = make_packed()
    expected = network(tokens_BT, segments_BT=segments_BT)
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(tokens_BT, segments_BT=segments_BT)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_all_faults_of_a_shape_are_reported_at_once():
    bad = dataclasses.replace(
        TINY,
        num_kv_heads=3,
        norm_eps=0.0,
        dropout=1.0,
        rope_scaling=RopeScalingConfig(kind="llama3", factor=0.5),
    )
    with pytest.raises(ConfigError) as caught:
        DecoderNetwork(bad)
    assert caught.value.faults == [
        "network.norm_eps=0.0: must be a finite number above 0",
        "network.dropout=1.0: must be at least 0 and below 1",
        "network.rope_scaling.factor=0.5: must be a finite number, at least 1",
        "network.rope_scaling.low_frequency_factor=null: kind=llama3 needs a number here",
        "network.rope_scaling.high_frequency_factor=null: kind=llama3 needs a number here",
        "network.rope_scaling.original_max_positions=null: kind=llama3 needs a number here",
        "network.num_kv_heads=3: must divide num_heads=4",
    ]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"num_layers": 0}, "num_layers=0: must be at least 1"),
        ({"sliding_window": 0}, "sliding_window=0: must be at least 1"),
        (
            {"num_heads": 5, "num_kv_heads": 5},
            "num_heads=5: must divide hidden_size=24, or set head_dim",
        ),
        ({"head_dim": 7}, "head_dim=7: must be even, rotary positions turn channels in pairs"),
    ],
)
def test_faults_of_a_shape_name_the_field(change, fault):
    assert list(dataclasses.replace(TINY, **change).check()) == [fault]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"kind": "linear"},
            "low_frequency_factor=1.0: has no effect with kind=linear; leave it out",
        ),
        (
            {"high_frequency_factor": 0.5},
            "low_frequency_factor=1.0: must be below high_frequency_factor=0.5",
        ),
        ({"original_max_positions": 0}, "original_max_positions=0: must be above 0"),
    ],
)
def test_faults_of_rope_scaling_name_the_field(change, fault):
    good = RopeScalingConfig(
        kind="llama3",
        factor=8.0,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_max_positions=32,
    )
    assert list(good.check()) == []
    assert fault in list(dataclasses.replace(good, **change).check())
