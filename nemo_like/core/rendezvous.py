"""Where the tasks of a SLURM step meet before they have a process group: at a store that rank zero holds.

The store stands at MASTER_ADDR and MASTER_PORT, where the process group will be set up, and torch lets both use one
server: one port to have open, one place to look at when nobody comes.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import time
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING

from nemo_like.core.errors import NemoLikeError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# Large enough for hundreds of tasks that load Python from one file server.
TIMEOUT_S = 600.0
# Below the ports that Linux gives to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000


class LaunchError(NemoLikeError, RuntimeError):
    """Processes of one run that did not find each other."""


def count_slurm_tasks() -> int:
    """Tasks that srun has started together with this process; 1 outside of srun."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def meet_slurm_tasks(name: str, value: str, *, rank: int) -> str:
    """Gives rank zero's value to every task of this SLURM step, and returns when all have it.

    Args:
        name: What the value is about.
        value: What this task would take; only rank zero's counts.
        rank: Of this task.

    Raises:
        LaunchError: The port is taken, rank zero cannot be reached, or a task did not come in time.
    """
    host, port = choose_address()
    store = _open_store(host, port, rank)
    # Whatever else may answer at this port does not know the name of this step.
    key = f"{_step_name()}/{name}"
    own = [f"{key}/{other}" for other in range(count_slurm_tasks())]
    try:
        if rank == 0:
            store.set(key, value)
            store.set(own[0], "")
            store.wait(own, timedelta(seconds=TIMEOUT_S))
            return value
        agreed = str(store.get(key).decode())
        store.set(own[rank], "")
        return agreed
    except RuntimeError as error:
        if rank > 0:
            raise LaunchError(
                f"rank {rank} waited for rank 0 at {host}:{port}: {_first_line(error)}; see what rank 0 wrote"
            ) from error
        late = [str(other) for other, its in enumerate(own) if not store.check([its])]
        raise LaunchError(
            f"rank 0 waited {TIMEOUT_S:g} s at {host}:{port} for rank {', '.join(late)} of {len(own)}: see what "
            "they wrote, and whether their nodes reach this host and port (MASTER_ADDR, MASTER_PORT)"
        ) from error


def choose_address() -> tuple[str, int]:
    """Host and port of rank zero, from MASTER_ADDR and MASTER_PORT or, where they are not set, from the SLURM step.

    Both are set then, so that Lightning uses the same.
    """
    nodes = (
        os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "localhost"
    )
    host = os.environ.setdefault("MASTER_ADDR", find_first_host(nodes))
    # Steps of one job and restarts of it may share a node: each has a port of its own.
    port = _FIRST_PORT + zlib.crc32(_step_name().encode()) % _NUM_PORTS
    return host, int(os.environ.setdefault("MASTER_PORT", str(port)))


def find_first_host(nodes: str) -> str:
    """First host of a list in SLURM's notation: ``gpu[07-09,12],cpu1`` gives ``gpu07``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def _step_name() -> str:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(os.environ.get(name, "0") for name in names)


@functools.cache
def _open_store(host: str, port: int, rank: int) -> TCPStore:
    """One for the life of the process: with rank zero's it would be closed to all others."""
    from torch.distributed import TCPStore

    if rank > 0:
        _wait_for_port(host, port, rank)
    try:
        return TCPStore(
            host,
            port,
            is_master=rank == 0,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
    except RuntimeError as error:
        remedy = (
            "set MASTER_PORT to a free port, the same for all tasks" if rank == 0 else "see rank 0"
        )
        raise LaunchError(
            f"rank {rank} cannot use {host}:{port}: {_first_line(error)}; {remedy}"
        ) from error


def _wait_for_port(host: str, port: int, rank: int) -> None:
    """Knocks until rank zero opens; torch would write a stack trace at each failed attempt."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"rank {rank} did not reach rank 0 at {host}:{port} in {TIMEOUT_S:g} s ({error}): see what rank 0 "
                    "wrote, and whether this node reaches that host and port (MASTER_ADDR, MASTER_PORT)"
                ) from error
            time.sleep(0.2)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
