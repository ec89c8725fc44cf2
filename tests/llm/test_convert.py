# Shapes: B = rows, T = tokens, V = vocabulary.
import dataclasses
import json

import pytest
import torch
from torch.testing import assert_close

from nemo_like.collections.llm.decoder import DecoderConfig, DecoderNetwork, RopeScalingConfig
from nemo_like.collections.llm.decoder.convert import (
    config_from_hf,
    config_to_hf,
    from_hf_name,
    state_from_hf,
    state_to_hf,
    to_hf_name,
)
from nemo_like.core.errors import CheckpointError, ConfigError
from nemo_like.core.extras import require

VOCAB = 61
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# One of each: heads grouped or not, tied or not, window, biases, norms, rotary scaling, free head size.
CASES = {
    "llama": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"num_key_value_heads": 4, "attention_bias": True}),
    "llama-llama3": ("Llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
    "mistral-free-heads": (
        "Mistral",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": None,
            "head_dim": 10,
        },
    ),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 0,
        },
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-5}),
    "qwen3-biases": (
        "Qwen3",
        {
            "num_key_value_heads": 1,
            "head_dim": 8,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
every_case = pytest.mark.parametrize(("family", "options"), CASES.values(), ids=CASES)


def make_reference(family, options):
    transformers = require("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        max_position_embeddings=64,
        **{"num_attention_heads": 4, **options},
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        std = 1.0 if "norm" in name or name.endswith("bias") else 0.2
        torch.nn.init.normal_(parameter, std=std)
    return model


def make_ours(reference):
    config = config_from_hf(reference.config.to_dict())
    network = DecoderNetwork(config)
    network.load_state_dict(state_from_hf(reference.state_dict(), config))
    return network


@every_case
def test_logits_and_gradients_equal_those_of_transformers_on_ragged_rows(family, options):
    reference = make_reference(family, options)
    network = make_ours(reference)
    tokens_BT = torch.randint(0, VOCAB, (3, 24))
    real_BT = torch.arange(24) < torch.tensor([24, 17, 6])[:, None]
    tokens_BT = torch.where(real_BT, tokens_BT, 0)
    # transformers is told where the padding is; ours needs no mask, because padding lies in the future.
    expected = reference(tokens_BT, attention_mask=real_BT.long(), use_cache=False).logits[real_BT]
    logits = network(tokens_BT)[real_BT]
    assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    targets = torch.randint(0, VOCAB, (len(logits),))
    torch.nn.functional.cross_entropy(expected, targets, reduction="sum").backward()
    torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
    for name, parameter in network.named_parameters():
        grad = reference.get_parameter(to_hf_name(name)).grad
        assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@every_case
def test_round_trip_gives_identical_tensors_and_configuration(family, options):
    reference = make_reference(family, options)
    state = reference.state_dict()
    config = config_from_hf(reference.config.to_dict())
    back = state_to_hf(state_from_hf(state, config), config)
    if config.tie_embeddings:
        assert state.pop("lm_head.weight") is not None
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)

    hf = json.loads(json.dumps(config_to_hf(config)))
    assert config_from_hf(hf) == config
    theirs, ours = reference.config.to_dict(), type(reference.config)(**hf).to_dict()
    # The first layer with a window says nothing where there is none; layer_types, compared here, says it all.
    for name in ("architectures", "dtype", "max_window_layers"):
        theirs.pop(name, None), ours.pop(name, None)
    assert ours == theirs


def test_every_name_goes_there_and_back():
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=8,
        num_layers=11,
        num_heads=2,
        intermediate_size=8,
        max_positions=8,
        qk_norm=True,
        qkv_bias=True,
        output_bias=True,
        tie_embeddings=False,
    )
    names = list(DecoderNetwork(config).state_dict())
    renamed = [to_hf_name(name) for name in names]
    assert [from_hf_name(name) for name in renamed] == names
    assert "model.layers.10.self_attn.q_norm.weight" in renamed
    assert (
        from_hf_name("model.layers.1.mlp.experts.0.weight") == "model.layers.1.mlp.experts.0.weight"
    )


def test_the_family_that_can_express_a_shape_is_chosen():
    config = DecoderConfig(
        vocab_size=8, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8, max_positions=8
    )
    families = {
        "llama": [{}, {"qkv_bias": True, "output_bias": True}, {"head_dim": 6}],
        "mistral": [{"sliding_window": 4}, {"num_heads": 3, "head_dim": 4}],
        "qwen2": [{"qkv_bias": True}, {"qkv_bias": True, "sliding_window": 4, "head_dim": 6}],
        "qwen3": [{"qk_norm": True}, {"qk_norm": True, "qkv_bias": True, "output_bias": True}],
    }
    for family, changes in families.items():
        for change in changes:
            shape = dataclasses.replace(config, **change)
            hf = config_to_hf(shape)
            assert hf["model_type"] == family, change
            assert config_from_hf(hf) == shape


PUBLISHED_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def test_old_spelling_of_rotary_settings_is_read():
    config = config_from_hf(PUBLISHED_LLAMA)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScalingConfig(
        kind="llama3",
        factor=8.0,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_max_positions=8192,
    )
    assert config.count_parameters() == 8_030_261_248
    older = config_from_hf(PUBLISHED_LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert older.rope_scaling == RopeScalingConfig(kind="linear", factor=2.0)


def test_what_a_family_leaves_out_has_its_default():
    small = {name: PUBLISHED_LLAMA[name] for name in list(PUBLISHED_LLAMA)[1:8]}
    mistral = config_from_hf({"model_type": "mistral", **small})
    assert (mistral.sliding_window, mistral.norm_eps, mistral.rope_theta) == (4096, 1e-6, 10000.0)
    assert config_from_hf({"model_type": "qwen2", **small}).sliding_window is None
    qwen3 = config_from_hf({"model_type": "qwen3", **small, "num_attention_heads": 16})
    assert qwen3.head_dim == 128
    del small["num_key_value_heads"]
    assert config_from_hf({"model_type": "llama", **small}).kv_heads == 32


def test_everything_unsupported_is_listed_at_once():
    bad = PUBLISHED_LLAMA | {
        "model_type": "qwen3",
        "hidden_size": None,
        "hidden_act": "gelu",
        "mlp_bias": True,
        "quantization_config": {"bits": 4},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5},
        "use_sliding_window": True,
        "sliding_window": 128,
        "max_window_layers": 20,
    }
    with pytest.raises(ConfigError) as caught:
        config_from_hf(bad, source="here/config.json")
    assert caught.value.faults == [
        "here/config.json: hidden_size: missing",
        "here/config.json: hidden_act='gelu': only 'silu' is supported",
        "here/config.json: mlp_bias=True: biases in the feed-forward blocks are not supported",
        "here/config.json: quantization_config: quantised weights are not supported; dequantise them first",
        "here/config.json: partial_rotary_factor=0.5: all channels must be turned",
        "here/config.json: rope_type='yarn': supported are 'default', 'linear', 'llama3'",
        "here/config.json: layers of several kinds (20 full_attention, 12 sliding_attention): "
        "all must be windowed, or none",
    ]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"model_type": "gemma2"},
            "model_type='gemma2': supported are llama, mistral, qwen2, qwen3",
        ),
        (
            {"model_type": "mistral", "attention_bias": True},
            "attention_bias=True: a Mistral model has no biases",
        ),
        (
            {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            r"rope_parameters by kind of layer \(full_attention\): not supported",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope factor: missing, rope_type='linear' needs it"),
        ({"num_key_value_heads": 5}, "num_kv_heads=5: must divide num_heads=32"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
            "rope_scaling.low_frequency_factor=null: kind=llama3 needs a number here",
        ),
    ],
)
def test_unsupported_settings_are_refused(change, fault):
    with pytest.raises(ConfigError, match=f"config.json: {fault}"):
        config_from_hf(PUBLISHED_LLAMA | change)


def test_a_shape_of_no_family_is_refused():
    config = config_from_hf(PUBLISHED_LLAMA)
    for change in (
        {"output_bias": True},
        {"qk_norm": True, "qkv_bias": True},
        {"qkv_bias": True, "output_bias": True, "sliding_window": 8},
    ):
        with pytest.raises(ConfigError, match=f"qk_norm={'qk_norm' in change}, .*no family"):
            config_to_hf(dataclasses.replace(config, **change))


def test_weights_that_do_not_fit_are_all_listed():
    reference = make_reference("Llama", {"tie_word_embeddings": True})
    config = config_from_hf(reference.config.to_dict())
    state = reference.state_dict()
    del state["model.norm.weight"], state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    state["model.embed_tokens.weight"] = torch.zeros(60, 32)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    with pytest.raises(
        CheckpointError,
        match=r"here: the weights do not fit(.|\n)*embed_tokens.weight: \[60, 32\], the configuration says \[61, 32\]",
    ) as caught:
        state_from_hf(state, config, source="here")
    assert sorted(caught.value.missing) == [
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ]
    assert caught.value.unexpected == ["model.layers.0.self_attn.q_proj.bias"]


def test_a_tied_model_with_another_output_matrix_is_refused():
    reference = make_reference("Llama", {"tie_word_embeddings": True})
    config = config_from_hf(reference.config.to_dict())
    state = dict(reference.state_dict())
    assert "output.weight" not in state_from_hf(state, config)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(
        CheckpointError, match=r"here: lm_head.weight differs .*tie_word_embeddings is true"
    ):
        state_from_hf(state, config, source="here")
