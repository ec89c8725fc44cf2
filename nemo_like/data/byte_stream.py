"""The bytes of a file, whatever it is compressed with: plain, gzip or zstd, in pieces of bounded size.

A stream works in two steps, so that the heavy one can run beside the parsing of the piece before it:
``fetch`` (Python: reads the file, looks at headers) and ``decode`` (C: decompresses, without the interpreter lock).
"""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from types import TracebackType
from typing import Protocol

PIECE_BYTES = 2**21  # decompressed; two of them are in memory
SMALL_PIECE_BYTES = 2**17  # below it, waking a thread costs more than it saves
READ_BYTES = 2**18  # of a gzip file at once


class Damage(Exception):
    """Bytes of a file that cannot be decompressed.

    Args:
        message: What is wrong there.
        byte_offset: Where it begins, in the compressed file.
    """

    def __init__(self, message: str, byte_offset: int) -> None:
        self.message, self.byte_offset = message, byte_offset
        super().__init__(message)


class ByteStream(Protocol):
    """Decompressed bytes of one file, from a place where decompression can start up to the end."""

    frame: int
    """Offset in the file from which the bytes of the last ``decode`` can be decompressed again."""

    def fetch(self) -> None:
        """Reads what the next ``decode`` works on. A damage in it is kept until the good bytes before it are out."""

    def decode(self, room: memoryview) -> int:
        """Writes the next decompressed bytes, all of one frame, into ``room`` of ``PIECE_BYTES``.

        Returns:
            How many; 0 at the end.

        Raises:
            Damage: The bytes that come next cannot be read.
        """

    def skip_damage(self) -> int:
        """Makes the next ``decode`` go on behind the damage.

        Returns:
            Compressed bytes, from the damage on, that are lost.
        """


class PlainStream:
    """An uncompressed file. Each piece counts as a frame, since any place can be sought."""

    def __init__(self, file: BufferedIOBase, start: int = 0) -> None:
        self._file, self._offset, self.frame = file, start, start
        file.seek(start)

    def fetch(self) -> None:
        """Nothing to prepare."""

    def decode(self, room: memoryview) -> int:
        """See ``ByteStream``."""
        count = self._file.readinto(room)
        self.frame, self._offset = self._offset, self._offset + count
        return count

    def skip_damage(self) -> int:
        """There is none."""
        return 0


class GzipStream:
    """A gzip file. Each member counts as a frame; zero bytes behind one are padding, as in the gzip program."""

    def __init__(self, file: BufferedIOBase, start: int = 0) -> None:
        self._file, self.frame = file, start
        self._offset = start  # in the file, of the first byte not yet decompressed
        self._data = b""
        self._member: zlib._Decompress | None = None
        self._damage: Damage | None = None
        self._is_over = False
        file.seek(start)

    def fetch(self) -> None:
        """See ``ByteStream``."""
        if not self._data:
            self._data = self._file.read(READ_BYTES)

    def decode(self, room: memoryview) -> int:
        """See ``ByteStream``."""
        while not self._is_over:
            if self._damage:
                raise self._damage
            self.fetch()
            if self._member is None:
                self._start_member()
            elif not self._data:
                message = f"the file ends at compressed byte {self._offset}"
                self._damage = Damage(
                    f"{message}, inside the gzip member that starts at {self.frame}", self._offset
                )
            elif count := self._inflate(self._member, room):
                return count
        return 0

    def skip_damage(self) -> int:
        """The rest of the file is lost: the start of a member cannot be told from other bytes."""
        self._is_over = True
        return os.fstat(self._file.fileno()).st_size - self._offset

    def _start_member(self) -> None:
        if self._offset and not self._data:
            self._is_over = True
        elif self._offset and self._data[0] == 0:
            behind_padding = self._data.lstrip(b"\0")
            self._offset += len(self._data) - len(behind_padding)
            self._data = behind_padding
        elif not self._data or not b"\x1f\x8b".startswith(self._data[:2]):
            found = repr(self._data[:4]) if self._data else "an empty file"
            message = f"expected a gzip member at compressed byte {self._offset}, found {found}"
            self._damage = Damage(message, self._offset)
        else:
            self.frame, self._member = self._offset, zlib.decompressobj(wbits=31)

    def _inflate(self, member: zlib._Decompress, room: memoryview) -> int:
        before, data = member.copy(), self._data
        try:
            out = member.decompress(data, len(room))
        except zlib.error:
            out = self._inflate_up_to_damage(before, data)
        else:
            self._data = member.unused_data if member.eof else member.unconsumed_tail
            self._offset += len(data) - len(self._data)
            if member.eof:
                self._member = None
        room[: len(out)] = out
        return len(out)

    def _inflate_up_to_damage(self, member: zlib._Decompress, data: bytes) -> bytes:
        # zlib throws away what a failing call has decompressed before the fault; byte by byte nothing is lost.
        good = bytearray()
        try:
            for i in range(len(data)):
                good += member.decompress(data[i : i + 1])
                self._offset += 1
        except zlib.error as error:
            message = f"the gzip member that starts at {self.frame} is damaged at compressed byte {self._offset}"
            self._damage = Damage(f"{message}: {error}", self._offset)
        return bytes(good)


def open_stream(path: Path, file: BufferedIOBase, start: int = 0) -> ByteStream:
    """Gives the stream for a file by the end of its name.

    Args:
        path: ``*.zst`` or ``*.zstd``, ``*.gz``; everything else is read as it is.
        file: The file, opened for reading bytes.
        start: 0, or a ``frame`` that such a stream has shown before.
    """
    if path.suffix in {".zst", ".zstd"}:
        from nemo_like.data.zstd_frames import ZstdStream

        return ZstdStream(file, start)
    return GzipStream(file, start) if path.suffix == ".gz" else PlainStream(file, start)


class ReadAhead:
    """Decompresses the next piece of a stream in a thread while the caller works on the present one.

    Both need the interpreter lock, and a thread that waits for it gets it only after 5 ms (the switch interval). So
    the two go in step: the caller lets go of the lock until the thread has started to decompress, and asks for the
    result when it is done with its own piece. Leave the context before the file is closed.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._jobs: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread:
            self._jobs.put(None)
            self._thread.join()

    def read(self) -> Iterator[tuple[bytearray, int, int]]:
        """Gives the pieces up to the end: a buffer, valid until the next piece, the bytes in it, their frame.

        Raises:
            Damage: After all pieces before it. ``stream.skip_damage()`` and another ``read()`` go on behind it.
        """
        room, other = bytearray(PIECE_BYTES), None
        self._decode(room)
        while True:
            result = self._results.get()
            if isinstance(result, Exception):
                raise result
            if not result:
                return
            if result < SMALL_PIECE_BYTES:
                yield room, result, self._stream.frame
                self._decode(room)
            else:
                frame, other = self._stream.frame, other or bytearray(PIECE_BYTES)
                self._decode_in_thread(other)
                yield room, result, frame
                room, other = other, room

    def _decode(self, room: bytearray) -> None:
        try:
            self._results.put(self._stream.decode(memoryview(room)))
        except Exception as error:  # read() raises it
            self._results.put(error)

    def _decode_in_thread(self, room: bytearray) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="read-ahead", daemon=True)
            self._thread.start()
        self._stream.fetch()
        self._jobs.put(room)
        self._started.get()

    def _work(self) -> None:
        while (room := self._jobs.get()) is not None:
            self._started.put(None)
            self._decode(room)
