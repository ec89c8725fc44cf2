"""What every test stands on: one thread, no network, and a process that is left as it was found."""

from __future__ import annotations

import logging
import os

# Before torch and its kin are imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import random
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

# SIGALRM belongs to pytest-timeout; SIGKILL and SIGSTOP cannot be caught.
WATCHED_SIGNALS = sorted(
    set(signal.valid_signals()) - {signal.SIGALRM, signal.SIGKILL, signal.SIGSTOP}
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _process_left_as_found() -> Iterator[None]:
    """Puts back what is global to a process; a test may change any of it and need not clean up."""
    undo = [
        _remember_environment(),
        _remember_signal_handlers(),
        _remember_logging(),
        _remember_torch(),
    ]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        # DeepSpeed keeps a copy of the group that is gone.
        if "deepspeed.utils.groups" in sys.modules:
            sys.modules["deepspeed.utils.groups"]._WORLD_GROUP = None
    for restore in undo:
        restore()


def _remember_environment() -> Callable[[], None]:
    before, folder = dict(os.environ), os.getcwd()

    def restore() -> None:
        os.chdir(folder)
        # Only the differences: pytest itself rewrites a variable around each phase of a test.
        for name in set(os.environ) - set(before):
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value and name != "PYTEST_CURRENT_TEST":
                os.environ[name] = value

    return restore


def _remember_signal_handlers() -> Callable[[], None]:
    before = {number: signal.getsignal(number) for number in WATCHED_SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            # None: a handler that C installed, which Python cannot put back.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)

    return restore


def _remember_logging() -> Callable[[], None]:
    loggers = [logging.getLogger(name) for name in ("", "nemo_like", "lightning.pytorch")]
    before = [(it, it.level, list(it.handlers), list(it.filters), it.propagate) for it in loggers]

    def restore() -> None:
        for logger, level, handlers, filters, propagate in before:
            logger.setLevel(level)
            logger.handlers[:], logger.filters[:], logger.propagate = handlers, filters, propagate

    return restore


def _remember_torch() -> Callable[[], None]:
    cudnn: Any = torch.backends.cudnn
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    precision = torch.get_float32_matmul_precision()
    flags = cudnn.deterministic, cudnn.benchmark

    def restore() -> None:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_float32_matmul_precision(precision)
        cudnn.deterministic, cudnn.benchmark = flags

    return restore
