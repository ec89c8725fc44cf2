"""Does what docs/howto/add_a_model.md says: its files, its commands, its test."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_like.cli.main import main
from nemo_like.core.checkpoint import find_checkpoints, open_checkpoint
from nemo_like.testing.corpus import write_corpus

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "add_a_model.md"
# A block is a file where the text before it names one: `my_models/smoothed.py`: or `conf/...yaml` starts ...
FILE = re.compile(r"`([\w/]+\.(?:py|yaml))`[^`]*\n\n```(?:python|yaml)\n(.*?)^```$", re.M | re.S)
TEST = re.compile(r"^## Test it\n.*?```python\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
# The same run, small enough for a test.
SMALL = {
    "data.tokenizer.train_vocab_size": 300,
    "data.seq_len": 32,
    "data.held_out_fraction": 0.2,
    "model.network.vocab_size": 300,
    "model.network.hidden_size": 32,
    "model.network.num_heads": 2,
    "model.network.num_layers": 1,
    "model.network.intermediate_size": 64,
    "model.network.max_positions": 32,
    "model.sample_tokens": 5,
    "trainer.max_steps": 2,
    "trainer.val_every_n_steps": 2,
    "trainer.devices": 1,
    "schedule.warmup_steps": 1,
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the page describes, as the current one and on the path."""
    files = dict(FILE.findall(PAGE.read_text("utf-8")))
    assert set(files) == {"my_models/smoothed.py", "my_models/config.py", "conf/llm/smoothed.yaml"}
    for name, text in {**files, "my_models/__init__.py": ""}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [it for it in sys.modules if it.partition(".")[0] == "my_models"]:
        del sys.modules[name]


def read_commands() -> list[list[str]]:
    blocks = "".join(COMMAND.findall(PAGE.read_text("utf-8")))
    return [shlex.split(line) for line in blocks.splitlines()]


def test_the_run_of_an_outside_package_is_valid_and_its_schema_is_used(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (program, *validate), _ = read_commands()
    assert (program, validate[0]) == ("nemo-like", "validate")
    assert main(validate) == 0, capsys.readouterr().err
    assert main([*validate, "model.label_smoothing=2", "model.label_smoothin=0"]) == 2
    faults = capsys.readouterr().err
    assert "label_smoothing=2" in faults
    assert "must be at least 0 and below 1" in faults
    assert "did you mean 'label_smoothing'" in faults


def test_the_run_of_an_outside_package_trains_its_model(package: Path) -> None:
    _, (program, *run) = read_commands()
    assert (program, run[:2]) == ("nemo-like", ["run", "pretrain"])
    write_corpus(package / "corpus")
    small = [f"{key}={value}" for key, value in SMALL.items()]
    data = [f"data.corpus={package}/corpus/*.jsonl.zst", f"data.cache_dir={package}/cache"]
    with pytest.raises(SystemExit) as left:
        main([*run, *small, *data])
    assert not left.value.code
    saved = find_checkpoints(package / "runs" / "smoothed" / "checkpoints")
    assert [open_checkpoint(it).step for it in saved] == [2]
    config = (saved[-1] / "config.yaml").read_text("utf-8")
    assert "_target_: my_models.smoothed.SmoothedModel" in config
    assert "label_smoothing: 0.1" in config


def test_the_test_on_the_page_passes(package: Path) -> None:
    (text,) = TEST.findall(PAGE.read_text("utf-8"))
    (package / "my_models" / "page_test.py").write_text(text, encoding="utf-8")
    module = importlib.import_module("my_models.page_test")
    tests = [it for name, it in vars(module).items() if name.startswith("test_")]
    assert tests
    for it in tests:
        it()
