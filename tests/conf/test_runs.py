"""Every shipped run and every option of a group composes and fits its schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.core.compose import check_option, check_run, compose
from nemo_like.core.errors import ConfigError
from nemo_like.core.library import Library, is_run

CONF = Path(__file__).resolve().parents[2] / "conf"
FILES = sorted(path.relative_to(CONF).with_suffix("").as_posix() for path in CONF.rglob("*.yaml"))
RUNS = [name for name in FILES if is_run(CONF / f"{name}.yaml")]
OPTIONS = [name for name in FILES if name not in RUNS and "/" in name]


def test_there_are_runs_options_and_primary_configs() -> None:
    assert "llm/quickstart" in RUNS
    assert {"optim/adamw", "strategy/ddp", "trainer/default"} <= set(OPTIONS)
    assert [name for name in FILES if "/" not in name] == Library().primaries()
    assert Library().runs() == RUNS


@pytest.mark.parametrize("run", RUNS)
def test_run_composes_and_fits(run: str) -> None:
    assert check_run("pretrain", [f"+conf={run}"]) == []


@pytest.mark.parametrize("option", OPTIONS)
def test_option_fits(option: str) -> None:
    assert check_option("pretrain", option.partition("/")[0], CONF / f"{option}.yaml") == []


@pytest.mark.parametrize("name", FILES)
def test_every_file_says_what_it_is_for(name: str) -> None:
    lines = (CONF / f"{name}.yaml").read_text().splitlines()
    first = lines[1] if lines[0].startswith("# @package") else lines[0]
    assert first.startswith("# ")
    assert first.endswith(".")


def test_a_run_with_a_typo_fails_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    probe = tmp_path / "conf/llm/probe.yaml"
    probe.parent.mkdir(parents=True)
    probe.write_text((CONF / "llm/quickstart.yaml").read_text().replace("max_steps:", "max_stepz:"))
    with pytest.raises(
        ConfigError,
        match=r"conf/llm/probe.yaml:\d+: trainer.max_stepz: no such key; did you mean 'max_steps'",
    ):
        compose("pretrain", ["--config-dir", ".", "+conf=llm/probe"])
