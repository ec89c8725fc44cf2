"""The decoder as a model: opened, exported, trained further."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from nemo_like.collections.llm.decoder import DecoderModel
from nemo_like.collections.llm.decoder.config import DecoderConfig
from nemo_like.collections.llm.hf_folder import save_hf_folder
from nemo_like.core.errors import CheckpointError, ConfigError
from nemo_like.text.tokenizer import train_bpe

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["the quick brown fox jumps over the lazy dog"] * 20
SHAPE = {
    "vocab_size": 280, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32, "max_positions": 16
}  # fmt: skip


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    model = DecoderModel(network=DecoderConfig(**SHAPE))
    tokenizer = train_bpe(TEXTS, vocab_size=280)
    return save_hf_folder(
        tmp_path / "hf", model.shape, model.network.state_dict(), tokenizer_files=tokenizer.to_bytes(),
        eos_token_id=tokenizer.eos_id,
    )  # fmt: skip


def test_training_starts_from_the_weights_of_a_hugging_face_folder(hf_folder: Path) -> None:
    loaded, started = DecoderModel.load(hf_folder), DecoderModel(init_from=str(hf_folder))
    assert started.shape == loaded.shape
    assert loaded.tokenizer is not None
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(started.state_dict()[name], tensor), name
    assert started.training
    assert all(parameter.requires_grad for parameter in started.parameters())


def test_weights_of_another_shape_are_refused(hf_folder: Path) -> None:
    wider = DecoderConfig(**{**SHAPE, "hidden_size": 32})
    with pytest.raises(CheckpointError, match=r"does not fit network[^|]*embedding"):
        DecoderModel(network=wider, init_from=str(hf_folder))


def test_a_model_needs_a_shape() -> None:
    with pytest.raises(ConfigError, match="network: is required"):
        DecoderModel()


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        DecoderModel.load(tmp_path / "nowhere")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="has no whole checkpoint yet"):
        DecoderModel.load(tmp_path)


def test_the_export_command_writes_what_transformers_opens(hf_folder: Path, tmp_path: Path) -> None:
    import transformers

    script = ROOT / "examples" / "llm" / "export_hf.py"
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, script, hf_folder, out],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(out)(
        "the quick brown", return_tensors="pt"
    )["input_ids"]
    with torch.no_grad():
        ours = DecoderModel.load(out).network(tokens)
        assert_close(ours, theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    again = subprocess.run(
        [sys.executable, script, tmp_path / "nowhere", tmp_path / "x"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert again.returncode == 1
    assert again.stderr.startswith("error: ")
    assert "Traceback" not in again.stderr
