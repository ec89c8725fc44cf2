import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemo_like.collections.llm.decoder.config import DecoderConfig
from nemo_like.collections.llm.decoder.network import DecoderNetwork
from nemo_like.collections.llm.hf_folder import save_hf_folder
from nemo_like.data.held_out import is_held_out
from nemo_like.data.jsonl_zst import read_documents
from nemo_like.testing.corpus import write_corpus
from nemo_like.text.tokenizer import train_bpe

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "llm" / "evaluate.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus in ``text/`` and a Hugging Face folder of a small random model in ``model/``."""
    files = write_corpus(tmp_path / "text", num_documents={"stories": 9, "letters": 5})
    texts = [document.text for document in read_documents(list(files.values()))]
    tokenizer = train_bpe(texts, vocab_size=300)
    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        intermediate_size=32,
        max_positions=32,
    )
    save_hf_folder(
        tmp_path / "model",
        shape,
        DecoderNetwork(shape).state_dict(),
        tokenizer_files=tokenizer.to_bytes(),
        eos_token_id=tokenizer.eos_id,
    )
    return tmp_path


def run_main(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    spec = importlib.util.spec_from_file_location("evaluate_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *argv])
    module.main()


def test_it_prints_a_table_and_writes_json(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    run_main(
        monkeypatch,
        "model",
        "corpus=text/*.jsonl.zst",
        "context=16",
        "stride=8",
        "output=result.json",
    )
    shown = capsys.readouterr().out
    for part in ("stories", "letters", "gzip -9", "zstd -19", "all, pooled over bytes", "stride 8"):
        assert part in shown
    written = json.loads((folder / "result.json").read_text())
    assert (written["model"], written["context"], written["stride"]) == ("model", 16, 8)
    assert written["num_documents"] == {"letters": 5, "stories": 9}
    assert f"{written['bits_per_byte']['model']['pooled']:.4f}" in shown


def test_only_held_out_documents_can_be_evaluated_and_keys_may_be_spelled_as_options(
    folder, monkeypatch, capsys
):
    file = str(folder / "text" / "stories.jsonl.zst")
    options = [
        "--held-out-fraction",
        "0.5",
        "--json",
        "--corpus",
        file,
        "compression=false",
        "batch_size=2",
    ]
    run_main(monkeypatch, str(folder / "model"), *options)
    found = json.loads(capsys.readouterr().out)
    expected = [each.text for each in read_documents(file) if is_held_out(each.text, 0.5)]
    assert 0 < len(expected) < 9
    assert found["num_documents"] == {"stories": len(expected)}
    assert found["context"] == found["stride"] == 32
    assert list(found["bits_per_byte"]) == ["model"]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["model", "contxt=3"], 2, "error: corpus is missing"),
        (["model", "corpus=x", "contxt=3"], 2, "'contxt' is no argument; did you mean 'context'"),
        (["model", "corpus=x", "--strid=3"], 2, "'strid' is no argument; did you mean 'stride'"),
        (["model", "corpus=x", "context=many"], 2, "'many'"),
        (
            ["model", "corpus=x", "held_out_fraction=2"],
            2,
            "held_out_fraction=2.0: must lie between 0 and 1",
        ),
        (["model", "corpus=text/*.zst", "context=33"], 2, "error: context=33: must be 1 to 32"),
        (["model", "corpus=text/*.zst", "context=0"], 2, "error: context=0: must be 1 to 32"),
        (["model", "corpus=nowhere.jsonl"], 1, "error: 'nowhere.jsonl': no such file"),
        (["nowhere", "corpus=text/*.zst"], 1, "error: nowhere: no such checkpoint folder"),
    ],
)
def test_mistakes_are_named_without_a_trace_back(folder, monkeypatch, capsys, argv, code, message):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as exit_:
        run_main(monkeypatch, *argv)
    assert exit_.value.code == code
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.dist
def test_torchrun_shares_the_work_and_finds_the_same(folder):
    arguments = ["model", "corpus=text/*.jsonl.zst", "context=16", "--json"]
    alone = subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=folder, capture_output=True, check=True, text=True
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    together = subprocess.run(
        [*launcher, SCRIPT, *arguments], cwd=folder, capture_output=True, check=True, text=True
    )
    assert json.loads(together.stdout) == json.loads(alone.stdout)
