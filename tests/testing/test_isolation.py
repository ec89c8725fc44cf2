"""A test may change what is global to the process; the next one finds it as it was (tests/conftest.py)."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import torch


def look() -> dict[str, Any]:
    return {
        "environment": {key: it for key, it in os.environ.items() if "PYTEST" not in key},
        "folder": os.getcwd(),
        "signal": signal.getsignal(signal.SIGUSR1),
        "handlers": list(logging.getLogger("nemo_like").handlers),
        "level": logging.getLogger("nemo_like").level,
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "group": torch.distributed.is_initialized(),
        "random": torch.initial_seed(),
    }


BEFORE: dict[str, Any] = {}


def test_first_a_test_changes_everything() -> None:
    BEFORE.update(look())
    os.environ["LEFT_BEHIND"] = "1"
    del os.environ["OMP_NUM_THREADS"]
    os.chdir("/")
    signal.signal(signal.SIGUSR1, lambda *_: None)
    logging.getLogger("nemo_like").addHandler(logging.NullHandler())
    logging.getLogger("nemo_like").setLevel(logging.DEBUG)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = True
    torch.manual_seed(1)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    after = look()
    assert [name for name in BEFORE if after[name] == BEFORE[name]] == []


def test_then_the_next_one_finds_it_as_it_was() -> None:
    after = look()
    assert {name: after[name] for name in BEFORE if after[name] != BEFORE[name]} == {}
