"""The tasks of a SLURM step agree on a value before they have a process group, or say why they cannot."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from nemo_like.core import rendezvous
from nemo_like.core.launch import agree
from nemo_like.core.rendezvous import (
    LaunchError,
    choose_address,
    find_first_host,
    meet_slurm_tasks,
)


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A step of three tasks on this machine; the port at which they meet."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_")) or name.endswith("RANK"):
            monkeypatch.delenv(name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    for name, value in {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "3",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(number),
    }.items():
        monkeypatch.setenv(name, value)
    rendezvous._open_store.cache_clear()
    yield number
    rendezvous._open_store.cache_clear()


def test_all_tasks_take_the_value_of_rank_zero() -> None:
    def meet(rank: int) -> list[str]:
        return [meet_slurm_tasks(name, f"{name} of {rank}", rank=rank) for name in ("time", "dir")]

    with ThreadPoolExecutor(3) as pool:
        agreed = list(pool.map(meet, range(3)))
    assert agreed == [["time of 0", "dir of 0"]] * 3


def test_a_step_of_one_task_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert agree("FOLDER", "mine") == "mine"


def test_rank_zero_names_those_that_do_not_come(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(rendezvous, "TIMEOUT_S", 0.5)
    with pytest.raises(
        LaunchError, match=f"rank 0 waited 0.5 s at localhost:{port} for rank 1, 2 of 3"
    ):
        agree("FOLDER", "mine")


def test_a_task_says_where_it_looked_for_rank_zero(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(rendezvous, "TIMEOUT_S", 0.5)
    monkeypatch.setenv("SLURM_PROCID", "2")
    with pytest.raises(
        LaunchError, match=f"rank 2 did not reach rank 0 at localhost:{port} in 0.5 s .*refused"
    ):
        agree("FOLDER", "mine")


def test_another_job_at_the_same_port_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(rendezvous, "TIMEOUT_S", 0.5)
    monkeypatch.setenv("SLURM_PROCID", "1")
    other = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    other.set("78.0.0/NEMO_LIKE_AGREED_FOLDER", "theirs")
    with pytest.raises(LaunchError, match=f"rank 1 waited for rank 0 at localhost:{port}: wait"):
        agree("FOLDER", "mine")


def test_a_port_that_is_taken_is_named(port: int) -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", port))
        taken.listen()
        with pytest.raises(
            LaunchError, match=f"rank 0 cannot use localhost:{port}: .*set MASTER_PORT to a free"
        ):
            agree("FOLDER", "mine")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node01", "node01"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("cpu1,gpu[07-09]", "cpu1"),
        ("rack[2-3]n[05,07]", "rack2n05"),
        ("localhost,localhost", "localhost"),
    ],
)
def test_rank_zero_is_on_the_first_host_of_the_list(nodes: str, first: str) -> None:
    assert find_first_host(nodes) == first


def test_each_step_and_restart_has_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = set()
    for name, value in (("JOB_ID", "1077"), ("STEP_ID", "4"), ("RESTART_COUNT", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
        monkeypatch.delenv("MASTER_PORT")
        ports.add(choose_address()[1])
        # Lightning takes the same.
        assert os.environ["MASTER_PORT"] == str(choose_address()[1])
    assert len(ports) == 3
    assert all(10_000 <= number < 30_000 for number in ports)
