"""Processes of one run agree on its folder before they can talk."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like.core.console import process_rank, setup_logging
from nemo_like.core.launch import agree
from nemo_like.core.run import choose_run_dir


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def test_children_take_the_value_of_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agree("FOLDER", "mine") == "mine"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert agree("FOLDER", "theirs") == "mine"
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert agree("FOLDER", "new") == "new"


def test_the_rank_is_the_global_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_rank() == 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert process_rank() == 1
    monkeypatch.setenv("RANK", "5")
    assert process_rank() == 5


@pytest.mark.dist
def test_ranks_of_torchrun_agree_through_its_store(tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(
        "import os, sys\nfrom nemo_like.core.launch import agree\n"
        "rank = os.environ['RANK']\nvalue = agree('TIME', 'value of ' + rank)\n"
        "open(os.path.join(sys.argv[1], rank), 'w').write(value)\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    subprocess.run(
        [*command, script, tmp_path], check=True, capture_output=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["value of 0", "value of 0"]


def test_a_new_run_takes_the_next_free_folder(tmp_path: Path) -> None:
    assert choose_run_dir(tmp_path / "run", resume="never") == tmp_path / "run"
    for name in ("run", "run-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    assert choose_run_dir(tmp_path / "run", resume="auto") == tmp_path / "run"
    assert choose_run_dir(tmp_path / "run", resume="never") == tmp_path / "run-3"


def test_only_rank_zero_speaks_and_every_rank_may_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging()
    setup_logging()
    monkeypatch.setenv("RANK", "1")
    logger = logging.getLogger("nemo_like.test")
    logger.warning("quiet")
    logger.error("loud")
    monkeypatch.setenv("RANK", "0")
    logger.info("first")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["loud", "first"]
