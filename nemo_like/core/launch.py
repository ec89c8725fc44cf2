"""How the processes of one run agree on a value before they can talk to each other.

The folder of a run may hold the time of its start, or the next free number; every process must use the same one.
Whoever starts processes itself (Lightning's launcher) hands its environment down; torchrun keeps a store.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from nemo_like.core.console import process_rank

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_PREFIX = "NEMO_LIKE_AGREED_"


def agree(name: str, value: str) -> str:
    """Gives rank zero's value to every process of a run.

    Args:
        name: What it is about, in capitals; it becomes an environment variable for child processes.
        value: What this process would take; only rank zero's counts.
    """
    variable = _PREFIX + name
    if process_rank() == 0:
        os.environ[variable] = value
        if _has_agent_store():
            _agent_store().set(variable, value)
        return value
    if variable in os.environ:
        return os.environ[variable]
    if _has_agent_store():
        return str(_agent_store().get(variable).decode())
    return value


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
