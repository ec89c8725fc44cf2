"""A world of processes on one machine: the same code that runs on a cluster, over gloo."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from nemo_like.core.launch import outlast_gloo

# What every rank imports anyway: loaded once, in the process that the ranks are forked from.
PRELOADED = ["torch", "torch.distributed", "lightning.pytorch"]


class WorldError(RuntimeError):
    """A rank that failed.

    Args:
        message: Rank, size, function, and the trace-back of the rank.
        rank: The first one that failed; what the others say is most often only that it was gone.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def run_world(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 120,
    process_group: bool = True,
) -> list[Any]:
    """Calls ``function(*arguments)`` on every rank of a new world.

    Each rank is a fresh process (forked from a clean server, so that torch is imported once and not
    once a rank) with one thread, the environment of the caller, and the variables that torchrun
    sets. The ranks and what they started are gone when this returns.

    Args:
        size: Number of ranks, at least 1; one rank is a process of its own as well.
        function: Defined at the top of a module; the module may be a test file outside any package.
        arguments: Anything that pickles.
        timeout_s: For the whole call.
        process_group: Set up torch's default process group (gloo) before the call; False where the
            function does so.

    Returns:
        What each rank returned, by rank; anything that pickles.

    Raises:
        WorldError: A rank raised, died, or the time was over.
        ValueError: ``size`` is below 1, or a rank could not find ``function`` by its name.
    """
    if size < 1:
        raise ValueError(f"size={size}: a world has at least 1 rank")
    if not isinstance(function, FunctionType) or "<" in function.__qualname__:
        raise ValueError(f"{function!r}: run_world takes a function from the top of a module")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="world-") as name, _free_port() as port:
        folder = Path(name)
        call = (function.__module__, function.__code__.co_filename, function.__qualname__)
        (folder / "arguments").write_bytes(pickle.dumps(arguments))
        ranks = [
            context.Process(
                target=_run_rank,
                args=(folder, call, _environment(rank, size, port), process_group, timeout_s),
                name=f"rank {rank} of {size}",
            )
            for rank in range(size)
        ]
        try:
            for process in ranks:
                process.start()
            _wait(ranks, folder, f"{call[0]}.{call[2]}", timeout_s)
        finally:
            _kill(ranks)
        results = [(folder / f"{rank}.result").read_bytes() for rank in range(size)]
    return [pickle.loads(it) for it in results]  # noqa: TID251 (bytes of our own children)


@contextmanager
def _free_port() -> Iterator[int]:
    """A port that nobody else is given while the world lives: bound here, never listened to."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The caller's variables and torchrun's: by those Lightning knows not to start processes."""
    world = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "run_world",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "OMP_NUM_THREADS": 1,
    }
    return {**os.environ, **{name: str(value) for name, value in world.items()}}


def _wait(ranks: list[ForkServerProcess], folder: Path, name: str, timeout_s: float) -> None:
    """Returns when all ranks are through; raises at the first that is not."""
    deadline = time.monotonic() + timeout_s
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        left_s = deadline - time.monotonic()
        ended = multiprocessing.connection.wait(list(running), timeout=max(left_s, 0))
        if not ended:
            rank = min(running.values())
            raise WorldError(
                f"{name}: rank(s) {sorted(running.values())} of {len(ranks)} still ran after "
                f"{timeout_s} s\n{_last_words(folder, rank)}",
                rank=rank,
            )
        for sentinel in ended:
            running.pop(sentinel)
        _raise_first_failure(ranks, folder, name)


def _raise_first_failure(ranks: list[ForkServerProcess], folder: Path, name: str) -> None:
    failed = [rank for rank, process in enumerate(ranks) if process.exitcode not in (0, None)]
    if not failed:
        return
    # Several may have failed since the last look: the earliest is the cause, the others its echo.
    texts = {rank: folder / f"{rank}.error" for rank in failed}
    written = {rank: it.stat().st_mtime_ns for rank, it in texts.items() if it.exists()}
    rank = min(written, key=lambda it: written[it]) if written else failed[0]
    if rank in written:
        what = texts[rank].read_text(encoding="utf-8")
    else:
        what = f"exit code {ranks[rank].exitcode}\n{_last_words(folder, rank)}"
    raise WorldError(f"{name}: rank {rank} of {len(ranks)} failed: {what}", rank=rank)


def _last_words(folder: Path, rank: int) -> str:
    """The end of what a rank wrote to its terminal."""
    path = folder / f"{rank}.output"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return f"rank {rank} wrote last:\n{text[-2000:]}" if text else f"rank {rank} wrote nothing"


def _kill(ranks: list[ForkServerProcess]) -> None:
    """Ends all ranks and what they have started (each rank leads a session of its own)."""
    started = [process for process in ranks if process.pid is not None]
    for process in started:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        with suppress(ProcessLookupError):
            process.kill()
    for process in started:
        process.join()


# On the other side: what a rank does.


def _run_rank(
    folder: Path,
    call: tuple[str, str, str],
    environment: dict[str, str],
    process_group: bool,
    timeout_s: float,
) -> None:
    os.setsid()
    rank = environment["RANK"]
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    _die_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    try:
        result = _call(folder, call, process_group, timeout_s)
        _write(folder / f"{rank}.result", pickle.dumps(result))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        summary = traceback.format_exception_only(error)[-1]
        _write(folder / f"{rank}.error", f"{summary}{text}".encode())
        os._exit(1)  # no tidying up that could wait for ranks that are gone


def _call(folder: Path, call: tuple[str, str, str], process_group: bool, timeout_s: float) -> Any:
    import torch

    torch.set_num_threads(1)
    outlast_gloo()
    if process_group:
        torch.distributed.init_process_group(
            "gloo",
            init_method=(folder / "store").as_uri(),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=timeout_s),
        )
    function = _find_function(*call)
    arguments = pickle.loads((folder / "arguments").read_bytes())  # noqa: TID251 (our parent's)
    result = function(*arguments)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return result


def _find_function(module_name: str, file: str, qualified_name: str) -> Callable[..., Any]:
    """Imports the module by name, else (a test outside any package) from its file."""
    try:
        module = importlib.import_module(module_name)
        found = Path(module.__file__ or "").resolve() == Path(file).resolve()
    except ImportError:
        found = False
    if not found:
        # Pickle finds a class by importing its module, and that imports the packages above first.
        above = module_name.split(".")[:-1]
        for depth in range(1, len(above) + 1):
            name = ".".join(above[:depth])
            sys.modules.setdefault(name, ModuleType(name))
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    function: Callable[..., Any] = attrgetter(qualified_name)(module)
    return function


def _write(path: Path, data: bytes) -> None:
    """In one step: who sees the file sees all of it."""
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").rename(path)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
