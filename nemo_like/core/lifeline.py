"""A line between the ranks that one process has started: when one is gone, the others stop at once and say why.

What is left of a run when a rank dies is a matter of luck without it: on a CPU every other rank fails with a trace-back
of its own ("connection closed by peer"), on GPUs they wait in a collective, and without rank zero nobody ends them.
torchrun and ``srun --kill-on-bad-exit`` watch over their processes themselves.

Rank zero listens at a name in Linux's abstract namespace, which is gone with the process; each rank connects, and an
end of the connection is an end of the process.
"""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from types import TracebackType
from typing import NoReturn

from nemo_like.core.console import process_rank
from nemo_like.core.rendezvous import count_slurm_tasks

_VARIABLE = "NEMO_LIKE_LIFELINE"
# Told what ends the run before this process ends it.
LAST_WORDS: list[Callable[[str], object]] = []
# How long rank zero stays behind the others at most, and where it cannot see them.
FAREWELL_S, UNSEEN_S = 10.0, 1.0
# A rank whose peer is gone fails too; the one that was first is to speak first.
ECHO_S = 1.0
# How much longer than rank zero another rank may take to end.
GRACE_S = 15.0
_DONE, _FAILED = b"done", b"failed"


def tie_ranks() -> None:
    """Ties this process to the others of its run on this machine, if Lightning's launcher starts or has started them.

    May be called more than once.
    """
    if sys.platform != "linux" or "RANK" in os.environ:
        return
    if process_rank() == 0:
        os.environ[_VARIABLE] = _hold().address
    elif address := os.environ.get(_VARIABLE):
        _Tied(address)


def settle_exit(code: int) -> int:
    """The exit code of this process where all ranks end a run together, on purpose, with ``code``.

    Whoever started the ranks may take the first of them that ends with a code for a failure and kill the others:
    Lightning's launcher does, and so does ``srun --kill-on-bad-exit``. There rank zero speaks for all: the others end
    with 0, and it ends last. Under torchrun, and where each process is a container of its own, all end alike.
    """
    is_own_rank = "RANK" not in os.environ and "LOCAL_RANK" in os.environ
    is_task = "TORCHELASTIC_RUN_ID" not in os.environ and count_slurm_tasks() > 1
    if process_rank() > 0:
        return 0 if is_own_rank or is_task else code
    if is_own_rank or is_task:
        atexit.register(_see_others_off)
    return code


def _see_others_off() -> None:
    if not _hold.cache_info().currsize:
        time.sleep(UNSEEN_S)
        return
    deadline = time.monotonic() + FAREWELL_S
    while _hold().pids and time.monotonic() < deadline:
        time.sleep(0.02)


class _Holder:
    """Rank zero: hears from all others."""

    def __init__(self) -> None:
        self.address = f"nemo-like-{os.getpid()}-{secrets.token_hex(4)}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind("\0" + self.address)
        self.listener.listen()
        self.pids: dict[socket.socket, int] = {}
        self.ranks: dict[socket.socket, str] = {}
        self.cause = ""
        self.last_word = threading.RLock()
        self.interrupt_handler = signal.getsignal(signal.SIGINT)
        os.register_at_fork(after_in_child=self.close)
        threading.Thread(target=self.watch, name="lifeline", daemon=True).start()

    def watch(self) -> None:
        """Waits for ranks to come and go, until one goes that should not."""
        while not self.cause:
            for line in wait([self.listener, *self.pids]):
                if line is self.listener:
                    self.accept()
                else:
                    assert isinstance(line, socket.socket)
                    self.hear(line)
        self.stop()

    def accept(self) -> None:
        line, _ = self.listener.accept()
        if not self.pids:
            atexit.register(self.say_done)
            _speak_last(lambda: self.stop() if self.cause else None, self.end_all)
        pid, user, _ = struct.unpack(
            "3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        if user == os.getuid():
            self.pids[line] = pid

    def hear(self, line: socket.socket) -> None:
        try:
            message = line.recv(16)
        except OSError:
            message = b""
        if message and line not in self.ranks:
            self.ranks[line] = message.decode()
        elif message:
            self.cause = f"rank {self.ranks[line]} failed; its error stands above"
        else:
            rank, end = self.ranks.get(line, "?"), _find_end(self.pids.pop(line))
            line.close()
            if end:
                self.cause = f"rank {rank} {end}"
            if end.startswith("ended"):
                # It may be on purpose, and all others are about to end, too.
                time.sleep(ECHO_S)

    def stop(self) -> None:
        # After Ctrl-C the ranks end in any order, and Lightning sees to it.
        if self.is_interrupted():
            return
        with self.last_word:
            for tell in LAST_WORDS:
                with suppress(Exception):
                    tell(self.cause)
            _say(f"{self.cause}; the other ranks are stopped")
            self.end_all()
            os._exit(1)

    def is_interrupted(self) -> bool:
        now = signal.getsignal(signal.SIGINT)
        return now is signal.SIG_IGN and now is not self.interrupt_handler

    def end_all(self) -> None:
        """Ends all other ranks; nothing that they do from now on is a cause."""
        self.last_word.acquire()
        for pid in list(self.pids.values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def say_done(self) -> None:
        for line in list(self.pids):
            with suppress(OSError):
                line.sendall(_DONE)

    def close(self) -> None:
        """In a process forked off (a worker of a data loader), which must not hold the line for its parent."""
        for line in [self.listener, *self.pids]:
            line.close()


@functools.cache
def _hold() -> _Holder:
    return _Holder()


@functools.cache
class _Tied:
    """Any other rank: hears from rank zero."""

    def __init__(self, address: str) -> None:
        self.address, self.rank = address, process_rank()
        self.line = socket.socket(socket.AF_UNIX)
        try:
            self.line.connect("\0" + address)
            self.line.sendall(str(self.rank).encode())
        except OSError:
            self.stop("rank 0 died")
        os.register_at_fork(after_in_child=self.line.close)
        threading.Thread(target=self.watch, name="lifeline", daemon=True).start()
        _speak_last(lambda: None, self.say_failed)

    def watch(self) -> None:
        is_done = False
        with suppress(OSError):
            while message := self.line.recv(16):
                is_done = message == _DONE
        if is_done:
            time.sleep(GRACE_S)
            self.stop(f"rank 0 has ended, rank {self.rank} had not")
        self.stop("rank 0 died")

    def say_failed(self) -> None:
        with suppress(OSError):
            self.line.sendall(_FAILED)

    def stop(self, cause: str) -> NoReturn:
        # Of all ranks that see it, the first to take the name says it; it is free in a moment.
        speaker, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + ECHO_S / 4
        while time.monotonic() < deadline:
            with suppress(OSError):
                speaker.bind("\0" + self.address)
                _say(f"{cause}; the other ranks are stopped")
                time.sleep(ECHO_S / 2)
                break
            time.sleep(0.01)
        os._exit(1)


def _find_end(pid: int) -> str:
    """How a child has ended; nothing if it ended well or is no child of this process."""
    try:
        # It is left for Popen to collect.
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return ""
    if end is None or end.si_status == 0:
        return ""
    if end.si_code == os.CLD_EXITED:
        return f"ended with exit code {end.si_status}"
    return f"was killed by {signal.Signals(end.si_status).name}"


def _speak_last(is_echo: Callable[[], object], tell: Callable[[], object]) -> None:
    """Lets an uncaught exception wait for news of other ranks before it is shown, and tells them after it.

    Args:
        is_echo: Ends the process if another rank has failed.
        tell: What lets the other ranks know.
    """
    show = sys.excepthook

    def show_and_tell(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        time.sleep(ECHO_S if process_rank() else ECHO_S / 2)
        is_echo()
        show(kind, error, trace)
        # torch calls this hook from one of its own, which collects the text and writes it afterwards.
        threading.Timer(ECHO_S / 10, tell).start()

    sys.excepthook = show_and_tell


def _say(text: str) -> None:
    # Not through Python's buffer, whose lock may be held by the thread that is stuck.
    os.write(2, f"error: {text}\n".encode())
