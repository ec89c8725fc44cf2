"""Resuming: reading on behind any document gives exactly the documents that follow."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from pathlib import Path

import pytest
import zstandard

from nemo_like.core.errors import DataError
from nemo_like.data import zstd_frames
from nemo_like.data.jsonl_zst import Position, read_documents

Pack = Callable[[bytes], bytes]


def compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def pack_in_parts(data: bytes, pack: Pack, *, seed: int) -> bytes:
    draw, parts, at = random.Random(seed), [], 0
    while at < len(data):
        size = draw.choice([1, 40, 900, 5000])
        parts.append(pack(data[at : at + size]))
        at += size
    return b"".join(parts)


def make_data(shard: int) -> bytes:
    draw = random.Random(shard)
    lines = [
        json.dumps(
            {"text": "x" * draw.choice([0, 30, 4000]), "meta": {"shard": shard, "k": k}}
        ).encode()
        for k in range(40)
    ]
    lines[7] += b"\r"
    lines.insert(20, b"")
    lines[0] = b"\xef\xbb\xbf" + lines[0]
    return b"\n".join(lines) + (b"\n" if shard else b"")


@pytest.mark.parametrize(
    ("suffix", "pack"), [(".jsonl", None), (".jsonl.gz", gzip.compress), (".jsonl.zst", compress)]
)
def test_reading_on_behind_any_document_gives_the_others(
    tmp_path: Path, suffix: str, pack: Pack | None
) -> None:
    paths = []
    for shard in range(3):
        paths.append(tmp_path / f"{shard}{suffix}")
        data = make_data(shard)
        paths[-1].write_bytes(pack_in_parts(data, pack, seed=shard) if pack else data)
    everything = list(read_documents(paths))
    assert len(everything) == 120
    assert list(read_documents(paths, start=Position())) == everything
    for k, document in enumerate(everything):
        position = Position(*json.loads(json.dumps(document.position)))
        assert list(read_documents(paths, start=position)) == everything[k + 1 :]


def test_reading_on_behind_a_damage_gives_the_others(tmp_path: Path) -> None:
    lines = [b'{"text": "%d"}\n' % k for k in range(12)]
    frames = [bytearray(compress(b"".join(lines[i : i + 3]))) for i in range(0, 12, 3)]
    frames[1][zstandard.frame_header_size(bytes(frames[1]))] |= 6  # the reserved type of block
    path = tmp_path / "shard.jsonl.zst"
    path.write_bytes(b"".join(frames))
    everything = list(read_documents(path, on_error="skip"))
    assert [int(document.text) for document in everything] == [0, 1, 2, *range(6, 12)]
    for k, document in enumerate(everything):
        assert (
            list(read_documents(path, start=document.position, on_error="skip"))
            == everything[k + 1 :]
        )


def test_only_the_frame_of_the_position_is_decompressed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shard.jsonl.zst"
    path.write_bytes(b"".join(compress(b'{"text": "%d"}\n{"text": "b"}\n' % k) for k in range(100)))
    position = list(read_documents(path))[151].position
    walked: list[int] = []
    walk = zstd_frames._walk

    def record_and_walk(
        file: BufferedIOBase, start: int, size: int, blocks_per_piece: int
    ) -> Iterator[object]:
        walked.append(start)
        return walk(file, start, size, blocks_per_piece)

    monkeypatch.setattr(zstd_frames, "_walk", record_and_walk)
    assert next(read_documents(path, start=position)).text == "76"
    assert walked == [position.frame]
    assert position.frame > path.stat().st_size * 0.7


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (
            Position(shard=1, frame=0, skip=5, line=2, byte_offset=5),
            r"no line starts at position \(1, 0, 5, 2, 5\)",
        ),
        (
            Position(shard=0, frame=3, skip=30, line=2, byte_offset=30),
            r"no line starts at position \(0, 3, 30, 2, 30\)",
        ),
        (
            Position(shard=0, frame=0, skip=999, line=2, byte_offset=999),
            r"no line starts at position \(0, 0, 999, ",
        ),
        (
            Position(shard=0, frame=10**9, skip=15, line=2, byte_offset=15),
            r"no line starts at position \(0, 1000000000, ",
        ),
        (Position(shard=3), r"position \(3, 0, 0, 1, 0\) is in file number 3 of 2"),
        (Position(shard=-1), r"position \(-1, 0, 0, 1, 0\) is in file number -1 of 2"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_position_of_other_files_is_an_error(
    tmp_path: Path, position: Position, message: str, on_error: str, suffix: str
) -> None:
    pack: dict[str, Pack] = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": compress}
    paths = [tmp_path / f"{shard}{suffix}" for shard in range(2)]
    for path in paths:
        path.write_bytes(pack[suffix](b'{"text": "a"}\n{"text": "b"}\n'))
    with pytest.raises(DataError, match=message):
        list(read_documents(paths, start=position, on_error=on_error))  # type: ignore[arg-type]


def test_a_position_behind_the_last_file_has_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'"a"\n')
    assert list(read_documents(path, start=Position(shard=1))) == []
