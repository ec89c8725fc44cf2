import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_like.collections.llm import hf_folder
from nemo_like.collections.llm.decoder import DecoderConfig, DecoderNetwork
from nemo_like.collections.llm.hf_folder import load_hf_folder, save_hf_folder
from nemo_like.core.errors import CheckpointError, ConfigError
from nemo_like.core.extras import require

SHAPE = DecoderConfig(
    vocab_size=300,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    intermediate_size=24,
    max_positions=32,
    tie_embeddings=False,
)


def make_state(shape=SHAPE):
    torch.manual_seed(0)
    return DecoderNetwork(shape).state_dict()


def make_tokenizer_json():
    tokenizers = require("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["one tree and another tree", "two trees"], trainer)
    return tokenizer.to_str().encode()


@pytest.mark.parametrize("max_shard_bytes", [10**9, 10_000], ids=["one file", "sharded"])
def test_transformers_opens_what_we_write_offline(tmp_path, max_shard_bytes):
    transformers = require("transformers")
    state = make_state()
    folder = save_hf_folder(
        tmp_path / "model",
        SHAPE,
        state,
        tokenizer_files={"tokenizer.json": make_tokenizer_json()},
        bos_token_id=0,
        eos_token_id=1,
        max_shard_bytes=max_shard_bytes,
    )
    sharded = max_shard_bytes == 10_000
    assert (folder / "model.safetensors.index.json").exists() == sharded
    assert (len(list(folder.glob("*.safetensors"))) > 1) == sharded
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.generation_config.eos_token_id == 1
    assert torch.equal(model.lm_head.weight, state["output.weight"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "two  trees,\n\u00e9"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    assert tokenizer.model_max_length == 32

    network = DecoderNetwork(SHAPE)
    network.load_state_dict(state)
    tokens_BT = torch.randint(0, 300, (2, 9))
    torch.testing.assert_close(network(tokens_BT), model(tokens_BT).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 10_000], ids=["one file", "sharded"])
def test_a_folder_comes_back_as_it_was_written(tmp_path, max_shard_bytes):
    state = make_state()
    save_hf_folder(tmp_path / "model", SHAPE, state, max_shard_bytes=max_shard_bytes)
    config, loaded = load_hf_folder(tmp_path / "model")
    assert config == SHAPE
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_weights_are_read_file_by_file(tmp_path):
    state = make_state()
    asked = []

    def read(names):
        asked.append(list(names))
        return {name: state[name] for name in names}

    empty = {name: tensor.to("meta") for name, tensor in state.items()}
    save_hf_folder(tmp_path / "model", SHAPE, empty, max_shard_bytes=10_000, read=read)
    assert len(asked) > 1
    assert [name for names in asked for name in names] == list(state)
    sizes = [sum(state[name].nbytes for name in names) for names in asked]
    assert all(size <= 10_000 or len(names) == 1 for size, names in zip(sizes, asked, strict=True))
    _, back = load_hf_folder(tmp_path / "model")
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_we_open_what_transformers_writes(tmp_path):
    transformers = require("transformers")
    config = transformers.Qwen3Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        tie_word_embeddings=True,
    )
    reference = transformers.Qwen3ForCausalLM(config)
    reference.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    shape, state = load_hf_folder(tmp_path)
    network = DecoderNetwork(shape)
    network.load_state_dict(state)
    tokens_BT = torch.randint(0, 50, (2, 9))
    expected = reference(tokens_BT).logits
    torch.testing.assert_close(network(tokens_BT), expected, rtol=1e-5, atol=1e-6)


def test_weights_are_written_in_the_type_asked_for(tmp_path):
    state = make_state()
    folder = save_hf_folder(tmp_path / "model", SHAPE, state, dtype=torch.bfloat16)
    written = load_file(folder / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], state["output.weight"].bfloat16())
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert state["output.weight"].dtype == torch.float32


def test_all_files_have_the_usual_mode(tmp_path):
    (tmp_path / "usual").touch()
    folder = save_hf_folder(tmp_path / "model", SHAPE, make_state())
    modes = {file.stat().st_mode for file in folder.iterdir()}
    assert modes == {(tmp_path / "usual").stat().st_mode}


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_hf_folder(tmp_path / "model", SHAPE, make_state())
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_written_over(tmp_path):
    with pytest.raises(CheckpointError, match=f"{tmp_path}: exists already"):
        save_hf_folder(tmp_path, SHAPE, make_state())


def test_weights_of_another_shape_are_not_written(tmp_path):
    state = make_state()
    del state["norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing: +model\.norm\.weight"):
        save_hf_folder(tmp_path / "model", SHAPE, state)
    assert list(tmp_path.iterdir()) == []


def make_folder(tmp_path):
    return save_hf_folder(tmp_path / "model", SHAPE, make_state(), max_shard_bytes=10_000)


def test_missing_and_unexpected_tensors_are_all_listed(tmp_path):
    folder = save_hf_folder(tmp_path / "model", SHAPE, make_state())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.extra"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{folder}: the weights do not fit") as caught:
        load_hf_folder(folder)
    assert sorted(caught.value.missing) == [
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
    ]
    assert caught.value.unexpected == ["model.extra"]


def test_a_pickled_folder_is_refused_with_the_remedy(tmp_path):
    folder = make_folder(tmp_path)
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"pickled \(pytorch_model.bin\)(.|\n)*save_pretrained"
    ):
        load_hf_folder(folder)


def test_a_folder_without_weights_is_refused(tmp_path):
    folder = make_folder(tmp_path)
    for file in folder.glob("model*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=f"{folder}: has neither model.safetensors nor"):
        load_hf_folder(folder)


def test_a_lost_shard_is_named(tmp_path):
    folder = make_folder(tmp_path)
    lost = sorted(folder.glob("model-*"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"missing: +{lost.name}"):
        load_hf_folder(folder)


def test_a_damaged_shard_is_named(tmp_path):
    folder = make_folder(tmp_path)
    file = sorted(folder.glob("model-*"))[1]
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=f"{file}: damaged"):
        load_hf_folder(folder)


@pytest.mark.parametrize("names", [{}, {"a": "../secret.safetensors"}])
def test_an_index_stays_within_its_folder(tmp_path, names):
    folder = make_folder(tmp_path)
    (folder / hf_folder.INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match="weight_map must name files of this folder"):
        load_hf_folder(folder)


@pytest.mark.parametrize(
    ("content", "fault"),
    [(None, "missing; a Hugging Face folder has one"), ("{", "no JSON"), ("[]", "holds a list")],
)
def test_a_bad_configuration_file_is_named(tmp_path, content, fault):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/config.json: {fault}"):
        load_hf_folder(tmp_path)


def test_an_unsupported_configuration_names_its_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match=f"{tmp_path}/config.json: model_type='bert'"):
        load_hf_folder(tmp_path)
