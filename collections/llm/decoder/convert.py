"""Configuration and weights to and from the classes of Hugging Face transformers, both ways.

Their rotary embedding pairs channel i with i + D/2, as ours does; so tensors keep their values and only names change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_like.core.errors import CheckpointError, ConfigError

from .config import DecoderConfig, RopeScalingConfig
from .network import DecoderNetwork

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""``model_type`` -> class of transformers."""

HF_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.attention.query": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.key": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.value": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.output": "model.layers.*.self_attn.o_proj",
    "layers.*.attention.query_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.key_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.mlp.gate": "model.layers.*.mlp.gate_proj",
    "layers.*.mlp.up": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
}
"""Our module -> theirs; ``*`` is the number of the layer."""

OUR_NAMES = {theirs: ours for ours, theirs in HF_NAMES.items()}

TIED_OUTPUT = "lm_head.weight"
"""A copy of the embedding that some folders of tied models hold."""


def to_hf_name(name: str) -> str:
    """Our name of a parameter -> that of transformers; an unknown one is returned as it is."""
    return _rename(name, HF_NAMES)


def from_hf_name(name: str) -> str:
    """The name that transformers gives a parameter -> ours; an unknown one is returned as it is."""
    return _rename(name, OUR_NAMES)


def _rename(name: str, modules: Mapping[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    number = re.search(r"(?<=\.)\d+(?=\.)", f".{module}.")
    pattern = re.sub(r"\.\d+\.", ".*.", module, count=1)
    if pattern not in modules:
        return name
    renamed = modules[pattern]
    return f"{renamed.replace('*', number.group()) if number else renamed}.{kind}"


def list_shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    """The canonical names of all parameters and their shapes; costs no memory."""
    with torch.device("meta"):
        network = DecoderNetwork(config)
    return {name: parameter.shape for name, parameter in network.state_dict().items()}


def check_hf_names(
    shapes: Mapping[str, Iterable[int]], config: DecoderConfig, *, source: str
) -> None:
    """Refuses weights of transformers that are not those of the configuration.

    Args:
        shapes: Their names and shapes.
        config: What they should be.
        source: Where they come from, for the message.

    Raises:
        CheckpointError: Names are missing or unexpected, or shapes differ; all are listed.
    """
    expected = {to_hf_name(name): shape for name, shape in list_shapes(config).items()}
    found = {
        name: torch.Size(shape) for name, shape in shapes.items() if not _is_redundant(name, config)
    }
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    wrong = [
        f"  {name}: {list(found[name])}, the configuration says {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if missing or unexpected or wrong:
        message = f"{source}: the weights do not fit the configuration"
        raise CheckpointError("\n".join([message, *wrong]), missing=missing, unexpected=unexpected)


def _is_redundant(name: str, config: DecoderConfig) -> bool:
    # Old folders hold the rotary frequencies, which follow from the configuration.
    return name.endswith("rotary_emb.inv_freq") or (name == TIED_OUTPUT and config.tie_embeddings)


def state_from_hf(
    state: Mapping[str, Tensor], config: DecoderConfig, *, source: str = "state"
) -> dict[str, Tensor]:
    """Weights under the names of transformers -> under ours; the tensors are the same objects.

    Args:
        state: What their ``state_dict`` gives or their folders hold.
        config: The shape, from :func:`config_from_hf`.
        source: Where the weights come from, for messages.

    Raises:
        CheckpointError: Names are missing or unexpected, shapes differ, or a tied model has an output matrix that is
            not its embedding.
    """
    check_hf_names({name: tensor.shape for name, tensor in state.items()}, config, source=source)
    if config.tie_embeddings:
        check_tied_output(state, source=source)
    return {
        from_hf_name(name): tensor
        for name, tensor in state.items()
        if not _is_redundant(name, config)
    }


def check_tied_output(state: Mapping[str, Tensor], *, source: str) -> None:
    """Refuses a tied model whose stored output matrix, if there is one, is not its embedding.

    Raises:
        CheckpointError: They differ.
    """
    output, embedding = state.get(TIED_OUTPUT), state[to_hf_name("embedding.weight")]
    if output is not None and not torch.equal(output, embedding):
        raise CheckpointError(
            f"{source}: {TIED_OUTPUT} differs from model.embed_tokens.weight, but tie_word_embeddings is true; "
            "set it to false in config.json to keep both"
        )


def state_to_hf(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Weights under our names -> under those of transformers; the tensors are the same objects.

    Raises:
        CheckpointError: The weights are not those of ``config``.
    """
    renamed = {to_hf_name(name): tensor for name, tensor in state.items()}
    check_hf_names({name: tensor.shape for name, tensor in renamed.items()}, config, source="state")
    return renamed


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The ``config.json`` of the family that can express a shape.

    Rotary settings are spelt as transformers 4 did; version 5 reads both spellings. Dropout on the residual stream
    has no counterpart there and is left out.

    Raises:
        ConfigError: No family has this combination.
    """
    family = _choose_family(config)
    hf: dict[str, Any] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": config.attention_dropout,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling_to_hf(config.rope_scaling),
        "use_cache": True,
    }
    # Qwen2's own configuration has no such field, but its class reads it.
    if family != "qwen2" or config.head_size * config.num_heads != config.hidden_size:
        hf["head_dim"] = config.head_size
    if family in ("llama", "qwen3"):
        hf["attention_bias"] = config.qkv_bias
    if family == "llama":
        hf["mlp_bias"] = False
    if family == "mistral":
        hf["sliding_window"] = config.sliding_window
    if family in ("qwen2", "qwen3"):
        windowed = config.sliding_window is not None
        hf["use_sliding_window"] = windowed
        hf["sliding_window"] = config.sliding_window
        # Layers from this one on are windowed: all, or none.
        hf["max_window_layers"] = 0 if windowed else config.num_layers
    return hf


def _choose_family(config: DecoderConfig) -> Literal["llama", "mistral", "qwen2", "qwen3"]:
    biases = (config.qkv_bias, config.output_bias)
    if config.qk_norm and config.qkv_bias == config.output_bias:
        return "qwen3"
    if not config.qk_norm and biases == (True, False):
        return "qwen2"
    plain = config.sliding_window is None and config.hidden_size % config.num_heads == 0
    if not config.qk_norm and config.qkv_bias == config.output_bias and plain:
        return "llama"
    if not config.qk_norm and biases == (False, False):
        return "mistral"
    raise ConfigError(
        [
            f"qk_norm={config.qk_norm}, qkv_bias={config.qkv_bias}, output_bias={config.output_bias}, "
            f"sliding_window={config.sliding_window}: no family of transformers has this combination "
            "(llama: both biases or none, no window; mistral: no bias; qwen2: qkv_bias alone; "
            "qwen3: qk_norm with both biases or none)"
        ]
    )


def _rope_scaling_to_hf(scaling: RopeScalingConfig | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    hf: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        hf["low_freq_factor"] = scaling.low_frequency_factor
        hf["high_freq_factor"] = scaling.high_frequency_factor
        hf["original_max_position_embeddings"] = scaling.original_max_positions
    return hf


def config_from_hf(hf: Mapping[str, Any], *, source: str = "config.json") -> DecoderConfig:
    """The shape that a ``config.json`` describes; what it leaves out has the default of its family.

    Args:
        hf: The parsed file.
        source: Where it comes from, for messages.

    Raises:
        ConfigError: Something in it is missing or not supported; everything is listed at once.
    """
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ConfigError([f"{source}: model_type={family!r}: supported are {', '.join(FAMILIES)}"])
    faults = [f"{name}: missing" for name in _required(family) if hf.get(name) is None]
    faults += _list_unsupported(hf, family)
    theta, scaling = _rope_from_hf(hf, faults)
    window = _window_from_hf(hf, family, faults)
    if faults:
        raise ConfigError([f"{source}: {fault}" for fault in faults])
    heads, width = hf["num_attention_heads"], hf["hidden_size"]
    default_head_dim = 128 if family == "qwen3" else None
    head_dim = hf.get("head_dim", default_head_dim)
    kv_heads = hf.get("num_key_value_heads")
    config = DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=width,
        num_layers=hf["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        head_dim=None if head_dim is None or head_dim * heads == width else head_dim,
        intermediate_size=hf["intermediate_size"],
        max_positions=hf["max_position_embeddings"],
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=window,
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2" or bool(hf.get("attention_bias")),
        output_bias=family != "qwen2" and bool(hf.get("attention_bias")),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_dropout=hf.get("attention_dropout") or 0.0,
        init_std=hf.get("initializer_range", 0.02),
    )
    faults = [f"{source}: {fault}" for fault in config.check()]
    if faults:
        raise ConfigError(faults)
    return config


def _required(family: str) -> list[str]:
    names = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    names += ["intermediate_size", "max_position_embeddings"]
    # Llama without grouped heads leaves it out; the other classes have arbitrary numbers as defaults.
    return names if family == "llama" else [*names, "num_key_value_heads"]


def _list_unsupported(hf: Mapping[str, Any], family: str) -> list[str]:
    faults = []
    if hf.get("hidden_act", "silu") != "silu":
        faults.append(f"hidden_act={hf['hidden_act']!r}: only 'silu' is supported")
    if hf.get("mlp_bias"):
        faults.append("mlp_bias=True: biases in the feed-forward blocks are not supported")
    if hf.get("attention_bias") and family == "mistral":
        faults.append("attention_bias=True: a Mistral model has no biases")
    if hf.get("quantization_config") is not None:
        faults.append(
            "quantization_config: quantised weights are not supported; dequantise them first"
        )
    return faults


def _rope_from_hf(
    hf: Mapping[str, Any], faults: list[str]
) -> tuple[float, RopeScalingConfig | None]:
    """Reads ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (4)."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    theta = float(rope.pop("rope_theta", hf.get("rope_theta", 10000.0)))
    part = rope.pop("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if part != 1.0:
        faults.append(f"partial_rotary_factor={part}: all channels must be turned")
    nested = sorted(name for name, value in rope.items() if isinstance(value, Mapping))
    if nested:
        faults.append(f"rope_parameters by kind of layer ({', '.join(nested)}): not supported")
        return theta, None
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        faults.append(f"rope_type={kind!r}: supported are 'default', 'linear', 'llama3'")
        return theta, None
    if rope.get("factor") is None:
        faults.append(f"rope factor: missing, rope_type={kind!r} needs it")
        return theta, None
    scaling = RopeScalingConfig(kind=kind, factor=float(rope["factor"]))
    if kind == "llama3":
        scaling.low_frequency_factor = rope.get("low_freq_factor")
        scaling.high_frequency_factor = rope.get("high_freq_factor")
        scaling.original_max_positions = rope.get(
            "original_max_position_embeddings", hf.get("max_position_embeddings")
        )
    return theta, scaling


def _window_from_hf(hf: Mapping[str, Any], family: str, faults: list[str]) -> int | None:
    """The window of all layers; a mixture of windowed and full layers is a fault."""
    if family == "llama":
        return None
    window: int | None = hf.get("sliding_window", 4096)
    if family == "mistral" or window is None:
        return window
    num_layers = hf.get("num_hidden_layers") or 0
    kinds = hf.get("layer_types")
    if kinds is None:
        first = hf.get("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if not hf.get("use_sliding_window", False) or set(kinds) <= {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        faults.append(f"layers of several kinds ({counts}): all must be windowed, or none")
    return window
