"""Reads corpora of documents: shards of ``*.jsonl.zst``, ``*.jsonl.gz`` and ``*.jsonl``, a document a line.

Reading streams, in bounded memory, and can go on behind any document. What cannot be read is reported with its place:
it is fatal, or skipped and counted, and never just missing.
"""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nemo_like.core.errors import DataError
from nemo_like.data.byte_stream import Damage, ReadAhead, open_stream
from nemo_like.data.jsonl_record import BadLineError, FaultKind, parse_line

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 2**30
READ_BUFFER_BYTES = 2**20
PLACES_SHOWN = 5
LineParser = Callable[[bytes | memoryview], tuple[str, dict[str, Any]] | None]


class Position(NamedTuple):
    """A place between two documents. ``json.dumps`` takes it; ``Position(*json.loads(...))`` gives it back."""

    shard: int = 0
    """Index in the list of files."""
    frame: int = 0
    """Offset in the compressed file of the frame in which the next line starts."""
    skip: int = 0
    """Decompressed bytes from the frame's start to the next line."""
    line: int = 1
    """Number of the next line in its file, from 1."""
    byte_offset: int = 0
    """Offset of the next line in the decompressed file."""


@dataclass(slots=True)
class Document:
    """A document and where it stands."""

    text: str
    meta: dict[str, Any]
    file: Path
    line: int
    """Number of its line in the file, from 1."""
    byte_offset: int
    """Offset of its line in the decompressed file."""
    position: Position
    """The place behind it: reading from there gives the documents that follow."""


@dataclass
class ReadReport:
    """What was read and what was not."""

    documents: int = 0
    blank_lines: int = 0
    faults: Counter[FaultKind] = field(default_factory=Counter)
    """Number of faults of each kind; all but ``damage`` are lines, each of them skipped."""
    lost_bytes: int = 0
    """Compressed bytes that could not be decompressed."""
    places: list[str] = field(default_factory=list)
    """The first few faults, each with its place."""

    def add(self, other: ReadReport) -> None:
        """Adds the counts of another report, say of another process."""
        self.documents += other.documents
        self.blank_lines += other.blank_lines
        self.faults.update(other.faults)
        self.lost_bytes += other.lost_bytes
        self.places = (self.places + other.places)[:PLACES_SHOWN]

    def describe(self) -> str:
        """Gives the counts and the first places as text of a few lines."""
        counts = (
            ", ".join(f"{count} {kind}" for kind, count in self.faults.most_common()) or "no faults"
        )
        lost = f"; {self.lost_bytes} compressed bytes lost" if self.lost_bytes else ""
        return "\n  ".join(
            [f"{self.documents} documents read, skipped: {counts}{lost}", *self.places]
        )

    def count_fault(self, kind: FaultKind, error: DataError) -> None:
        """Counts a fault, and keeps its place if it is among the first."""
        self.faults[kind] += 1
        if len(self.places) < PLACES_SHOWN:
            self.places.append(str(error))


def read_documents(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    start: Position | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    report: ReadReport | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
    parse: LineParser = parse_line,
) -> Generator[Document, None, None]:
    """Gives the documents of the files, in order.

    Lines end with a line feed, with or without a carriage return before it; blank lines are passed over, a
    byte-order mark before a line is dropped, and the last line needs no line feed. What a document is, see
    ``parse_line``. The frames of a file are one stream: lines may go over their borders.

    A frame's documents are given as they are decompressed. So a wrong checksum is reported behind the documents of
    its frame. A file cut exactly between two frames, at the end of a line, cannot be told from a shorter file. With
    ``on_error="skip"`` a damaged frame is left at the damage and reading goes on with the next frame, or the next file
    where none can be found reliably; line numbers and offsets behind it count only what was decompressed.

    Args:
        paths: The files. The end of a name says what it is: ``.zst``, ``.gz``, anything else is uncompressed.
        start: Where to go on: ``Document.position`` of an earlier reading of the same files. Only the frame it lies
            in is decompressed again.
        on_error: What to do with a line or a frame that cannot be read: stop, or skip it and count it. The count is
            logged as a warning at the end.
        report: To be filled with counts; a new one by default.
        max_line_bytes: A longer line is a fault and is not kept in memory.
        parse: Reads a line, as ``parse_line`` does: text and metadata, None for a blank line, or ``BadLineError``.

    Raises:
        DataError: A file that is not there, a ``start`` that does not fit the files, or, with
            ``on_error="raise"``, what cannot be read, after all documents before it. Its ``byte_offset`` is in the
            decompressed file for a line, in the compressed one for a damaged frame.
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, str | PathLike) else paths)]
    start = start or Position()
    if not 0 <= start.shard <= len(files):
        raise DataError(
            f"position {tuple(start)} is in file number {start.shard} of {len(files)}, counted from 0"
        )
    for path in files[start.shard :]:
        if not path.is_file():
            raise DataError("no such file", file=path)
    report = ReadReport() if report is None else report
    known_faults = report.faults.total()
    try:
        for shard in range(start.shard, len(files)):
            begin = start if shard == start.shard else Position(shard)
            yield from _ShardReader(
                files[shard], begin, on_error == "skip", report, max_line_bytes, parse
            ).read()
    finally:
        if report.faults.total() > known_faults:
            logger.warning("%s", report.describe())


class _ShardReader:
    """Reads one file from a position on; see ``read_documents``."""

    def __init__(
        self,
        path: Path,
        start: Position,
        is_skipping: bool,
        report: ReadReport,
        max_line_bytes: int,
        parse: LineParser,
    ) -> None:
        self._path, self._start, self._is_skipping = path, start, is_skipping
        self._report, self._max_line_bytes, self._parse_line = report, max_line_bytes, parse
        self._line, self._line_begin = start.line, start.byte_offset  # of the next line
        self._frame, self._frame_begin = start.frame, start.byte_offset - start.skip
        self._piece_end = self._frame_begin  # all offsets: in the decompressed file
        self._to_skip = start.skip
        # Of a line that has not ended yet, up to a byte more than is allowed.
        self._rest = bytearray()
        self._num_dropped = 0  # bytes of that line beyond

    def read(self) -> Iterator[Document]:
        with io.BufferedReader(io.FileIO(self._path), READ_BUFFER_BYTES) as file:
            stream = open_stream(self._path, file, self._start.frame)
            with ReadAhead(stream) as ahead:
                while True:
                    try:
                        yield from self._read_lines(ahead)
                        break
                    except Damage as damage:
                        self._check_start()
                        error = DataError(
                            damage.message, file=self._path, byte_offset=damage.byte_offset
                        )
                        yield from self._read_rest(error)
                        self._handle("damage", error)
                        self._report.lost_bytes += stream.skip_damage()
        self._check_start()
        yield from self._read_rest(None)

    def _read_lines(self, ahead: ReadAhead) -> Iterator[Document]:
        for line in self._split(ahead):
            document = self._parse(line, len(line) + 1)
            if document:
                yield document

    def _split(self, ahead: ReadAhead) -> Iterator[bytes | memoryview]:
        for buffer, count, frame in ahead.read():
            if frame != self._frame:
                self._frame, self._frame_begin = frame, self._piece_end
            self._piece_end += count
            begin = self._skip(buffer, count)
            view = memoryview(buffer)
            end = buffer.find(b"\n", begin, count)
            if end >= 0 and self._rest:
                self._keep(view[begin:end])
                line = bytes(self._rest)
                self._rest.clear()
                yield line
                begin, end = end + 1, buffer.find(b"\n", end + 1, count)
            while end >= 0:
                yield view[begin:end]
                begin, end = end + 1, buffer.find(b"\n", end + 1, count)
            self._keep(view[begin:count])

    def _skip(self, buffer: bytearray, count: int) -> int:
        """Passes over what lies before the position to start from; gives the index of the first byte behind."""
        skipped = min(self._to_skip, count)
        self._to_skip -= skipped
        if skipped < count and skipped and buffer[skipped - 1] != ord("\n"):
            self._to_skip = 1
            self._check_start()
        return skipped

    def _check_start(self) -> None:
        if self._to_skip:
            raise DataError(
                f"no line starts at position {tuple(self._start)}; was it made with other files?",
                file=self._path,
            )

    def _keep(self, part: memoryview) -> None:
        kept = part[: self._max_line_bytes + 1 - len(self._rest)]
        self._rest += kept
        self._num_dropped += len(part) - len(kept)

    def _read_rest(self, damage: DataError | None) -> Iterator[Document]:
        """Reads the last line, which no line feed ends, since the file or what can be read of it ends."""
        line = bytes(self._rest)
        self._rest.clear()
        if not line:
            return
        try:
            cause = "a damage cuts this line" if damage else "the file ends in this line"
            document = self._parse(line, len(line), note=f"; {cause}")
        except DataError:
            if damage:
                raise damage from None  # the damage is why the line is bad
            raise
        if document:
            yield document

    def _parse(
        self, line: bytes | memoryview, num_bytes: int, *, note: str = ""
    ) -> Document | None:
        """Parses the next line, which takes ``num_bytes`` of the file beside what was dropped of it."""
        number, begin = self._line, self._line_begin
        self._line += 1
        self._line_begin += num_bytes + self._num_dropped
        try:
            if len(line) > self._max_line_bytes:
                message = f"a line of {len(line) + self._num_dropped} bytes, more than {self._max_line_bytes}"
                self._num_dropped = 0
                raise BadLineError("too_long", message)
            parsed = self._parse_line(line)
        except BadLineError as error:
            message = error.message + note
            fault = DataError(message, file=self._path, line=number, byte_offset=begin)
            self._handle(error.kind, fault)
            return None
        if parsed is None:
            self._report.blank_lines += 1
            return None
        self._report.documents += 1
        skip = self._line_begin - self._frame_begin
        position = Position(self._start.shard, self._frame, skip, self._line, self._line_begin)
        return Document(parsed[0], parsed[1], self._path, number, begin, position)

    def _handle(self, kind: FaultKind, error: DataError) -> None:
        if not self._is_skipping:
            raise error
        self._report.count_fault(kind, error)
