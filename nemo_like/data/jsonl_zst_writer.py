"""Writes a shard of ``*.jsonl.zst``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from nemo_like.core.errors import DataError

FRAME_BYTES = 8 * 2**20


class JsonlZstWriter:
    """Writes documents to a ``.jsonl.zst`` file, which appears under its name when it is complete.

    Use it as a context manager. An exception in the block leaves nothing behind; an existing file of that name stays
    until the new one replaces it. The file consists of frames, each with a checksum, that end at the end of a line: so
    a reader that goes on behind a document decompresses one frame at most.

    Args:
        path: The file.
        level: Of the compression, as of the zstd program.
        frame_bytes: A frame ends with the line in which it reaches this many bytes (before compression). The default
            takes some 10 ms to decompress, and the file is 0.3 % larger than a single frame.

    Raises:
        ValueError: ``frame_bytes`` is not positive.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, level: int = 3, frame_bytes: int = FRAME_BYTES
    ) -> None:
        if frame_bytes < 1:
            raise ValueError(f"JsonlZstWriter(frame_bytes={frame_bytes}): must be at least 1")
        import zstandard

        self.path = Path(path)
        self.documents = 0
        self._frame_bytes = frame_bytes
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        self._compressor = zstandard.ZstdCompressor(
            level=level, write_checksum=True, write_content_size=True
        )
        self._lines: list[bytes] = []
        self._num_waiting = 0  # bytes in them
        self._file: BinaryIO | None = None

    def __enter__(self) -> JsonlZstWriter:
        self._file = self._temporary.open("wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file
        try:
            if kind is None:
                if (
                    self._lines or not self._file.tell()
                ):  # a file without documents holds one empty frame
                    self._write_frame()
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            if kind is None:
                self._temporary.replace(self.path)
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def write(self, text: str, meta: dict[str, Any] | None = None) -> None:
        """Adds a document.

        Args:
            text: The text.
            meta: Anything that JSON has; NaN and the infinities become null. Integers may have any size.

        Raises:
            DataError: JSON cannot hold it: half of a surrogate pair, an object that is none of JSON's.
        """
        assert self._file, "use JsonlZstWriter as a context manager"
        record: dict[str, Any] = {"text": text, "meta": meta} if meta else {"text": text}
        line = self._dump(record)
        self._lines.append(line)
        self._num_waiting += len(line)
        self.documents += 1
        if self._num_waiting >= self._frame_bytes:
            self._write_frame()

    def _dump(self, record: dict[str, Any]) -> bytes:
        import orjson

        try:
            return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError:
            pass  # an integer of more than 64 bits, or a fault; json knows
        try:
            return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError) as error:
            message = f"document number {self.documents + 1} cannot be written as JSON: {error}"
            raise DataError(message, file=self.path) from None

    def _write_frame(self) -> None:
        assert self._file
        self._file.write(self._compressor.compress(b"".join(self._lines)))
        self._lines.clear()
        self._num_waiting = 0
