# Shapes: O = outputs, I = inputs, N = rows.
import copy
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from nemo_like.collections.llm.decoder import DecoderConfig, DecoderModel, DecoderNetwork
from nemo_like.collections.llm.evaluation import evaluate_bits_per_byte
from nemo_like.collections.llm.generation import GenerationConfig, ModelDraft
from nemo_like.collections.llm.generation.generate import generate
from nemo_like.collections.llm.generation.layout import lay_out_for_decoding
from nemo_like.collections.llm.hf_folder import save_hf_folder
from nemo_like.collections.llm.quantize import count_bytes, quantize_network
from nemo_like.collections.llm.serving.config import EngineConfig
from nemo_like.collections.llm.serving.engine import Engine
from nemo_like.core.errors import ConfigError
from nemo_like.nn.byte_linear import (
    BYTE_KINDS,
    ByteLinear,
    multiply_by_floats,
    multiply_by_integers,
    quantize_rows,
    widen_fp8,
)
from nemo_like.nn.lora import LoraLinear
from nemo_like.testing.corpus import write_corpus
from nemo_like.text.tokenizer import train_bpe

TOKENIZER = train_bpe(["ab"], vocab_size=257)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "llm"
every_kind = pytest.mark.parametrize("kind", BYTE_KINDS)


def make_network(**options):
    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=257,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=48,
        max_positions=64,
        init_std=0.2,
        **options,
    )
    return DecoderNetwork(shape)


def draw_matrix(num_outputs=24, num_inputs=40):
    """Rows of very different size, one of them zero."""
    torch.manual_seed(1)
    weight_OI = torch.randn(num_outputs, num_inputs)
    weight_OI *= torch.logspace(-4, 4, num_outputs).unsqueeze(1)
    weight_OI[3] = 0
    return weight_OI


@every_kind
def test_each_row_has_a_scale_and_no_weight_moves_by_more_than_half_a_step(kind):
    weight_OI = draw_matrix()
    layer = ByteLinear(weight_OI, None, kind)
    assert layer.codes.element_size() == 1
    assert layer.scales.shape == (24,)
    error_OI = (layer.dequantize() - weight_OI).abs()
    bound_OI = layer.scales.unsqueeze(1).expand_as(weight_OI) / 2
    if kind == "fp8":
        bound_OI = torch.maximum(weight_OI.abs() / 16, layer.scales.unsqueeze(1) / 1024)
    assert bool((error_OI <= bound_OI * 1.0001).all())
    assert bool((error_OI[3] == 0).all())
    # The largest weight of each row is kept: no scale is that of another row.
    largest_O = weight_OI.abs().amax(dim=1)
    assert_close(layer.dequantize().abs().amax(dim=1), largest_O, rtol=1e-5, atol=0)


@every_kind
@pytest.mark.parametrize("shape", [(40,), (1, 1, 40), (3, 5, 40), (40, 40)])
def test_a_layer_multiplies_by_the_matrix_that_its_codes_stand_for(kind, shape):
    weight_OI = draw_matrix() / 1e3
    torch.manual_seed(2)
    bias_O, x = torch.randn(24), torch.randn(shape)
    layer = ByteLinear(weight_OI, bias_O, kind)
    if kind == "int8-dynamic":
        step = x.abs().amax(dim=-1, keepdim=True) / 127
        x_seen = (x / step).round() * step
        largest = (x_seen - x).abs().max()
        assert 0 < float(largest) <= float(step.max()) / 2 * 1.0001
    else:
        x_seen = x
    expected = F.linear(x_seen, layer.dequantize(), bias_O)
    assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_inputs", [16, 1024, 2500])
def test_integers_are_multiplied_exactly_with_and_without_integer_units(num_inputs):
    torch.manual_seed(3)
    codes_NI = torch.randint(-127, 128, (6, num_inputs)).to(torch.int8)
    codes_OI = torch.randint(-127, 128, (5, num_inputs)).to(torch.int8)
    codes_NI[0] = codes_OI[0] = 127  # the largest sum
    expected = codes_NI.long() @ codes_OI.long().t()
    assert torch.equal(multiply_by_integers(codes_NI, codes_OI).long(), expected)
    assert torch.equal(multiply_by_floats(codes_NI, codes_OI).long(), expected)


def test_dynamic_rows_have_scales_of_their_own_and_zeros_stay():
    layer = ByteLinear(draw_matrix() / 1e3, None, "int8-dynamic")
    torch.manual_seed(2)
    x_NI = torch.randn(4, 40)
    x_NI[2] = 0
    big_NI = x_NI.clone()
    big_NI[0] *= 1e6
    assert torch.equal(layer(big_NI)[1:], layer(x_NI)[1:])
    assert bool((layer(x_NI)[2] == 0).all())


def test_fp8_codes_are_widened_exactly():
    bits = torch.arange(256).to(torch.uint8)
    codes = bits[(bits & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    assert torch.equal(widen_fp8(codes, torch.float32), codes.to(torch.float32))


def test_a_weight_that_is_not_finite_is_refused():
    weight_OI = draw_matrix()
    weight_OI[2, 1] = torch.nan
    with pytest.raises(ValueError, match="a weight is not finite in 1 rows"):
        quantize_rows(weight_OI, "int8")


@every_kind
@pytest.mark.parametrize("tied", [True, False])
def test_the_matrices_of_all_blocks_are_quantised_and_nothing_else(kind, tied):
    network = make_network(tie_embeddings=tied, qkv_bias=True)
    plain = copy.deepcopy(network)
    report = quantize_network(network, kind)
    changed = [name for name, it in network.named_modules() if isinstance(it, ByteLinear)]
    assert len(changed) == report.num_matrices == 2 * 7
    assert all(name.startswith("layers.") for name in changed)
    assert torch.equal(network.output_weight_VD, plain.output_weight_VD)
    assert torch.equal(network.embedding.weight, plain.embedding.weight)
    assert report.bytes_before == 4 * report.num_parameters == count_bytes(plain)
    outputs = sum(plain.get_submodule(name).out_features for name in changed)
    assert report.bytes_after == report.bytes_before - 3 * report.num_weights + 4 * outputs
    assert f"{report.bytes_before / 1e6:.1f} MB" in report.describe()
    for name in changed:
        layer, matrix = network.get_submodule(name), plain.get_submodule(name)
        assert_close(layer.dequantize(), matrix.weight, rtol=0.07, atol=0.02)
        assert (layer.bias is None) == (matrix.bias is None)


@every_kind
def test_bits_per_byte_change_little(kind):
    network = make_network()
    documents = [("a", "some text that is read"), ("b", "another one, a bit longer than that")]

    def measure():
        result = evaluate_bits_per_byte(
            network, TOKENIZER, documents, context=32, compression=False
        )
        return result.model.pooled

    before = measure()
    quantize_network(network, kind)
    after = measure()
    assert after != before
    assert after == pytest.approx(before, rel=0.02 if kind == "fp8" else 0.005)


@every_kind
def test_a_quantised_network_generates_with_its_cache_and_drafts_for_others(kind):
    network = make_network()
    plain = copy.deepcopy(network)
    quantize_network(network, kind)
    lay_out_for_decoding(network)
    config = GenerationConfig(max_tokens=10, temperature=0, ignore_eos=True)
    prompts = [[5, 9, 31], [7]]
    results = generate(network, TOKENIZER, prompts, config)
    for prompt, result in zip(prompts, results, strict=True):
        ids = list(prompt)
        for _ in range(10):
            ids.append(int(network(torch.tensor([ids]))[0, -1].argmax()))
        assert result.tokens == ids[len(prompt) :]
    draft = ModelDraft(network, TOKENIZER, num_tokens=3)
    drafted = generate(plain, TOKENIZER, prompts, config, draft=draft)
    expected = generate(plain, TOKENIZER, prompts, config)
    assert [it.tokens for it in drafted] == [it.tokens for it in expected]
    assert drafted[0].speculation.acceptance_rate > 0.5
    # And it takes drafts itself.
    drafted = generate(network, TOKENIZER, prompts, config, draft=draft)
    assert [it.tokens for it in drafted] == [it.tokens for it in results]


@every_kind
def test_the_engine_serves_a_quantised_network(kind):
    network = make_network()
    quantize_network(network, kind)
    config = GenerationConfig(max_tokens=8, temperature=0, ignore_eos=True)
    expected = generate(network, TOKENIZER, [[5, 9, 31], [7]], config)
    engine = Engine(network, TOKENIZER, EngineConfig(max_batch=2))
    handles = [engine.submit(it.prompt_tokens, config) for it in expected]
    while engine.step():
        pass
    assert [handle.request.tokens for handle in handles] == [it.tokens for it in expected]
    engine.close()


@every_kind
def test_it_is_neither_quantised_again_nor_trained(kind):
    network = make_network()
    quantize_network(network, kind)
    assert not network.training
    with pytest.raises(ConfigError, match=f"query is quantised already .{kind}."):
        quantize_network(network, "int8")
    with pytest.raises(RuntimeError, match=f"quantize={kind}: a quantised model is for inference"):
        network.train()
    assert not any(it.requires_grad for it in network.layers[0].mlp.parameters())


def test_unknown_kinds_and_adapters_are_refused():
    network = make_network()
    with pytest.raises(ConfigError, match="quantize=int3: must be one of int8, int8-dynamic, fp8"):
        quantize_network(network, "int3")
    matrix = network.layers[1].mlp.up
    network.layers[1].mlp.up = LoraLinear(matrix, rank=2, scaling=1.0)
    with pytest.raises(ConfigError, match=r"layers.1.mlp.up has an adapter; merge it first"):
        quantize_network(network, "int8")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_corpus(tmp_path / "text", num_documents={"stories": 4, "letters": 3})
    network = make_network()
    save_hf_folder(
        tmp_path / "model",
        network.shape,
        network.state_dict(),
        tokenizer_files=TOKENIZER.to_bytes(),
        eos_token_id=TOKENIZER.eos_id,
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_main(monkeypatch, name, *argv):
    spec = importlib.util.spec_from_file_location(f"{name}_script", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *argv])
    module.main()


@every_kind
def test_evaluate_shows_bits_per_byte_before_and_after(folder, monkeypatch, capsys, kind):
    argv = ["model", "corpus=text/*.jsonl.zst", "compression=false", f"quantize={kind}"]
    run_main(monkeypatch, "evaluate", *argv, "output=out.json")
    shown = capsys.readouterr()
    figures = json.loads(Path("out.json").read_text())["bits_per_byte"]
    before, after = figures["model"]["pooled"], figures[kind]["pooled"]
    assert before != after
    assert math.isclose(before, after, rel_tol=0.03)
    assert f"{before:.4f}" in shown.out
    assert f"{after:.4f}" in shown.out
    assert "14 matrices" in shown.err + shown.out
    assert json.loads(Path("out.json").read_text())["quantization"]["num_matrices"] == 14


def test_generate_quantises_the_model_and_says_so(folder, monkeypatch, capsys):
    argv = ["model", "--prompt", "ab", "temperature=0", "max_tokens=8", "quantize=int8"]
    run_main(monkeypatch, "generate", *argv)
    shown = capsys.readouterr()
    model = DecoderModel.load(folder / "model")
    quantize_network(model.network, "int8")
    (expected,) = model.generate(["ab"], GenerationConfig(max_tokens=8, temperature=0))
    assert shown.out == f"ab{expected.text}\n"
    assert "int8: 14 matrices" in shown.err


@pytest.mark.parametrize("name", ["generate", "evaluate"])
def test_wrong_kinds_are_named_by_the_commands(folder, monkeypatch, capsys, name):
    argv = ["corpus=text/*.zst"] if name == "evaluate" else ["--prompt", "a"]
    with pytest.raises(SystemExit, match="2"):
        run_main(monkeypatch, name, "model", "quantize=int3", *argv)
    assert "quantize=int3: must be one of int8, int8-dynamic, fp8" in capsys.readouterr().err
