"""Decompresses zstd files and accounts for every byte of them.

The zstandard library ends in silence where a file is cut in the header of a frame. Here the frames and their blocks are
walked by their headers (RFC 8878, section 3.1), so that a cut, trailing garbage or a damaged block is always seen, and
what stands before it is always given. The library does the decompression and verifies the checksums.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BufferedIOBase
from typing import IO, NamedTuple, cast

from nemo_like.data.byte_stream import PIECE_BYTES, Damage

MAGIC = b"\x28\xb5\x2f\xfd"
SKIPPABLE_MAGICS = tuple((0x184D2A50 + i).to_bytes(4, "little") for i in range(16))
MAX_HEADER_BYTES = 18
MAX_BLOCK_BYTES = 2**17  # of its content, compressed or not
BLOCKS_PER_PIECE = PIECE_BYTES // MAX_BLOCK_BYTES
MAX_WINDOW_BYTES = 2**31
RLE, RESERVED = 1, 3  # types of a block
SCAN_BYTES = 2**20


class _Piece(NamedTuple):
    """Bytes to decompress together: blocks of one frame, or its checksum."""

    data: bytes
    offset: int  # in the file, of the first block or the checksum
    frame: int  # offset of the frame in the file
    num_blocks: int  # 0 for a checksum


class ZstdStream:
    """A ``ByteStream`` of a zstd file: any number of frames, skippable and empty ones included.

    A frame's bytes are given as they are decompressed; its checksum, if it has one, is verified behind them.
    """

    def __init__(self, file: BufferedIOBase, start: int = 0) -> None:
        self._file, self.frame = file, start
        self._size = os.fstat(file.fileno()).st_size
        self._num_given = 0  # bytes of the present frame
        self._damage: Damage | None = None
        self._fetched: list[_Piece] = []
        self._restart(start)
        if not self._size:
            self._damage = Damage("the file is empty; a zstd file has at least one frame", 0)

    def fetch(self) -> None:
        """See ``ByteStream``."""
        while not self._damage and not any(piece.num_blocks for piece in self._fetched):
            try:
                self._fetched.append(next(self._pieces))
            except StopIteration:
                return
            except Damage as damage:
                self._damage = damage

    def decode(self, room: memoryview) -> int:
        """See ``ByteStream``."""
        from zstandard import ZstdError

        count = 0
        try:
            if self._fetched or not self._damage:
                count = self._decompressor.readinto1(room)
        except ZstdError as error:
            if self._piece.num_blocks > 1:
                count = self._decode_up_to_damage(room)
            else:
                self._damage = _name_damage(self._piece, error)
            self._fetched.clear()
        if not count and self._damage:
            raise self._damage
        if self._piece.frame != self.frame:
            self.frame, self._num_given = self._piece.frame, 0
        self._num_given += count
        return count

    def skip_damage(self) -> int:
        """Goes on at the next frame, or at the end of the file if there is none.

        The next frame is where the headers of the damaged one lead, if that is a frame or the end; else the
        next place that holds the magic number and whose own headers lead to a frame or the end.
        """
        assert self._damage
        damaged = self._damage.byte_offset
        start = _find_end(self._file, self._piece.frame, self._size)
        if start is None or start <= damaged:
            start = _find_frame(self._file, damaged, self._size)
        self._restart(start)
        return start - damaged

    def read(self, _size: int) -> bytes:
        """Hands the next piece to the decompressor; nothing at the end and at a damage."""
        self.fetch()
        if not self._fetched:
            return b""
        self._piece = self._fetched.pop(0)
        return self._piece.data

    def _restart(self, start: int, *, blocks_per_piece: int = BLOCKS_PER_PIECE) -> None:
        import zstandard

        self._pieces = _walk(self._file, start, self._size, blocks_per_piece)
        self._fetched, self._damage = [], None
        self._piece = _Piece(b"", start, start, 0)  # the last one handed over
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        source = cast(IO[bytes], self)  # only its read() is used
        self._decompressor = decompressor.stream_reader(source, read_across_frames=True)

    def _decode_up_to_damage(self, room: memoryview) -> int:
        # The library throws away what a failing call has decompressed before the fault. Decode the frame again, block
        # by block, and give what has not been given yet.
        from zstandard import ZstdError

        skip = self._num_given if self._piece.frame == self.frame else 0
        self._restart(self._piece.frame, blocks_per_piece=1)
        block, count = memoryview(bytearray(MAX_BLOCK_BYTES)), 0
        try:
            while got := self._decompressor.readinto1(block):
                new = block[min(skip, got) : got]
                room[count : count + len(new)] = new
                skip, count = skip - (got - len(new)), count + len(new)
        except ZstdError as error:
            self._damage = _name_damage(self._piece, error)
        assert self._damage
        return count


def _name_damage(piece: _Piece, error: Exception) -> Damage:
    part = "block" if piece.num_blocks else "checksum"
    message = f"the {part} at compressed byte {piece.offset} of the zstd frame that starts at {piece.frame} is damaged"
    return Damage(f"{message}: {error}", piece.offset)


def _name_cut(part: str, offset: int, frame: int, size: int) -> Damage:
    message = f"the file ends at compressed byte {size}, inside the {part} at {offset}"
    return Damage(f"{message} of the zstd frame that starts at {frame}", offset)


def _walk(file: BufferedIOBase, start: int, size: int, blocks_per_piece: int) -> Iterator[_Piece]:
    """Cuts a file into pieces by its headers, up to the end or a ``Damage``.

    Args:
        file: The compressed file.
        start: Where a frame starts.
        size: Bytes in the file.
        blocks_per_piece: How many blocks to put together at most.
    """
    offset = start
    while offset < size:
        frame = offset
        file.seek(frame)
        header = file.read(MAX_HEADER_BYTES)
        if not any(magic.startswith(header[:4]) for magic in (MAGIC, *SKIPPABLE_MAGICS)):
            message = f"no zstd frame starts at compressed byte {frame}, found {header[:4]!r}"
            raise Damage(f"{message} (trailing garbage, or no zstd file)", frame)
        header_bytes, checksum_bytes = _parse_header(header)
        offset += header_bytes
        if offset > size:
            part = "skippable frame" if header[:4] in SKIPPABLE_MAGICS else "header"
            raise _name_cut(part, frame, frame, size)
        if header[:4] in SKIPPABLE_MAGICS:
            continue
        file.seek(offset)
        parts, first, num_blocks, is_last = [header[:header_bytes]], offset, 0, False
        while not is_last:
            block = file.read(3)
            content_bytes, is_last = _parse_block(block)
            is_sane = content_bytes <= MAX_BLOCK_BYTES or len(block) < 3
            if not is_sane or offset + 3 + content_bytes > size:
                if num_blocks:
                    yield _Piece(b"".join(parts), first, frame, num_blocks)
                if is_sane:
                    raise _name_cut("block", offset, frame, size)
                piece = _Piece(b"", offset, frame, 1)
                raise _name_damage(piece, ValueError("its header makes no sense"))
            content = file.read(content_bytes)
            parts += (block, content)
            num_blocks += 1
            offset += 3 + content_bytes
            if is_last or num_blocks == blocks_per_piece:
                yield _Piece(b"".join(parts), first, frame, num_blocks)
                parts, first, num_blocks = [], offset, 0
        if checksum_bytes:
            if offset + checksum_bytes > size:
                raise _name_cut("checksum", offset, frame, size)
            yield _Piece(file.read(checksum_bytes), offset, frame, 0)
            offset += checksum_bytes


def _parse_header(header: bytes) -> tuple[int, int]:
    """Gives the bytes of a frame's header (of a whole skippable frame), and of its checksum.

    A header that is cut counts as longer than it is.
    """
    header = header.ljust(MAX_HEADER_BYTES, b"\0")
    if header[:4] in SKIPPABLE_MAGICS:
        return 8 + int.from_bytes(header[4:8], "little"), 0
    descriptor = header[4]
    is_single_segment = descriptor >> 5 & 1
    dictionary_id_bytes = (0, 1, 2, 4)[descriptor & 3]
    content_size_bytes = (is_single_segment, 2, 4, 8)[descriptor >> 6]
    header_bytes = 5 + (1 - is_single_segment) + dictionary_id_bytes + content_size_bytes
    return header_bytes, 4 * (descriptor >> 2 & 1)


def _parse_block(header: bytes) -> tuple[int, bool]:
    """Gives the bytes of a block's content, more than ``MAX_BLOCK_BYTES`` if that cannot be, and if it is the last."""
    value = int.from_bytes(header, "little")
    kind, length = value >> 1 & 3, value >> 3
    if kind == RESERVED or length > MAX_BLOCK_BYTES:
        length = MAX_BLOCK_BYTES + 1
    return 1 if kind == RLE and length <= MAX_BLOCK_BYTES else length, bool(value & 1)


def _find_end(file: BufferedIOBase, frame: int, size: int) -> int | None:
    """Gives the end of a frame by its headers, or None if they do not lead to a frame or the end of the file."""
    file.seek(frame)
    header = file.read(MAX_HEADER_BYTES)
    if header[:4] != MAGIC:
        return None
    header_bytes, checksum_bytes = _parse_header(header)
    offset, is_last = frame + header_bytes, False
    while not is_last:
        file.seek(offset)
        block = file.read(3)
        content_bytes, is_last = _parse_block(block)
        if len(block) < 3 or content_bytes > MAX_BLOCK_BYTES:
            return None
        offset += 3 + content_bytes
    offset += checksum_bytes
    file.seek(min(offset, size))
    is_frame = offset <= size and file.read(4) in (b"", MAGIC, *SKIPPABLE_MAGICS)
    return offset if is_frame else None


def _find_frame(file: BufferedIOBase, start: int, size: int) -> int:
    """Gives the first place from ``start`` on that is reliably a frame, or the end of the file."""
    offset = start
    while offset < size:
        file.seek(offset)
        window = file.read(SCAN_BYTES)
        at = window.find(MAGIC)
        while at >= 0:
            if _find_end(file, offset + at, size) is not None:
                return offset + at
            at = window.find(MAGIC, at + 1)
        offset += max(len(window) - len(MAGIC) + 1, 1)
    return size
