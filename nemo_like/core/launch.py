"""How the processes of one run agree on a value before they can talk to each other.

The folder of a run may hold the time of its start, or the next free number; every process must use the same one.
Whoever starts processes itself (Lightning's launcher) hands its environment down; torchrun keeps a store; the tasks of
SLURM meet at rank zero.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from nemo_like.core.console import is_slurm_run, process_rank
from nemo_like.core.lifeline import tie_ranks
from nemo_like.core.rendezvous import LaunchError, count_slurm_tasks, meet_slurm_tasks

if TYPE_CHECKING:
    from torch.distributed import TCPStore

__all__ = ["LaunchError", "agree", "find_launch_faults", "outlast_gloo"]

_PREFIX = "NEMO_LIKE_AGREED_"
# Long against what a thread needs to drop a tensor, short against the start of a process.
_FAREWELL_S = 0.1


def agree(name: str, value: str) -> str:
    """Gives rank zero's value to every process of a run.

    Args:
        name: What it is about, in capitals; it becomes an environment variable for child processes.
        value: What this process would take; only rank zero's counts.

    Raises:
        LaunchError: The tasks of SLURM did not find each other.
    """
    variable = _PREFIX + name
    rank = process_rank()
    if rank == 0:
        os.environ[variable] = value
    if _has_agent_store():
        # The store outlives a restart of the ranks, which agree anew.
        key = f"{variable}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store = _agent_store()
        if rank == 0:
            store.set(key, value)
        return value if rank == 0 else str(store.get(key).decode())
    if "TORCHELASTIC_RUN_ID" not in os.environ and is_slurm_run() and count_slurm_tasks() > 1:
        return meet_slurm_tasks(variable, value, rank=rank)
    # Who hands values down has started the others: they live and die together.
    tie_ranks()
    return os.environ.get(variable, value)


def find_launch_faults(*, devices: int | str, num_nodes: int) -> Iterator[str]:
    """Where what SLURM has allotted is not what the run asks for; nothing outside SLURM and under torchrun.

    Args:
        devices: ``trainer.devices``.
        num_nodes: ``trainer.num_nodes``.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    if not is_slurm_run():
        if count_slurm_tasks() > 1:
            name = os.environ.get("SLURM_JOB_NAME")
            yield (
                f"SLURM_JOB_NAME={name}: Lightning takes a job of this name for a shell, and each of its "
                f"{count_slurm_tasks()} tasks for a run of its own; write SLURM_JOB_NAME=train before srun"
            )
        return
    tasks = int(os.environ["SLURM_NTASKS"])
    if tasks > 1 and "SLURM_STEP_NUM_TASKS" not in os.environ:
        yield (
            f"SLURM_NTASKS={tasks}, but srun did not start this process, so the other {tasks - 1} would never come; "
            "write srun before python"
        )
    nodes = int(os.environ.get("SLURM_NNODES", num_nodes))
    if nodes != num_nodes:
        yield (
            f"trainer.num_nodes={num_nodes}: SLURM gives this run {nodes} (SLURM_NNODES); "
            f"set trainer.num_nodes={nodes}, or ask for --nodes={num_nodes}"
        )
    per_node = os.environ.get("SLURM_NTASKS_PER_NODE")
    if per_node is None and tasks > 1:
        yield (
            f"SLURM_NTASKS={tasks} without SLURM_NTASKS_PER_NODE: Lightning needs the number for each node; "
            f"ask for --ntasks-per-node={tasks // nodes} instead of --ntasks"
        )
    elif isinstance(devices, int) and devices != int(per_node or tasks):
        yield (
            f"trainer.devices={devices}: SLURM starts {per_node or tasks} task(s) on each node; "
            f"set trainer.devices={per_node or tasks}, or ask for --ntasks-per-node={devices}"
        )


@functools.cache
def outlast_gloo() -> None:
    """Lets this process end only when gloo's threads have dropped what they hold; called where a group is made.

    A collective is done before its thread lets go of the tensors. If Python is on its way out by then, the thread that
    asks for the interpreter to free a tensor is ended in the middle of C++, and that aborts a process that was done:
    "terminate called without an active exception". Destroying the group does not wait for them.
    """
    atexit.register(time.sleep, _FAREWELL_S)


def _has_agent_store() -> bool:
    return (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and int(os.environ.get("WORLD_SIZE", "1")) > 1
    )


def _agent_store() -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=120),
    )
