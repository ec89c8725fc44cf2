"""The real command in a process of its own: what it prints, its exit codes, and what it must not load."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like import __version__

RUN = """\
# @package _global_
# A run that is checked and never started.
name: tiny
trainer: {max_steps: 10}
model: {_target_: nemo_like.optim.AdamW, lr: 1}
data: {_target_: nemo_like.optim.AdamW, lr: 1}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = tmp_path / "conf/llm/tiny.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(RUN)
    return tmp_path


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    command = [sys.executable, "-m", "nemo_like.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_help_names_every_command(folder: Path) -> None:
    for arguments in ([], ["--help"], ["help"]):
        out, _ = run(*arguments)
        assert all(f"  {name} " in out for name in ("ls", "cp", "run", "validate", "env"))
    assert run("--version") == (f"nemo-like {__version__}\n", "")


@pytest.mark.parametrize("command", ["ls", "cp", "run", "validate", "env", "--install-completion"])
def test_every_command_has_help(folder: Path, command: str) -> None:
    out, err = run(command, "--help")
    assert out.startswith(f"usage: nemo-like {command}")
    assert err == ""


def test_mistakes_are_one_line_with_the_nearest_name_and_code_2(folder: Path) -> None:
    expected = {
        "vaildate": "nemo-like: no command 'vaildate'; did you mean 'validate'; there are: ls, cp, run, validate, ",
        "ls modle": "nemo-like ls: no group 'modle'; did you mean 'model'; there are: ",
        "ls --sort": "nemo-like ls: unrecognized arguments: --sort (see nemo-like ls --help)",
        "ls --config-dir absent": "--config-dir absent: there is no such folder",
        "cp llm/quikstart": "nemo-like cp: no run 'llm/quikstart'; did you mean 'llm/quickstart'; there are: ",
        "cp": "nemo-like cp: the following arguments are required: run",
        "run llm/pretran": "nemo-like run: no verb 'llm/pretran'; did you mean 'pretrain'; there are: ",
        "validate absent.yaml": "absent.yaml: there is no such file",
        "validate --verb pretran seed=1": "there is no primary config 'pretran'; did you mean 'pretrain'",
        "--install-completion tcsh": "nemo-like: no completion for the shell 'tcsh'; did you mean 'zsh'; there",
    }
    found = {line: run(*line.split(), code=2) for line in expected}
    for line, (out, err) in found.items():
        assert (out, err.count("\n")) == ("", 1), err
        assert err.startswith(expected[line]), err


def test_ls_shows_runs_and_groups_with_what_they_are_for(folder: Path) -> None:
    out, _ = run("ls", "--config-dir", ".")
    assert re.search(r"^  llm/tiny +A run that is checked and never started.$", out, re.MULTILINE)
    assert "  llm/quickstart" in out
    assert "  optim      adamw, adamw_8bit, muon\n" in out
    out, _ = run("ls", "optims")
    assert out.splitlines()[0].split(maxsplit=1)[1].startswith("AdamW;")


def test_cp_gives_a_run_of_ones_own_that_validates(folder: Path) -> None:
    out, _ = run("cp", "llm/tiny", "mine", "--config-dir", ".")
    assert (
        out
        == "wrote mine/conf/llm/tiny.yaml\nstart it: nemo-like run pretrain --config-dir mine +conf=llm/tiny\n"
    )
    assert (folder / "mine/conf/llm/tiny.yaml").read_text() == RUN
    out, _ = run("cp", "llm/tiny", "mine/conf/llm/other.yaml", "--config-dir", ".")
    assert out.endswith("--config-dir mine +conf=llm/other\n")
    run("validate", "--config-dir", "mine", "+conf=llm/other")


def test_cp_overwrites_nothing_and_wants_a_folder_conf(folder: Path) -> None:
    _, err = run("cp", "llm/tiny", "--config-dir", ".", code=2)
    assert err == (
        "nemo-like cp: conf/llm/tiny.yaml exists already; name another file: "
        "nemo-like cp llm/tiny conf/llm/my_tiny.yaml\n"
    )
    _, err = run("cp", "llm/tiny", "elsewhere/my.yaml", "--config-dir", ".", code=2)
    assert err.startswith(
        "elsewhere/my.yaml: a run is a file <folder>/conf/<domain>/<run>.yaml; put it into a folder"
    )


def test_validate_takes_a_command_line_or_files(folder: Path) -> None:
    assert (
        run("validate", "--config-dir", ".", "+conf=llm/tiny", "seed=3")[0]
        == "ok: +conf=llm/tiny seed=3\n"
    )
    assert run("validate", "conf/llm/tiny.yaml")[0] == "ok: conf/llm/tiny.yaml\n"
    (folder / "optim").mkdir()
    (folder / "optim/fast.yaml").write_text("_target_: nemo_like.optim.AdamW\n")
    assert run("validate", "optim/fast.yaml")[0] == "ok: optim/fast.yaml\n"


def test_validate_tells_all_faults_of_all_files_and_leaves_with_2(folder: Path) -> None:
    (folder / "conf/llm/tiny.yaml").write_text(RUN.replace("name", "nam").replace("10", "many"))
    (folder / "optim").mkdir()
    (folder / "optim/fast.yaml").write_text("_target_: nemo_like.optim.AdamM\n")
    (folder / "other.yaml").write_text("a: 1\n")
    out, err = run(
        "validate", "conf/llm/tiny.yaml", "optim/fast.yaml", "other.yaml", "seed=x", code=2
    )
    assert out == ""
    assert [line.partition("; ")[0] for line in err.splitlines()] == [
        "conf/llm/tiny.yaml: name: is required: text",
        "override 'seed=x': seed='x': must be a whole number",
        "conf/llm/tiny.yaml:4: trainer.max_steps='many': must be a whole number",
        "conf/llm/tiny.yaml:3: nam: no such key",
        "optim/fast.yaml:1: optim._target_='nemo_like.optim.AdamM': no class 'AdamM' in nemo_like.optim",
        "other.yaml: is no run (its first line is # @package _global_), nor in the folder of a group "
        "(callbacks, data, loggers, model, optim, schedule, strategy, trainer)",
    ]  # fmt: skip


def test_validate_all_finds_a_typo_in_any_run(folder: Path) -> None:
    (folder / "conf/asr").mkdir()
    (folder / "conf/asr/probe.yaml").write_text(RUN + "sead: 1\n")
    _, err = run("validate", "--all", "--config-dir", ".", code=2)
    assert "conf/asr/probe.yaml:7: sead: no such key; did you mean 'seed'" in err


def test_a_run_with_a_mistake_starts_nothing(folder: Path) -> None:
    out, err = run(
        "run",
        "llm/pretrain",
        "--config-dir",
        ".",
        "+conf=llm/tiny",
        "sead=1",
        "trainer.max_steps=x",
        code=2,
    )
    assert out == ""
    assert "override 'sead=1': sead: no such key; did you mean 'seed'" in err
    assert "override 'trainer.max_steps=x': trainer.max_steps='x': must be a whole number" in err
    assert not (folder / "runs").exists()


def test_env_names_versions_and_hardware(folder: Path) -> None:
    rows = dict(line.split(None, 1) for line in run("env")[0].splitlines())
    assert {
        "nemo-like",
        "python",
        "torch",
        "lightning",
        "cpu",
        "memory",
        "threads",
        "bf16",
        "gpu",
    } <= rows.keys()
    assert rows["python"].startswith(sys.version.split()[0])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["ls"],
        ["env"],
        ["validate", "--config-dir", ".", "+conf=llm/tiny"],
        ["_complete", "bash", "nemo-like run "],
    ],
    ids=lambda it: it[0],
)
def test_nothing_heavy_is_loaded(folder: Path, arguments: list[str]) -> None:
    code = (
        "import json, sys; from nemo_like.cli.main import main; main(sys.argv[1:]); "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not loaded & {"torch", "lightning", "numpy", "transformers", "matplotlib"}
    assert arguments[0] == "validate" or not loaded & {"hydra", "omegaconf", "yaml"}


def test_a_closed_pipe_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # it would hide what happens at the end
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "nemo_like.cli.main", "ls"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_module_of_the_room_is_a_command_or_serves_one() -> None:
    from nemo_like.cli import main

    modules = {path.stem for path in Path(main.__file__).parent.glob("*.py")}
    assert modules == {"__init__", "main", "parser", "completion", *main.COMMANDS}
