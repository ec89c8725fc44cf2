"""Does what docs/howto/add_a_strategy.md says: its files, its command, its test."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_like.core.compose import compose

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "add_a_strategy.md"
FILE = re.compile(r"`([\w/]+\.py)`[^`]*(?:`[^`]*`[^`]*)?\n\n```python\n(.*?)^```$", re.M | re.S)
TEST = re.compile(r"^## Test it\n.*?```python\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the page describes, on the path of this process and of those it starts."""
    files = dict(FILE.findall(PAGE.read_text("utf-8")))
    assert set(files) == {"my_strategies/flat.py", "my_strategies/config.py"}
    for name, text in {**files, "my_strategies/__init__.py": ""}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    for name in [it for it in sys.modules if it.partition(".")[0] == "my_strategies"]:
        del sys.modules[name]


def test_any_run_takes_the_strategy_of_an_outside_package(package: Path) -> None:
    (command,) = COMMAND.findall(PAGE.read_text("utf-8"))
    program, run, verb, *overrides = shlex.split(command)
    assert (program, run, verb) == ("nemo-like", "run", "pretrain")
    strategy = compose("pretrain", [*overrides, "strategy.micro_batch_size=3"]).config.strategy
    assert strategy["_target_"] == "my_strategies.flat.FlatStrategy"
    assert (strategy["micro_batch_size"], strategy["timeout_s"]) == (3, 1800.0)


@pytest.mark.dist
def test_the_test_on_the_page_passes(package: Path) -> None:
    (text,) = TEST.findall(PAGE.read_text("utf-8"))
    (package / "my_strategies" / "page_test.py").write_text(text, encoding="utf-8")
    module = importlib.import_module("my_strategies.page_test")
    tests = [it for name, it in vars(module).items() if name.startswith("test_")]
    assert tests
    for it in tests:
        it()
