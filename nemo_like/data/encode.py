"""Encoding a stream of documents, in this process or in several, always in the order of the stream.

The processes are started as plain interpreters that import only this module, not by
``multiprocessing``: that would run the user's main module again in each of them (seconds where it
imports Lightning, an error where it lacks its ``__main__`` guard) or fork a process that has
threads.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import IO, TypeVar

import numpy as np
from numpy.typing import NDArray

from nemo_like.data.token_shards import choose_dtype
from nemo_like.text.tokenizer import Tokenizer

Tag = TypeVar("Tag")
Batch = tuple[Tag, list[str]]
_CHILD = "from nemo_like.data.encode import serve; serve()"


def store_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[np.generic]]:
    """Documents as shards hold them: prefix, tokens, and the end of text where it is another token
    than the prefix."""
    dtype = choose_dtype(tokenizer.vocab_size)
    end = [] if tokenizer.eos_id == tokenizer.prefix_id else [tokenizer.eos_id]
    stored: list[NDArray[np.generic]] = []
    for ids in tokenizer.encode_batch(texts):
        document = np.empty(1 + len(ids) + len(end), dtype=dtype)
        document[0] = tokenizer.prefix_id
        document[1 : 1 + len(ids)] = ids
        document[1 + len(ids) :] = end
        stored.append(document)
    return stored


def encode_in_order(
    batches: Iterable[Batch[Tag]], tokenizer: Tokenizer, *, processes: int
) -> Iterator[tuple[Tag, list[NDArray[np.generic]]]]:
    """Encodes batches of texts; what goes along with a batch comes back with it.

    Args:
        batches: (anything, texts); read no further ahead than the processes need.
        tokenizer: The same in all processes.
        processes: 1 works here, on as many threads as the tokenizer likes.

    Raises:
        RuntimeError: A process ended early.
    """
    if processes == 1:
        for tag, texts in batches:
            yield tag, store_documents(tokenizer, texts)
        return
    with _Pool(tokenizer, processes) as pool:
        waiting: deque[tuple[Tag, Future[list[NDArray[np.generic]]]]] = deque()
        for tag, texts in batches:
            waiting.append((tag, pool.submit(texts)))
            if len(waiting) > 2 * processes:
                tag, result = waiting.popleft()
                yield tag, result.result()
        for tag, result in waiting:
            yield tag, result.result()


class _Pool:
    """Processes that run :func:`serve`, each driven by a thread that waits for its answer."""

    def __init__(self, tokenizer: Tokenizer, processes: int) -> None:
        self.dtype = choose_dtype(tokenizer.vocab_size)
        environment = os.environ | {
            "TOKENIZERS_PARALLELISM": "false",
            # The child finds this package where this process does, installed or not.
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        files = [
            part
            for name, content in tokenizer.to_bytes().items()
            for part in (name.encode(), content)
        ]
        self.children = []
        self.free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for _ in range(processes):
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            self.children.append(child)
            assert child.stdin is not None
            _send(child.stdin, files)
            self.free.put(child)
        self.threads = ThreadPoolExecutor(processes)

    def submit(self, texts: list[str]) -> Future[list[NDArray[np.generic]]]:
        return self.threads.submit(self._encode, texts)

    def _encode(self, texts: list[str]) -> list[NDArray[np.generic]]:
        child = self.free.get()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _send(child.stdin, [text.encode() for text in texts])
            answer = _receive(child.stdout)
        except BrokenPipeError:
            answer = None
        finally:
            self.free.put(child)  # a dead one as well, so that no thread waits for ever
        if answer is None:
            raise RuntimeError(
                f"a tokenizing process ended with code {child.wait()}; what it said stands above"
            )
        return [np.frombuffer(part, dtype=self.dtype) for part in answer]

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(cancel_futures=True)
        for child in self.children:
            child.communicate()


def serve() -> None:
    """The other side of the pool: a tokenizer, then batches of texts, until the input ends."""
    # A notice to all of the group reaches the parent too, which closes our input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    files = _receive(source) or []
    tokenizer = Tokenizer.from_bytes(
        {files[i].decode(): files[i + 1] for i in range(0, len(files), 2)}
    )
    while (texts := _receive(source)) is not None:
        _send(
            sink,
            [
                document.tobytes()
                for document in store_documents(tokenizer, [text.decode() for text in texts])
            ],
        )


def _send(stream: IO[bytes], parts: list[bytes]) -> None:
    """Writes a message: number of parts, their lengths, the parts."""
    stream.write(struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts)))
    for part in parts:
        stream.write(part)
    stream.flush()


def _receive(stream: IO[bytes]) -> list[bytes] | None:
    """Reads a message; None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    (number,) = struct.unpack("<Q", head)
    lengths = struct.unpack(f"<{number}Q", stream.read(8 * number))
    return [stream.read(length) for length in lengths]
