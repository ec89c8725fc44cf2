from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from nemo_like.core.errors import DataError
from nemo_like.testing.world import WorldError, run_world

pytestmark = pytest.mark.dist


@dataclass
class Share:
    """Defined in a test file outside any package, and sent both ways."""

    rank: int
    total: torch.Tensor


def add_up(tensor: torch.Tensor) -> Share:
    rank = torch.distributed.get_rank()
    total = tensor * (rank + 1)
    torch.distributed.all_reduce(total)
    return Share(rank=rank, total=total)


def look_around() -> dict[str, object]:
    environment = TorchElasticEnvironment()
    return {
        "torchrun": TorchElasticEnvironment.detect(),
        "rank": (environment.global_rank(), environment.local_rank(), os.environ["RANK"]),
        "world": environment.world_size(),
        "main": (environment.main_address, environment.main_port),
        "threads": torch.get_num_threads(),
        "group": torch.distributed.is_initialized(),
        "mine": os.environ.get("MINE"),
        "pid": os.getpid(),
    }


def join_by_environment() -> float:
    torch.distributed.init_process_group("gloo")
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    return ones.item()


def fail_on_one() -> None:
    if torch.distributed.get_rank() == 1:
        raise DataError("no text", file="a.jsonl.zst", line=7)
    torch.distributed.barrier()  # waits for a rank that never comes


def die_on_one() -> None:
    if torch.distributed.get_rank() == 1:
        os.write(2, b"last words of rank one")
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def sleep_with_child(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    name = f"{os.environ['RANK']}.pids"
    (folder / name).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def is_gone(pid: int) -> bool:
    """Gone, or dead and waiting for its parent to notice."""
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_ranks_talk_to_each_other_and_answer_in_order() -> None:
    shares = run_world(3, add_up, torch.tensor([1.0, 2.0]))
    assert [it.rank for it in shares] == [0, 1, 2]
    assert all(torch.equal(it.total, torch.tensor([6.0, 12.0])) for it in shares)


def test_world_looks_like_torchrun_and_keeps_the_callers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_world(1, look_around)  # the server that ranks are forked from now runs, without MINE
    monkeypatch.setenv("MINE", "yes")
    seen = run_world(2, look_around, process_group=False)
    assert all(it["torchrun"] for it in seen)
    assert [it["rank"] for it in seen] == [(0, 0, "0"), (1, 1, "1")]
    assert {it["world"] for it in seen} == {2}
    assert len({it["main"] for it in seen}) == 1
    assert {(it["threads"], it["group"], it["mine"]) for it in seen} == {(1, False, "yes")}
    assert len({it["pid"] for it in seen} | {os.getpid()}) == 3


def test_ranks_can_join_by_the_variables_alone() -> None:
    assert run_world(2, join_by_environment, process_group=False) == [2.0, 2.0]


def test_first_failure_is_raised_with_rank_and_trace_back_and_waits_for_nobody() -> None:
    start = time.monotonic()
    with pytest.raises(WorldError, match=r"fail_on_one: rank 1 of 2 failed: .*DataError") as caught:
        run_world(2, fail_on_one, timeout_s=60)
    assert caught.value.rank == 1
    assert "a.jsonl.zst:7: no text" in str(caught.value)
    assert "in fail_on_one" in str(caught.value)
    assert time.monotonic() - start < 30


def test_killed_rank_is_named_with_its_last_words() -> None:
    with pytest.raises(
        WorldError, match=r"rank 1 of 2 failed: exit code -9\n.*\nlast words of rank"
    ):
        run_world(2, die_on_one, timeout_s=60)


def test_nothing_is_left_running_after_the_time_is_over(tmp_path: Path) -> None:
    run_world(1, look_around)  # the server that ranks are forked from now runs: 3 s are enough
    with pytest.raises(WorldError, match=r"rank\(s\) \[0, 1\] of 2 still ran after 3 s"):
        run_world(2, sleep_with_child, tmp_path, timeout_s=3)
    pids = [int(pid) for it in tmp_path.glob("*.pids") for pid in it.read_text().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 5
    while not all(map(is_gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if not is_gone(pid)] == []


def test_world_needs_a_rank_and_a_function_that_can_be_found() -> None:
    with pytest.raises(ValueError, match="size=0: a world has at least 1 rank"):
        run_world(0, look_around)
    with pytest.raises(ValueError, match=r"lambda.*: run_world takes a function from the top"):
        run_world(1, lambda: None)
