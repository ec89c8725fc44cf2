"""Processes of one run agree on its folder before they can talk."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like.core.console import process_rank, setup_logging
from nemo_like.core.launch import agree, find_launch_faults
from nemo_like.core.run import choose_run_dir


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "NEMO_LIKE_")) or name.endswith("RANK"):
            monkeypatch.delenv(name)


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


def test_slurm_counts_only_where_its_tasks_are_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert process_rank() == 0
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert process_rank() == 3
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert process_rank() == 1


ALLOTTED = {
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS_PER_NODE": "4",
}


def faults_of(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> list[str]:
    for name, value in {**ALLOTTED, **changes}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    return list(find_launch_faults(devices=4, num_nodes=2))


def test_a_run_that_fits_what_slurm_gives_has_no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(find_launch_faults(devices=7, num_nodes=7)) == []
    assert faults_of(monkeypatch) == []
    assert list(find_launch_faults(devices="auto", num_nodes=2)) == []
    # torchrun makes ranks of its own, whatever the job has.
    assert faults_of(monkeypatch, SLURM_NNODES="5", TORCHELASTIC_RUN_ID="1") == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_NNODES": "3"}, "trainer.num_nodes=2: SLURM gives this run 3 (SLURM_NNODES); set trainer.num_nodes=3"),
        ({"SLURM_NTASKS_PER_NODE": "5"}, "trainer.devices=4: SLURM starts 5 task(s) on each node; set "
         "trainer.devices=5"),
        ({"SLURM_NTASKS_PER_NODE": None}, "SLURM_NTASKS=8 without SLURM_NTASKS_PER_NODE: Lightning needs the number "
         "for each node; ask for --ntasks-per-node=4"),
        ({"SLURM_STEP_NUM_TASKS": None}, "SLURM_NTASKS=8, but srun did not start this process, so the other 7"),
        ({"SLURM_JOB_NAME": "interactive"}, "SLURM_JOB_NAME=interactive: Lightning takes a job of this name for a "
         "shell, and each of its 8 tasks"),
    ],
)  # fmt: skip
def test_what_slurm_gives_and_the_run_does_not_ask_for_is_named(
    changes: dict[str, str | None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fault,) = faults_of(monkeypatch, **changes)
    assert fault.startswith(said)
    assert "\n" not in fault


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


_LEAVES_AT_ONCE = """
import sys
import torch.distributed as dist, torch
from nemo_like.core.launch import outlast_gloo
outlast_gloo()
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
for _ in range(4):
    dist.all_reduce(torch.ones(200_000), async_op=True)
"""


@pytest.mark.dist
def test_a_process_whose_collective_just_ended_leaves_without_being_aborted(tmp_path: Path) -> None:
    # Without the wait one in three of these processes dies of SIGABRT.
    words = [sys.executable, "-c", _LEAVES_AT_ONCE, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*words, str(rank)], stderr=subprocess.PIPE) for rank in range(2)]
    ends = [(rank.communicate(timeout=100)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0, 0], ends
