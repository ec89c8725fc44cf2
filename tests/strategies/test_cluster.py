"""Batch scripts, several launchers, and ranks that die: what happens on a cluster, on one machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_like.core import run
from nemo_like.core.checkpoint import find_checkpoints
from nemo_like.core.compose import check_run
from nemo_like.testing.corpus import write_corpus

ROOT = Path(__file__).resolve().parents[2]
SLURM = ROOT / "examples" / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))
PRETRAIN = "examples/llm/pretrain.py"
PAGE = (ROOT / "docs" / "howto" / "slurm.md").read_text("utf-8")
COMMANDS = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)).splitlines()
REHEARSAL = [it for it in COMMANDS if "rehearsal" in it]
TOLERANCE = 2e-5

SMALL = [
    "+conf=llm/quickstart", "data.tokenizer.train_vocab_size=300", "data.seq_len=32", "data.global_batch_size=4",
    "data.held_out_fraction=0.2", "strategy.micro_batch_size=1", "model.network.vocab_size=300",
    "model.network.hidden_size=32", "model.network.num_layers=2", "model.network.num_heads=2",
    "model.network.intermediate_size=64", "model.network.max_positions=32", "model.network.dropout=0",
    "model.sample_tokens=5", "trainer.max_steps=4", "trainer.val_every_n_steps=2", "trainer.val_batches=2",
    "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "checkpoint.every_n_steps=2",
    "schedule.warmup_steps=2", "callbacks.report=null",
]  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    write_corpus(tmp_path / "corpus")
    return [
        *SMALL,
        f"data.corpus={tmp_path}/corpus/*.jsonl.zst",
        f"data.cache_dir={tmp_path}/cache",
    ]


def environment(*first: Path) -> dict[str, str]:
    """A shell outside any job, in which ``first``, the stand-ins and this Python come before all else."""
    foreign = ("SLURM_", "TORCHELASTIC_", "MASTER_", "NEMO_LIKE_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(foreign) and not name.endswith(("RANK", "WORLD_SIZE"))
    }
    path = [*first, SLURM / "rehearsal", Path(sys.executable).parent, os.environ["PATH"]]
    return {**kept, "PATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}


def shell(command: str, *first: Path, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment(*first),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a ``python`` and a ``torchrun`` that only note how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    names = "PROCID", "LOCALID", "NODEID", "NTASKS"
    noted = " ".join(f'"$SLURM_{name}"' for name in names)
    for name in ("python", "torchrun"):
        (folder / name).write_text(
            f'#!/usr/bin/env bash\nSLURM_PROCID="${{SLURM_PROCID:-}}"\n'
            f'printf "%s\\0" {noted} "$MASTER_ADDR" "$OMP_NUM_THREADS" "$@" > "{tmp_path}/called.$SLURM_PROCID"\n'
            f'if [[ "$*" == *fail=$SLURM_PROCID ]]; then exit 3; elif [[ "$*" == *fail=* ]]; then exec sleep 60; fi\n'
        )
        (folder / name).chmod(0o755)
    return folder


def calls(folder: Path) -> list[list[str]]:
    found = sorted(folder.glob("called.*"), key=lambda it: int(it.suffix[1:] or 0))
    return [it.read_text().split("\0")[:-1] for it in found]


def read_losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def load_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    from nemo_like.collections.llm.decoder import DecoderModel

    return DecoderModel.load(find_checkpoints(run_dir / "checkpoints")[-1]).state_dict()


def assert_same_run(folder: Path, small: list[str], tmp_path: Path) -> None:
    """``folder`` holds what one process makes of the same command."""
    alone = tmp_path / "alone"
    with pytest.raises(SystemExit, match="0"):
        run.main("pretrain", [*small, f"run_dir={alone}", "trainer.devices=1"])
    assert len(read_losses(alone)) == 4
    torch.testing.assert_close(
        torch.tensor(read_losses(folder)), torch.tensor(read_losses(alone)), rtol=TOLERANCE, atol=0
    )
    torch.testing.assert_close(
        load_weights(folder), load_weights(alone), rtol=TOLERANCE, atol=TOLERANCE
    )


def test_there_are_scripts_and_commands() -> None:
    names = [it.stem for it in SCRIPTS]
    assert names == ["multi_node", "preemptible", "single_node"]
    assert len(COMMANDS) == 6
    assert len(REHEARSAL) == 1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda it: it.stem)
def test_a_batch_script_is_valid_bash_and_starts_one_rank_for_each_gpu(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    # SLURM reads its lines up to the first command.
    assert text.rindex("#SBATCH") < text.index("set -euo pipefail")
    assert "--kill-on-bad-exit=1" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_starts_a_run_that_composes(
    command: str, stand_in: Path, tmp_path: Path
) -> None:
    # The command puts the stand-ins before all else by itself, where it needs them.
    done = shell(command, stand_in)
    assert done.returncode == 0, done.stderr
    ranks = calls(tmp_path)
    (words,) = {tuple(call[call.index(PRETRAIN) + 1 :]) for call in ranks}
    assert check_run("pretrain", list(words)) == []
    if command.startswith("torchrun"):
        return
    nodes, devices = (
        int(next(it for it in words if it.startswith(key)).partition("=")[2])
        for key in ("trainer.num_nodes", "trainer.devices")
    )
    size = nodes * devices
    assert [call[:4] for call in ranks] == [
        [str(rank), str(rank % devices), str(rank // devices), str(size)] for rank in range(size)
    ]


def test_a_script_passes_the_words_of_the_run_unchanged(stand_in: Path, tmp_path: Path) -> None:
    words = ["+conf=llm/quickstart", "model.sample_prompt=It was a", "run_dir=x_${now:%H}", "a=*"]
    done = shell(f"sbatch --nodes=2 {SLURM}/multi_node.sbatch {shlex.join(words)}", stand_in)
    assert done.returncode == 0, done.stderr
    assert [call[-4:] for call in calls(tmp_path)] == [words] * 16
    assert {call[4] for call in calls(tmp_path)} == {"localhost"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda it: it.stem)
def test_a_task_that_fails_ends_the_job_and_the_other_tasks(
    script: Path, stand_in: Path, tmp_path: Path
) -> None:
    started = time.monotonic()
    done = shell(f"sbatch --ntasks-per-node=2 {script} fail=1", stand_in)
    # The highest code of all tasks, as with SLURM: the other one was killed.
    assert done.returncode == 128 + signal.SIGKILL
    assert "task 1: Exited with exit code 3" in done.stderr
    assert time.monotonic() - started < 30


@pytest.mark.dist
def test_two_nodes_of_slurm_train_like_one_process(small: list[str], tmp_path: Path) -> None:
    # A node that is slow to start has another time on its clock.
    (tmp_path / "bin").mkdir()
    late = tmp_path / "bin" / "python"
    late.write_text(f'#!/bin/sh\nsleep "$((2 * SLURM_PROCID))"\nexec "{sys.executable}" "$@"\n')
    late.chmod(0o755)
    words = [*small[1:], f"run_dir={tmp_path}/two_${{now:%H%M%S}}", "resume=never"]
    done = shell(f"{REHEARSAL[0]} {shlex.join(words)}", late.parent)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("two_*")
    assert_same_run(folder, small, tmp_path)


@pytest.mark.slow
@pytest.mark.dist
def test_two_launchers_of_torchrun_train_like_one_process(small: list[str], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*small, f"run_dir={tmp_path}/two_${{now:%H%M%S}}", "resume=never"]
    words += ["trainer.num_nodes=2", "trainer.devices=1"]
    nodes = [
        subprocess.Popen(
            ["torchrun", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=localhost",
             f"--master-port={port}", PRETRAIN, *words],
            cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True,
        )
        for node in (0, 1)
    ]  # fmt: skip
    said = [node.communicate(timeout=280)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    (folder,) = tmp_path.glob("two_*")
    assert_same_run(folder, small, tmp_path)


# Ranks that the run starts itself.


@pytest.fixture
def four_ranks(small: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that trains on, with data loader workers, as the leader of a session of its own."""
    words = [*small, f"run_dir={tmp_path}/run", "trainer.devices=4", "trainer.max_steps=1000000",
             "trainer.val_every_n_steps=1000000", "checkpoint.every_n_steps=1000000", "data.num_workers=1"]  # fmt: skip
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, ROOT / PRETRAIN, *words],
            env=environment(), stdout=said, stderr=said, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while (
            not (metrics := tmp_path / "run" / "metrics.jsonl").exists() or not metrics.read_text()
        ):
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < deadline, (tmp_path / "said").read_text()
            time.sleep(0.2)
        yield process
    finally:
        for pid in session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def session(leader: int) -> dict[int, str]:
    """Processes of a session that are alive, and the LOCAL_RANK that each was started with."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(its) == leader and state not in "ZX":
                variables = (folder / "environ").read_text().split("\0")
                rank = [it.partition("=")[2] for it in variables if it.startswith("LOCAL_RANK=")]
                found[int(folder.name)] = rank[0] if rank else ""
        except (OSError, ValueError):
            continue
    return found


def kill_and_wait(run_of_four: subprocess.Popen[str], pid: int) -> float:
    """Seconds from the death of one process to the end of the last one."""
    assert {"1", "2", "3"} <= set(session(run_of_four.pid).values())
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    while session(run_of_four.pid) and time.monotonic() - killed < 60:
        run_of_four.poll()
        time.sleep(0.1)
    return time.monotonic() - killed


@pytest.mark.dist
def test_without_one_of_four_ranks_all_stop_and_say_which(
    four_ranks: subprocess.Popen[str], tmp_path: Path
) -> None:
    oldest = min(pid for pid, rank in session(four_ranks.pid).items() if rank == "2")
    assert kill_and_wait(four_ranks, oldest) < 30
    assert four_ranks.wait() == 1
    said = (tmp_path / "said").read_text()
    assert said.endswith("error: rank 2 was killed by SIGKILL; the other ranks are stopped\n")
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.dist
def test_without_the_first_of_four_ranks_none_is_orphaned(
    four_ranks: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert kill_and_wait(four_ranks, four_ranks.pid) < 30
    assert four_ranks.wait() == -signal.SIGKILL
    said = (tmp_path / "said").read_text()
    assert said.endswith("error: rank 0 died; the other ranks are stopped\n")
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_one_rank_stops_the_other(
    rank: int, small: list[str], tmp_path: Path
) -> None:
    (tmp_path / "faulty.py").write_text(
        "import lightning.pytorch as pl\n"
        "class Faulty(pl.Callback):\n"
        "    def on_train_batch_end(self, trainer, *arguments):\n"
        f"        if trainer.global_rank == {rank} and trainer.global_step == 2:\n"
        "            raise RuntimeError('broken here')\n"
    )
    words = [*small, f"run_dir={tmp_path}/run", "trainer.devices=2", "trainer.max_steps=1000000",
             "+callbacks.faulty._target_=faulty.Faulty", "allow_targets=[faulty.]"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, ROOT / PRETRAIN, *words], capture_output=True, text=True, timeout=280, check=False,
        env={**environment(), "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "RuntimeError: broken here" in done.stderr
