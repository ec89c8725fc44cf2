"""When one rank is gone, the others stop at once, and one line says which it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

# What Lightning's launcher does, without Lightning: three more of the same, told apart by LOCAL_RANK.
RANKS = """
import io, os, subprocess, sys, time
from nemo_like.core.launch import agree
agree("START_TIME", "now")
rank = int(os.environ.get("LOCAL_RANK", "0"))
if rank == 0:
    others = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": str(it)})
        for it in (1, 2, 3)
    ]
os.write(1, f"{rank} {os.getpid()}\\n".encode())  # in one piece, whatever the buffering
while not os.path.exists("go"):
    time.sleep(0.05)
action, victim = sys.argv[1], int(sys.argv[2])
if action == "fork" and rank == 0:
    if os.fork() == 0:
        # A worker that outlives its rank must not hold the line.
        os.closerange(0, 3)
        time.sleep(30)
        os._exit(0)
if rank == victim and action == "raise":
    show = sys.excepthook
    def show_late(*error):  # as torch does once there is a process group
        real, sys.stderr = sys.stderr, io.StringIO()
        show(*error)
        text, sys.stderr = sys.stderr.getvalue(), real
        real.write(text)
    sys.excepthook = show_late
    raise ValueError("boom")
if rank == victim and action == "exit":
    sys.exit(3)
if action == "end":
    if rank == 0:
        sys.exit([it.wait() for it in others] != [0, 0, 0])
    time.sleep(0.2 * rank)
    sys.exit(0)
if action == "linger" and rank != victim:
    sys.exit(0)
time.sleep(0.3 if action == "echo" else 60)
raise RuntimeError("Connection closed by peer")
"""


def run_ranks(folder: Path, action: str, victim: int, *, kill: bool = False) -> tuple[int, str]:
    """Exit code of rank zero, and what all ranks have said, after all of them are gone."""
    (folder / "ranks.py").write_text(RANKS)
    environment = {it: value for it, value in os.environ.items() if not it.startswith("NEMO_LIKE_")}
    with (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "ranks.py", action, str(victim)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(4)]
            pids = {int(rank): int(pid) for rank, pid in map(str.split, lines)}
            (folder / "go").touch()
            if kill:
                time.sleep(0.2)
                os.kill(pids[victim], signal.SIGKILL)
            process.stdout.read()  # to its end: nobody holds it any longer
            code = process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        errors.seek(0)
        return code, errors.read()


def test_ranks_that_end_well_say_nothing(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, "end", 0) == (0, "")


@pytest.mark.parametrize("action", ["wait", "echo"])
def test_a_killed_rank_is_named_once(tmp_path: Path, action: str) -> None:
    # echo: the others fail for want of it while it dies, and are not heard.
    code, said = run_ranks(tmp_path, action, 2, kill=True)
    assert said == "error: rank 2 was killed by SIGKILL; the other ranks are stopped\n"
    assert code == 1


@pytest.mark.parametrize("action", ["wait", "fork"])
def test_without_rank_zero_the_others_stop(tmp_path: Path, action: str) -> None:
    started = time.monotonic()
    code, said = run_ranks(tmp_path, action, 0, kill=True)
    assert time.monotonic() - started < 20
    assert said == "error: rank 0 died; the other ranks are stopped\n"
    assert code == -signal.SIGKILL


@pytest.mark.parametrize("victim", [0, 1])
def test_an_exception_is_shown_once(tmp_path: Path, victim: int) -> None:
    code, said = run_ranks(tmp_path, "raise", victim)
    assert said.count("Traceback") == 1
    assert "ValueError: boom" in said
    if victim:
        assert said.endswith(
            "\nerror: rank 1 failed; its error stands above; the other ranks are stopped\n"
        )
    assert code == 1


def test_an_exit_code_is_named(tmp_path: Path) -> None:
    code, said = run_ranks(tmp_path, "exit", 3)
    assert said == "error: rank 3 ended with exit code 3; the other ranks are stopped\n"
    assert code == 1


@pytest.mark.slow
def test_a_rank_that_does_not_end_after_rank_zero_is_stopped(tmp_path: Path) -> None:
    started = time.monotonic()
    code, said = run_ranks(tmp_path, "linger", 2)
    assert said == "error: rank 0 has ended, rank 2 had not; the other ranks are stopped\n"
    assert code == 0
    assert time.monotonic() - started < 30
