"""Notices that a run is to stop: a signal sets a flag, and whoever leads the run looks at it between two steps.

Nothing else happens inside a handler, which may interrupt anything: a save, a collective, a lock that is held.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from nemo_like.core.console import is_slurm_run, process_rank
from nemo_like.core.rendezvous import count_slurm_tasks

logger = logging.getLogger(__name__)

EXIT_STOPPED = os.EX_TEMPFAIL
"""75: the run was stopped early and saved; the same command goes on."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""130: Ctrl-C, saved likewise."""
DEFAULT_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")
ECHO_S = 1.0
"""Signals within this time of the first are the same notice: it often comes to a process by several ways (to its
process group, and passed on by srun, torchrun or a shell)."""
DOUBLE_PRESS_S = 0.3
"""The same for Ctrl-C after Ctrl-C, where a person may mean the second one."""


class StopRun(SystemExit):
    """Ends a run early: an exit that needs no handling, and that no ``except Exception`` swallows.

    Args:
        reason: Why, in a few words.
        code: Exit code of this process.
        is_settled: Whether everything is said and done (saved, requeued, noted); only the way out is left.
    """

    def __init__(self, reason: str, *, code: int, is_settled: bool = False) -> None:
        super().__init__(code)
        self.reason, self.is_settled = reason, is_settled


class _Listener:
    """The handlers that are installed, what stood there before, and the first signal that came."""

    def __init__(self) -> None:
        self.found: dict[int, Any] = {}
        self.given_back: dict[int, Any] = {}
        self.first: tuple[int, float] | None = None
        self.is_deaf = False
        self.pid = os.getpid()

    def take(self, numbers: Iterable[int]) -> None:
        """Listens to these signals and to no other."""
        wanted = set(numbers)
        for number in set(self.found) - wanted:
            self.give_back(number)
        for number in wanted:
            before = signal.getsignal(number)
            # A job in the background has Ctrl-C switched off, and it is to stay so.
            if before == self.handle or (number == signal.SIGINT and before is signal.SIG_IGN):
                continue
            self.found.setdefault(number, before)
            signal.signal(number, self.handle)

    def give_back(self, number: int) -> None:
        # None is a handler that was not installed by Python, which cannot put it back either.
        before = self.found.pop(number)
        self.given_back[number] = signal.SIG_DFL if before is None else before
        signal.signal(number, self.given_back[number])

    def handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.pid:
            _handle_in_child(number)
        elif number not in self.found:
            # Somebody kept this handler and has put it back after the end.
            signal.signal(number, self.given_back[number])
            signal.raise_signal(number)
        elif self.first is None:
            self.first = (number, time.monotonic())
        elif not self.is_deaf and not self.is_echo(number):
            _end_at_once(number)

    def is_echo(self, number: int) -> bool:
        assert self.first is not None
        first, since = self.first
        is_press = number == first == signal.SIGINT
        return time.monotonic() - since < (DOUBLE_PRESS_S if is_press else ECHO_S)


_current: _Listener | None = None


@contextmanager
def listen(signals: Iterable[str] = DEFAULT_SIGNALS) -> Iterator[None]:
    """Takes signals as notices inside the context, and leaves the handlers as they were found.

    Args:
        signals: Names, e.g. ``SIGTERM``.
    """
    is_first = start_listening(signals)
    try:
        yield
    finally:
        if is_first:
            stop_listening()


def start_listening(signals: Iterable[str] = DEFAULT_SIGNALS) -> bool:
    """Takes these signals as notices from now on.

    Returns:
        Whether nobody listened before, so that the caller has to stop it; False in a thread that may not listen.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        logger.warning(
            "signals are not noticed: the run is in thread %s, and Python hands them to the main thread only; "
            "stop it by the sentinel file or max_time",
            threading.current_thread().name,
        )
        return False
    is_first = _current is None
    if _current is None:
        _current = _Listener()
    _current.take(signal.Signals[name] for name in signals)
    return is_first


def stop_listening() -> dict[int, Any]:
    """Puts back the handlers that were found.

    Returns:
        The handlers by number of the signal.
    """
    global _current
    listener, _current = _current, None
    if listener is None:
        return {}
    found = dict(listener.found)
    for number in found:
        listener.give_back(number)
    return found


def reclaim() -> None:
    """Takes signals back from whoever has put a handler over ours: Lightning does at the start of a fit.

    Its handlers forward SIGTERM, communicate, and requeue on their own account.
    """
    if _current is not None and threading.current_thread() is threading.main_thread():
        _current.take(list(_current.found))


def find_signal() -> int | None:
    """Number of the signal that came, None while there was none."""
    return None if _current is None or _current.first is None else _current.first[0]


def forget() -> None:
    """Makes the next signal the first again: what the last one asked for is settled."""
    if _current is not None:
        _current.first = None


def ignore() -> None:
    """From now on signals change nothing: everything is saved, and the way out is short."""
    if _current is not None:
        _current.is_deaf = True
        _current.first = _current.first or (0, time.monotonic())


def leave_if_asked() -> None:
    """Ends a run of one process that has not begun to train, if a signal came; for the seams of a slow start.

    Several processes agree before their first step instead: one that left alone would keep the others waiting.

    Raises:
        StopRun: A signal came.
    """
    number = find_signal()
    if number is not None and is_alone():
        code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED
        raise StopRun(f"{signal.Signals(number).name} before the first step", code=code)


def is_alone() -> bool:
    """Whether no other process waits for this one: a run of one, or one that has not started the others yet."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or process_rank() > 0:
        return False
    return not (is_slurm_run() and count_slurm_tasks() > 1)


def outlast_notice(worker: int) -> None:
    """Lets a worker of a data loader work on when a notice comes to all processes of its group.

    A second SIGTERM ends it. To be given as ``worker_init_fn``.

    Args:
        worker: Its number; not used.
    """

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, once)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _do_nothing)


def measure_age_s() -> float:
    """Seconds since this process was started; where there is no /proc, since this module was imported."""
    with suppress(OSError):
        # The name of the command stands in brackets and may hold anything; the start is the 22nd field.
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_bytes().split()[0])
        return up_s - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - _IMPORTED_S


_IMPORTED_S = time.monotonic()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def _handle_in_child(number: int) -> None:
    """In a process that was forked: a notice to all of the group concerns the parent, but SIGTERM may be its word."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _end_at_once(number: int) -> None:
    with suppress(Exception):
        for child in multiprocessing.active_children():
            child.kill()
    # Not through Python's buffers, whose locks may be held by what was interrupted.
    name = signal.Signals(number).name
    with suppress(OSError):
        os.write(2, f"\nerror: {name} after the first notice; ended at once, unsaved\n".encode())
    os._exit(128 + number)
