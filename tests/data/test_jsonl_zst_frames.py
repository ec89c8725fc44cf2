"""Frames: any number and shape of them is one stream, and no byte of a file is passed over in silence."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from nemo_like.core.errors import DataError
from nemo_like.data.jsonl_zst import ReadReport, read_documents

BLOCK_BYTES = 2**17
Pack = Callable[[bytes], bytes]


def compress(data: bytes, *, checksum: bool = True, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_checksum=checksum).compress(data)


def make_lines(count: int, *, words: int = 3, seed: int = 0) -> list[bytes]:
    draw = random.Random(seed)
    return [
        json.dumps(
            {"text": " ".join(f"{draw.getrandbits(64):x}" for _ in range(words)), "meta": {"k": k}}
        ).encode()
        + b"\n"
        for k in range(count)
    ]


def write(folder: Path, *frames: bytes | bytearray, name: str = "shard.jsonl.zst") -> Path:
    path = folder / name
    path.write_bytes(b"".join(frames))
    return path


def read_until_error(path: Path) -> tuple[list[int], DataError | None]:
    numbers = []
    try:
        for document in read_documents(path):
            numbers.append(document.meta["k"])
    except DataError as error:
        return numbers, error
    return numbers, None


def find_block(frame: bytes | bytearray, before: int) -> int:
    """The start of the last block of a frame that begins before an offset."""
    start = offset = zstandard.frame_header_size(bytes(frame[:18]))
    while offset < before:
        start = offset
        header = int.from_bytes(frame[offset : offset + 3], "little")
        assert header >> 1 & 3 == 2, "a compressed block"
        offset += 3 + (header >> 3)
    return start


def make_skippable(content: bytes, *, number: int = 0) -> bytes:
    return bytes([0x50 + number, 0x2A, 0x4D, 0x18]) + len(content).to_bytes(4, "little") + content


@pytest.mark.parametrize("checksum", [True, False])
def test_a_cut_at_any_byte_is_an_error_behind_the_documents_before_it(
    tmp_path: Path, checksum: bool
) -> None:
    lines = make_lines(9)
    frames = [compress(b"".join(lines[i : i + 3]), checksum=checksum) for i in (0, 3, 6)]
    ends = [0, len(frames[0]), len(frames[0]) + len(frames[1]), sum(map(len, frames))]
    whole = b"".join(frames)
    for cut in range(len(whole) + 1):
        path = write(tmp_path, whole[:cut])
        numbers, error = read_until_error(path)
        num_frames = sum(end <= cut for end in ends[1:])
        block_is_whole = checksum and cut + 4 >= ends[min(num_frames + 1, 3)]
        assert numbers == list(
            range(3 * num_frames + (3 if block_is_whole and num_frames < 3 else 0))
        )
        if cut in ends[1:]:
            assert error is None  # a shorter file, to all that can be known
        else:
            assert error is not None
            assert error.file == path
            assert error.byte_offset is not None
            assert ends[num_frames] <= error.byte_offset <= cut
            assert str(cut) in str(error) or cut == 0


def test_a_cut_between_frames_is_an_error_if_it_is_inside_a_line(tmp_path: Path) -> None:
    line = make_lines(1)[0]
    path = write(tmp_path, compress(line + line[:20]))
    numbers, error = read_until_error(path)
    assert numbers == [0]
    assert (error.line, error.byte_offset) == (2, len(line)) if error else False


def test_a_cut_inside_a_long_frame_delivers_the_blocks_before_it(tmp_path: Path) -> None:
    lines = make_lines(3000, words=50)
    data = b"".join(lines)
    frame = compress(data)
    for cut in (len(frame) // 3, len(frame) * 9 // 10):
        numbers, error = read_until_error(write(tmp_path, frame[:cut]))
        assert numbers == list(range(len(numbers)))
        assert error is not None
        assert (
            f"the file ends at compressed byte {cut}, inside the block at {error.byte_offset} of"
            in str(error)
        )
        assert error.byte_offset is not None
        assert 0 <= cut - error.byte_offset <= BLOCK_BYTES
        given = sum(map(len, lines[: len(numbers) + 1]))
        assert len(data) * cut // len(frame) - given < 2 * BLOCK_BYTES


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_frames_of_any_size_are_one_stream(tmp_path: Path, size: int) -> None:
    data = b"".join(make_lines(30))
    path = write(tmp_path, *(compress(data[i : i + size]) for i in range(0, len(data), size)))
    assert read_until_error(path) == (list(range(30)), None)


def test_frames_of_random_sizes_with_empty_and_skippable_ones_between_are_one_stream(
    tmp_path: Path,
) -> None:
    draw = random.Random(1)
    data = b"".join(make_lines(400, words=30))
    for _ in range(5):
        frames, at = [], 0
        while at < len(data):
            size = draw.choice([0, 1, 50, 3000, 200_000])
            frames.append(compress(data[at : at + size], checksum=draw.random() < 0.5))
            at += size
            if draw.random() < 0.3:
                frames.append(
                    make_skippable(draw.randbytes(draw.randrange(40)), number=draw.randrange(16))
                )
        path = write(tmp_path, *frames)
        documents = list(read_documents(path))
        assert [document.meta["k"] for document in documents] == list(range(400))
        assert all(data[document.byte_offset :].startswith(b'{"text": "') for document in documents)


def test_a_file_of_nothing_but_empty_and_skippable_frames_has_no_documents(tmp_path: Path) -> None:
    assert read_until_error(
        write(tmp_path, make_skippable(b"x"), compress(b""), make_skippable(b""))
    ) == ([], None)


def test_blocks_of_every_type_are_read(tmp_path: Path) -> None:
    draw = random.Random(2)
    texts = [
        "a" * 400_000,
        draw.randbytes(300_000).hex(),
        "".join(chr(draw.randrange(32, 127)) for _ in range(300_000)),
    ]
    lines = [json.dumps(text).encode() + b"\n" for text in texts]
    raw = draw.randbytes(150_000)
    stored = b'"' + bytes(b % 64 + 128 if i % 2 else 0xC3 for i, b in enumerate(raw)) + b'"\n'
    path = write(tmp_path, compress(b"".join(lines)), compress(stored, level=-5))
    assert [document.text for document in read_documents(path)] == [*texts, json.loads(stored)]


def test_streams_flushed_after_every_line_are_read(tmp_path: Path) -> None:
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    parts = []
    for line in make_lines(300):
        parts += [compressor.compress(line), compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    assert read_until_error(write(tmp_path, *parts, compressor.flush())) == (list(range(300)), None)


@pytest.mark.parametrize("window_log", [27, 31])
def test_windows_up_to_two_gib_are_read(tmp_path: Path, window_log: int) -> None:
    line = make_lines(1)[0]
    descriptor = bytes(
        [0b11_0_0_0_1_00, (window_log - 10) << 3]
    )  # with the content's size, so that little is allocated
    block = (1 | len(line) << 3).to_bytes(3, "little") + line
    checksum = compress(line)[-4:]
    frame = b"\x28\xb5\x2f\xfd" + descriptor + len(line).to_bytes(8, "little") + block + checksum
    assert zstandard.get_frame_parameters(frame).window_size == 2**window_log
    assert read_until_error(write(tmp_path, frame)) == ([0], None)


def test_a_window_over_two_gib_is_an_error(tmp_path: Path) -> None:
    block = (1 | 3 << 3).to_bytes(3, "little") + b"{}\n"
    frame = (
        b"\x28\xb5\x2f\xfd"
        + bytes([0b11_0_0_0_0_00, (32 - 10) << 3])
        + (3).to_bytes(8, "little")
        + block
    )
    with pytest.raises(
        DataError, match="the block at compressed byte 14 of the zstd frame that starts at 0"
    ):
        list(read_documents(write(tmp_path, frame)))


@pytest.mark.parametrize(
    "garbage", [b"\0", b"\n", b"\0" * 50, b"{}\n", b"\x28\xb5\x2f\xfe", b"PK\x03\x04"]
)
def test_trailing_garbage_is_an_error_behind_all_documents(tmp_path: Path, garbage: bytes) -> None:
    frame = compress(b"".join(make_lines(2)))
    path = write(tmp_path, frame, garbage)
    numbers, error = read_until_error(path)
    assert numbers == [0, 1]
    assert error is not None
    assert f"no zstd frame starts at compressed byte {len(frame)}, found {garbage[:4]!r}" in str(
        error
    )
    assert error.byte_offset == len(frame)
    report = ReadReport()
    assert len(list(read_documents(path, on_error="skip", report=report))) == 2
    assert (report.faults, report.lost_bytes) == ({"damage": 1}, len(garbage))


@pytest.mark.parametrize("content", [b"RIFF....WAVE", b'{"text": "a"}\n'])
def test_a_file_that_is_not_zstd_is_an_error(tmp_path: Path, content: bytes) -> None:
    numbers, error = read_until_error(write(tmp_path, content))
    assert (numbers, error.byte_offset if error else None) == ([], 0)


def test_garbage_between_frames_is_passed_by_skipping(tmp_path: Path) -> None:
    lines = make_lines(4)
    path = write(tmp_path, compress(lines[0] + lines[1]), b"garbage", compress(lines[2] + lines[3]))
    report = ReadReport()
    documents = list(read_documents(path, on_error="skip", report=report))
    assert [document.meta["k"] for document in documents] == [0, 1, 2, 3]
    assert report.lost_bytes == len(b"garbage")


def test_a_wrong_checksum_is_reported_behind_its_frame(tmp_path: Path) -> None:
    lines = make_lines(6)
    frames = [bytearray(compress(b"".join(lines[i : i + 2]))) for i in (0, 2, 4)]
    frames[1][-1] ^= 1
    path = write(tmp_path, *frames)
    numbers, error = read_until_error(path)
    assert numbers == [0, 1, 2, 3]
    place = len(frames[0]) + len(frames[1]) - 4
    assert (
        f"the checksum at compressed byte {place} of the zstd frame that starts at {len(frames[0])}"
        in str(error)
    )
    report = ReadReport()
    assert len(list(read_documents(path, on_error="skip", report=report))) == 6
    assert (report.faults, report.lost_bytes) == ({"damage": 1}, 4)


def test_a_damaged_block_is_reported_behind_the_blocks_before_it_and_skipping_goes_on_at_the_next_frame(
    tmp_path: Path,
) -> None:
    lines = make_lines(4000, words=100)  # 3.4 MB a frame: the damage is not in its first piece
    frames = [bytearray(compress(b"".join(lines[i : i + 2000]))) for i in (0, 2000)]
    place = find_block(frames[0], len(frames[0]) * 2 // 3)
    frames[0][place + 3 : place + 43] = b"\xff" * 40  # the tables that the block begins with
    path = write(tmp_path, *frames)
    numbers, error = read_until_error(path)
    assert error is not None
    assert error.byte_offset == place
    assert (
        f"the block at compressed byte {place} of the zstd frame that starts at 0 is damaged"
        in str(error)
    )
    assert numbers == list(range(len(numbers)))
    assert 1200 < len(numbers) < 1334
    report = ReadReport()
    kept = [document.meta["k"] for document in read_documents(path, on_error="skip", report=report)]
    assert kept == numbers + list(range(2000, 4000))
    assert report.faults == {"damage": 1, "json": 1}
    assert report.lost_bytes == len(frames[0]) - place


def test_a_damaged_block_header_is_an_error_and_skipping_finds_the_next_frame(
    tmp_path: Path,
) -> None:
    lines = make_lines(6)
    frames = [bytearray(compress(b"".join(lines[i : i + 2]))) for i in (0, 2, 4)]
    header_bytes = zstandard.frame_header_size(bytes(frames[1]))
    for damage in (b"\x07\0\0", b"\xff\xff\xff"):  # a reserved type; a block of 2 MiB
        frames[1][header_bytes : header_bytes + 3] = damage
        path = write(tmp_path, *frames)
        numbers, error = read_until_error(path)
        assert numbers == [0, 1]
        assert error is not None
        assert error.byte_offset == len(frames[0]) + header_bytes
        report = ReadReport()
        kept = [
            document.meta["k"] for document in read_documents(path, on_error="skip", report=report)
        ]
        assert kept == [0, 1, 4, 5]
        assert report.lost_bytes == len(frames[1]) - header_bytes


def test_a_magic_number_inside_a_damaged_frame_is_no_frame(tmp_path: Path) -> None:
    lines = make_lines(4)
    header = b"\x28\xb5\x2f\xfd" + bytes([0b00_1_0_0_0_00, 200])
    damaged = header + b"\xff\xff\xff" + b"\x28\xb5\x2f\xfd" + b"\x20\x08\x41\0\0" + b"zzzzzzzzzzzz"
    path = write(tmp_path, compress(lines[0] + lines[1]), damaged, compress(lines[2] + lines[3]))
    report = ReadReport()
    documents = list(read_documents(path, on_error="skip", report=report))
    assert [document.meta["k"] for document in documents] == [0, 1, 2, 3]
    assert (report.faults, report.lost_bytes) == ({"damage": 1}, len(damaged) - len(header))
    assert "is damaged: its header makes no sense" in report.places[0]


def test_any_damaged_byte_costs_no_other_frame(tmp_path: Path) -> None:
    lines = make_lines(9)
    frames = [compress(b"".join(lines[i : i + 3])) for i in (0, 3, 6)]
    for place in range(len(frames[1])):
        damaged = bytearray(frames[1])
        damaged[place] ^= 0x55
        path = write(tmp_path, frames[0], damaged, frames[2])
        report = ReadReport()
        texts = [document.text for document in read_documents(path, on_error="skip", report=report)]
        good = [json.loads(line)["text"] for line in lines]
        assert texts[:3] == good[:3]
        assert texts[-3:] == good[6:]
        if place > 4 or place < 4:  # the descriptor's bits may turn the checksum off
            assert report.faults.total() > 0
        numbers, error = read_until_error(path)
        assert numbers[:3] == [0, 1, 2]
        assert error is not None or texts == good


def test_a_line_that_ends_at_a_damage_without_line_feed_is_read_if_it_is_whole(
    tmp_path: Path,
) -> None:
    line = make_lines(1)[0]
    frame = compress(line.rstrip())
    assert read_until_error(write(tmp_path, frame, b"\x28\xb5"))[0] == [0]
    path = write(tmp_path, compress(line[:-5]), b"\x28\xb5")
    numbers, error = read_until_error(path)
    assert (numbers, "inside the header at" in str(error)) == ([], True)
    report = ReadReport()
    assert list(read_documents(path, on_error="skip", report=report)) == []
    assert report.faults == {"damage": 1, "json": 1}
    assert "a damage cuts this line" in report.places[0]


def test_a_cut_gzip_member_is_an_error_behind_the_documents_before_it(tmp_path: Path) -> None:
    lines = make_lines(2000, words=20)
    members = [gzip.compress(b"".join(lines[i : i + 1000])) for i in (0, 1000)]
    whole = b"".join(members)
    for cut in (
        0,
        1,
        5,
        12,
        len(members[0]) - 1,
        len(members[0]) + 1,
        len(whole) - 9,
        len(whole) - 1,
    ):
        numbers, error = read_until_error(write(tmp_path, whole[:cut], name="shard.jsonl.gz"))
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= (1000 if cut > len(members[0]) else 0)
        assert error is not None
        assert error.byte_offset == cut
    path = write(tmp_path, whole, b"\0" * 512, name="shard.jsonl.gz")
    assert read_until_error(path) == (list(range(2000)), None)


def test_a_damaged_gzip_member_is_an_error_and_skipping_goes_on_with_the_next_file(
    tmp_path: Path,
) -> None:
    lines = make_lines(3000, words=20)
    data = bytearray(gzip.compress(b"".join(lines)))
    data[-8] ^= 1  # of the checksum
    path, other = (
        write(tmp_path, data, name="a.jsonl.gz"),
        write(tmp_path, lines[0], name="b.jsonl"),
    )
    numbers, error = read_until_error(path)
    assert numbers == list(range(3000))
    assert error is not None
    assert error.byte_offset is not None
    assert f"is damaged at compressed byte {error.byte_offset}" in str(error)
    assert len(data) - 8 <= error.byte_offset < len(data)
    report = ReadReport()
    kept = [
        document.meta["k"]
        for document in read_documents([path, other], on_error="skip", report=report)
    ]
    assert kept == [*numbers, 0]
    assert report.faults == {"damage": 1}
    assert report.lost_bytes == len(data) - error.byte_offset
    path = write(tmp_path, gzip.compress(lines[0]), b"garbage", name="c.jsonl.gz")
    with pytest.raises(
        DataError, match=r"expected a gzip member at compressed byte .*, found b'garb'"
    ):
        list(read_documents(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_memory_is_bounded(tmp_path: Path, suffix: str) -> None:
    line = b'{"text": "' + b"word " * 2000 + b'"}\n'
    pack: dict[str, Pack] = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": compress}
    path = write(
        tmp_path, pack[suffix](line * 5000), name=f"shard{suffix}"
    )  # 50 MB, most of it one tiny compressed run
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_documents(path)) == 5000
        assert tracemalloc.get_traced_memory()[1] < 12e6
    finally:
        tracemalloc.stop()
