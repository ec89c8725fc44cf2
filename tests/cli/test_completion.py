"""Completion on the tab key: the script of bash in a real bash, and the candidates behind it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like.cli.completion import complete, main
from nemo_like.cli.main import COMMANDS

ASK = """
set -e
nemo-like() {{ {python} -m nemo_like.cli.main "$@"; }}
compopt() {{ :; }}
source {script}
COMP_LINE={line!r} COMP_POINT={point}
_nemo_like
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def candidates(capsys: pytest.CaptureFixture[str], line: str, shell: str = "zsh") -> list[str]:
    assert complete([shell, line]) == 0
    return capsys.readouterr().out.split("\n")[:-1]


def test_commands_verbs_groups_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert candidates(capsys, "nemo-like ") == list(COMMANDS)
    assert candidates(capsys, "nemo-like v") == ["validate"]
    assert "pretrain" in candidates(capsys, "nemo-like run ")
    assert candidates(capsys, "nemo-like data ") == ["preview"]
    assert "+conf=llm/quickstart" in candidates(capsys, "nemo-like data preview +")
    assert candidates(capsys, "nemo-like ls op") == ["optim"]
    assert "llm/quickstart" in candidates(capsys, "nemo-like cp ")
    assert "+conf=llm/quickstart" in candidates(capsys, "nemo-like run pretrain +")


def test_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert candidates(capsys, "nemo-like run pretrain trainer.p") == ["trainer.precision="]
    assert candidates(capsys, "nemo-like validate trainer.precision=b") == [
        "trainer.precision=bf16-mixed"
    ]
    assert candidates(capsys, "nemo-like validate trainer.determ") == ["trainer.deterministic="]
    assert candidates(capsys, "nemo-like validate trainer.deterministic=t") == [
        "trainer.deterministic=true"
    ]
    assert candidates(capsys, "nemo-like run pretrain optim=m") == ["optim=muon"]
    assert "optim=" in candidates(capsys, "nemo-like run pretrain seed=3 o")


def test_bash_gets_what_follows_the_equals_sign(capsys: pytest.CaptureFixture[str]) -> None:
    assert candidates(capsys, "nemo-like run pretrain optim=m", shell="bash") == ["muon"]
    assert candidates(capsys, "nemo-like run pretrain trainer.p", shell="bash") == [
        "trainer.precision="
    ]


def test_runs_of_ones_own_are_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf/llm").mkdir(parents=True)
    (tmp_path / "conf/llm/mine.yaml").write_text("# @package _global_\nname: x\n")
    monkeypatch.chdir(tmp_path)
    assert (
        candidates(capsys, "nemo-like run pretrain --config-dir . +conf=llm/m")[0]
        == "+conf=llm/mine"
    )


def test_the_script_works_in_a_real_bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["bash"]) == 0
    script = tmp_path / ".local/share/bash-completion/completions/nemo-like"
    line = "nemo-like run pretrain +conf=llm/quick"
    text = ASK.format(python=sys.executable, script=script, line=line, point=len(line))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "llm/quickstart\n"


@pytest.mark.parametrize(
    ("shell", "place"),
    [("zsh", ".zfunc/_nemo-like"), ("fish", ".config/fish/completions/nemo-like.fish")],
)
def test_other_shells_get_their_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shell: str,
    place: str,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert main([]) == 0
    assert f"nemo-like _complete {shell} " in (tmp_path / place).read_text()
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / place}; ")
