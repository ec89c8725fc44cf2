"""What is written about a machine: enough, and nothing secret."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like.tracking.environment import collect_environment, hide_secrets, read_git_state


def _git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_environment_names_versions_machine_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "+conf=llm/quickstart"])
    found = collect_environment()
    assert {"nemo_like", "torch", "lightning", "numpy"} <= set(found["packages"])
    assert found["cpu"]["model"]
    assert found["cpu"]["cores_usable"] >= 1
    assert found["memory_gib"] > 0
    assert found["command"] == ["pretrain.py", "+conf=llm/quickstart"]
    assert json.loads(json.dumps(found)) == found


def test_no_environment_variable_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_VARIABLE", "value-of-some-variable")
    assert "value-of-some-variable" not in json.dumps(collect_environment())


def test_passwords_and_keys_on_the_command_line_are_hidden() -> None:
    given = [
        "run.py",
        "loggers.hub.api_key=abc",
        "--hf-token",
        "abc",
        "--password=abc",
        "AUTH=abc",
        "path=https://me:abc@example.org/x",
        "data.tokenizer=gpt2",
        "max_tokens=100",
        "author=jane",
        "--token",
        "--verbose",
    ]
    shown = hide_secrets(given)
    assert "abc" not in " ".join(shown)
    assert shown[-5:] == given[-5:]
    assert shown[6] == "path=https://***@example.org/x"


def test_git_state_is_commit_and_whether_files_differ(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("a")
    _git(tmp_path, "add", "a.txt")
    _git(tmp_path, "commit", "-q", "-m", "a")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    assert read_git_state(tmp_path) == {"commit": commit, "dirty": False, "changed_files": 0}
    (tmp_path / "a.txt").write_text("b")
    (tmp_path / "new.txt").write_text("c")
    assert read_git_state(tmp_path) == {"commit": commit, "dirty": True, "changed_files": 2}


def test_there_is_no_git_state_outside_a_working_tree(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("no repository")
    assert read_git_state(tmp_path) is None
