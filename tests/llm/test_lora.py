"""Adapters: what they compute, what they train, and what peft makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from nemo_like.collections.llm.adapters import Lora, open_adapter, save_peft_folder
from nemo_like.collections.llm.decoder import DecoderConfig, DecoderModel, DecoderNetwork
from nemo_like.collections.llm.decoder.model import open_source
from nemo_like.collections.llm.hf_folder import save_hf_folder
from nemo_like.core.errors import CheckpointError, ConfigError
from nemo_like.core.extras import require
from nemo_like.nn.linear import Linear
from nemo_like.nn.lora import LoraLinear, merge_lora
from nemo_like.nn.quantized_linear import QuantizedLinear, dequantize, quantize

SHAPE = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
    max_positions=32,
    init_std=0.1,
)
TOKENS_BT = torch.arange(22).view(2, 11) * 7 % 64


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base") / "hf"
    return save_hf_folder(folder, SHAPE, DecoderNetwork(SHAPE).state_dict())


def make_model(base: Path, **options: Any) -> DecoderModel:
    torch.manual_seed(1)
    return DecoderModel(init_from=str(base), adapter=Lora(**{"rank": 4, **options})).eval()


def disturb(model: DecoderModel) -> DecoderModel:
    """Adapters as after some training."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shift = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data += shift if not name.endswith("magnitude") else shift.abs()
    return model


def adapters_of(model: DecoderModel) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("network."): tensor for name, tensor in model.checkpoint_tensors().items()
    }


def save_adapter(model: DecoderModel, folder: Path) -> Path:
    assert model.adapter is not None
    assert model.base is not None
    return save_peft_folder(folder, model.adapter, SHAPE, adapters_of(model), base=model.base)


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "some layers": {"target_modules": ["q_proj", "layers.1.mlp.*"]},
    "rslora": {"rslora": True, "rank": 6, "alpha": 5.0},
    "dora": {"dora": True},
}


@pytest.mark.parametrize("options", [*KINDS.values(), {"dora": True, "dropout": 0.5}])
def test_an_adapter_at_its_start_computes_exactly_the_base(
    base: Path, options: dict[str, Any]
) -> None:
    expected = DecoderModel.load(base).network(TOKENS_BT)
    assert torch.equal(make_model(base, **options).network(TOKENS_BT), expected)


def test_the_first_matrix_is_drawn_as_peft_draws_it(base: Path) -> None:
    a = make_model(base, rank=64).network.layers[0].attention.query.lora_a
    bound = 1 / 32**0.5
    assert a.abs().max() <= bound
    assert a.abs().max() > 0.95 * bound
    assert torch.equal(make_model(base, rank=64).network.layers[0].attention.query.lora_a, a)


@pytest.mark.parametrize("dora", [False, True])
def test_the_layer_is_the_formula_of_its_paper_in_float64(dora: bool) -> None:
    torch.manual_seed(0)
    layer = LoraLinear(
        Linear(5, 3, bias=True, init_std=1.0), rank=2, scaling=1.5, dora=dora
    ).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, 5, dtype=torch.float64)
    weight = layer.base.weight + 1.5 * layer.lora_b @ layer.lora_a
    if dora:
        weight = layer.magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True)
    # The norm of DoRA is computed in float32.
    torch.testing.assert_close(layer(x), x @ weight.T + layer.base.bias, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.merge(), weight, rtol=1e-10, atol=1e-10)


def test_only_adapters_are_trained_and_saved(base: Path) -> None:
    model = make_model(base, dora=True)
    trained = {name for name, it in model.named_parameters() if it.requires_grad}
    assert trained == set(model.checkpoint_tensors())
    assert {name.rpartition(".")[2] for name in trained} == {"lora_a", "lora_b", "magnitude"}
    assert len(trained) == 3 * 7 * SHAPE.num_layers
    model.train()
    model.network(TOKENS_BT).square().sum().backward()
    assert {name for name, it in model.named_parameters() if it.grad is not None} == trained


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj"], ["layers.0.attention.query", "layers.1.attention.query"]),
        (["query"], ["layers.0.attention.query", "layers.1.attention.query"]),
        (["layers.1.mlp.*"], [f"layers.1.mlp.{name}" for name in ("gate", "up", "down")]),
        (["model.layers.0.self_attn.[kv]_proj"], ["layers.0.attention.key", "layers.0.attention.value"]),
        (["attention.output", "o_proj"], ["layers.0.attention.output", "layers.1.attention.output"]),
    ],
)  # fmt: skip
def test_targets_are_named_as_here_or_as_in_transformers(
    targets: list[str], expected: list[str]
) -> None:
    assert Lora(target_modules=targets).find_targets(SHAPE) == expected


def test_targets_that_do_not_exist_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"'q_poj' names no matrix.*did you mean 'q_proj'") as it:
        Lora(target_modules=["q_poj", "up", "lm_head"]).find_targets(SHAPE)
    assert len(it.value.faults) == 2
    assert "'lm_head'" in it.value.faults[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "adapter.rank=0"),
        ({"alpha": -1.0}, "adapter.alpha=-1.0"),
        ({"dropout": 1.0}, "adapter.dropout=1.0"),
        ({"target_modules": []}, "target_modules=\\[\\]: names no layer"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lora(**options)


def test_an_adapter_without_a_base_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="init_from: is required with an adapter"):
        DecoderModel(network=SHAPE, adapter=Lora())
    other = DecoderConfig(**{**vars(SHAPE), "num_layers": 1})
    with pytest.raises(ConfigError, match="network: is not the shape of init_from"):
        DecoderModel(network=other, init_from=str(base), adapter=Lora())


def test_megatron_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="adapter: Megatron splits matrices"):
        make_model(base).build_megatron(None)


# With peft.

PEFT_WARNS = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")
"""peft reads an attribute that transformers is about to remove."""


@PEFT_WARNS
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_peft_loads_an_adapter_with_equal_logits(
    base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    transformers, peft = require("transformers"), require("peft")
    model = disturb(make_model(base, **options))
    folder = save_adapter(model, tmp_path / "adapter")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(theirs, folder).eval()
    plain = DecoderModel.load(base).network(TOKENS_BT)
    ours = model.network(TOKENS_BT)
    assert (ours - plain).abs().max() > 0.1
    assert_close(ours, theirs(TOKENS_BT).logits, rtol=1e-5, atol=1e-5)


@PEFT_WARNS
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {"target_modules": "all-linear"}),
        ({"rslora": True}, {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
        ({"dora": True}, {"target_modules": r"model\.layers\.\d+\.mlp\..*_proj", "use_dora": True}),
        ({}, {"target_modules": ["v_proj"], "layers_to_transform": [1]}),
    ],
)
def test_an_adapter_of_peft_loads_here_with_equal_logits(
    base: Path, tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    transformers, peft = require("transformers"), require("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **theirs)
    model = peft.get_peft_model(model, config).eval()
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data += torch.rand_like(parameter) * 0.1 * (1 if "magnitude" in name else 2)
    model.save_pretrained(tmp_path / "adapter")
    found = open_adapter(tmp_path / "adapter", SHAPE)
    lora = Lora(
        rank=4, alpha=8.0, target_modules=found.lora.target_modules,
        init_from=str(tmp_path / "adapter"), **ours,
    )  # fmt: skip
    loaded = DecoderModel(init_from=str(base), adapter=lora).eval()
    expected = model(TOKENS_BT).logits
    assert_close(loaded.network(TOKENS_BT), expected, rtol=1e-5, atol=1e-5)
    merged = open_source(tmp_path / "adapter", base=base)
    network = DecoderNetwork(SHAPE)
    merged.fill(network)
    assert_close(network(TOKENS_BT), expected, rtol=1e-5, atol=1e-5)


def edit_weights(folder: Path, change: Any) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return save_adapter(disturb(make_model(base)), tmp_path / "adapter")


def test_missing_and_renamed_tensors_are_listed(adapter: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["renamed"] = tensors.pop(FIRST)
        del tensors[FIRST.replace("layers.0", "layers.1")]

    edit_weights(adapter, rename)
    with pytest.raises(CheckpointError, match="2 missing, 1 unexpected") as it:
        open_adapter(adapter, SHAPE)
    assert it.value.missing == [FIRST, FIRST.replace("layers.0", "layers.1")]
    assert it.value.unexpected == ["renamed"]


def test_a_tensor_of_another_shape_is_named(adapter: Path) -> None:
    edit_weights(adapter, lambda tensors: tensors.update({FIRST: torch.zeros(3, 32)}))
    with pytest.raises(CheckpointError, match=r"layers.0.attention.query.lora_a: \[3, 32\]"):
        open_adapter(adapter, SHAPE)


def test_a_truncated_file_is_refused(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: damaged"):
        open_adapter(adapter, SHAPE)
    file.unlink()
    (adapter / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a pickled adapter_model.bin is never opened"):
        open_adapter(adapter, SHAPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=\\[.lm_head.\\]: is not supported"),
        ({"rank_pattern": {"q": 1}}, "rank_pattern=.*: is not supported"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': changes the base"),
        ({"r": None}, "r: is missing"),
        ({"target_modules": "nothing"}, "target_modules='nothing' matches no layer"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    adapter: Path, changes: dict[str, Any], message: str
) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        open_adapter(adapter, SHAPE)


def test_a_folder_without_or_with_a_broken_configuration_is_refused(
    adapter: Path, base: Path
) -> None:
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config.json: no JSON"):
        open_adapter(adapter, SHAPE)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list, an object was expected"):
        open_adapter(adapter, SHAPE)


def test_an_adapter_is_never_written_over(base: Path, adapter: Path) -> None:
    with pytest.raises(CheckpointError, match="adapter: exists already"):
        save_adapter(make_model(base), adapter)


def test_another_base_is_refused_by_its_hash(base: Path, tmp_path: Path, adapter: Path) -> None:
    torch.manual_seed(5)
    other = save_hf_folder(tmp_path / "other", SHAPE, DecoderNetwork(SHAPE).state_dict())
    with pytest.raises(CheckpointError, match="was trained on another base") as it:
        open_source(adapter, base=other)
    for text in (str(base), str(other), open_source(base).identify().sha256):
        assert text is not None
        assert text in str(it.value)
    lora = Lora(rank=4, init_from=str(adapter))
    with pytest.raises(CheckpointError, match="was trained on another base"):
        DecoderModel(init_from=str(other), adapter=lora)


def test_the_hash_of_a_base_is_that_of_its_file(base: Path) -> None:
    import hashlib

    expected = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    assert open_source(base).identify().sha256 == expected


def test_an_adapter_whose_base_is_not_here_says_what_to_give(adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    config = {**json.loads(file.read_text()), "base_model_name_or_path": "org/model"}
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"adapter of the base 'org/model'.*--base FOLDER"):
        open_source(adapter)


def test_another_adapter_to_start_from_is_refused_with_its_numbers(
    base: Path, adapter: Path
) -> None:
    lora = Lora(rank=8, alpha=1.0, target_modules=["query"], init_from=str(adapter))
    with pytest.raises(CheckpointError, match=r"adapter.rank=8: it is 4 there") as it:
        DecoderModel(init_from=str(base), adapter=lora)
    assert "adapter.target_modules=['query']: they are ['all-linear'] there" in str(it.value)


# Merging.


@pytest.mark.parametrize(
    "options", [*KINDS.values(), {"quantize": "nf4"}, {"quantize": "int8", "dora": True}]
)
def test_merged_is_adapted(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    model = disturb(make_model(base, **options))
    assert model.adapter is not None
    read = open_source(base).read
    names = list(DecoderNetwork(SHAPE).state_dict())
    merged = DecoderNetwork(SHAPE)
    merged.load_state_dict(model.adapter.read_merged(SHAPE, read, adapters_of(model), names))
    tolerance = 1e-4 if "quantize" in options else 1e-5
    adapted = model.network(TOKENS_BT)
    assert_close(merged(TOKENS_BT), adapted, rtol=tolerance, atol=tolerance)
    if "quantize" in options:
        # Onto the base as it was before it was packed it would be another model.
        plain = Lora(**{**options, "rank": 4, "quantize": None})
        wrong = DecoderNetwork(SHAPE)
        wrong.load_state_dict(plain.read_merged(SHAPE, read, adapters_of(model), names))
        assert (wrong(TOKENS_BT) - adapted).abs().max() > 1e-2


def test_merging_keeps_float64() -> None:
    weight, a, b = (torch.randn(size, dtype=torch.float64) for size in ((3, 5), (2, 5), (3, 2)))
    torch.testing.assert_close(merge_lora(weight, a, b, scaling=2.0), weight + 2 * b @ a)


# The packed base.


@pytest.mark.parametrize(("kind", "error", "bits"), [("nf4", 0.11, 4.6), ("int8", 0.02, 8.6)])
@pytest.mark.parametrize("size", [(48, 32), (33, 7), (300, 257)])
def test_packing_is_close_and_small(
    kind: Any, error: float, bits: float, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(size)
    packed = quantize(weight, kind)
    assert packed.dtype == torch.uint8
    assert packed.numel() * 8 / weight.numel() < bits + 64 / weight.numel() * 8
    back = dequantize(packed, weight.shape, kind)
    assert ((back - weight).norm() / weight.norm()) < error
    assert torch.equal(quantize(weight, kind), packed)
    assert torch.equal(dequantize(packed, weight.shape, kind), back)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_packed_layer_is_the_linear_layer_of_what_it_stands_for(kind: Any) -> None:
    torch.manual_seed(0)
    layer = QuantizedLinear(20, 12, kind=kind, bias=True)
    layer.packed.copy_(quantize(torch.randn(12, 20), kind))
    torch.nn.init.normal_(layer.bias)
    x, twin = (torch.randn(3, 20).requires_grad_() for _ in range(2))
    twin.data.copy_(x)
    output = layer(x)
    expected = torch.nn.functional.linear(twin, layer.weight, layer.bias)
    assert torch.equal(output, expected)
    gradient = torch.randn(3, 12)
    output.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(x.grad, twin.grad)
    assert layer.packed.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_a_packed_base_is_never_whole_in_fp32(base: Path) -> None:
    source = open_source(base)
    asked: list[list[str]] = []

    def read(names: Any) -> Any:
        asked.append(list(names))
        return source.read(names)

    lora = Lora(rank=4, quantize="nf4")
    network = lora.build(SHAPE)
    assert all(parameter.is_meta for parameter in network.parameters())
    lora.fill(network, read)
    assert max(map(len, asked)) == 1
    matrices = [it for it in network.modules() if isinstance(it, QuantizedLinear)]
    assert len(matrices) == 7 * SHAPE.num_layers
    assert not any(isinstance(it, Linear) for it in network.layers.modules())
    assert not any(parameter.is_meta for parameter in network.parameters())
