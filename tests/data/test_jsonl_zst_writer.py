"""Writing shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zstandard

from nemo_like.core.errors import DataError
from nemo_like.data.jsonl_zst import read_documents
from nemo_like.data.jsonl_zst_writer import JsonlZstWriter


def test_what_was_written_is_read(tmp_path: Path) -> None:
    documents: list[tuple[str, dict[str, Any]]] = [
        ("plain", {}),
        (
            "line\nfeed, \0, \u2028, \N{GRINNING FACE}",
            {"subset": "x", "tags": ["a", {"b": None}], "score": 0.1},
        ),
        ("", {"small": -(2**63), "large": 2**64, "larger": -(10**40)}),
    ]
    path = tmp_path / "a.jsonl.zst"
    with JsonlZstWriter(path) as writer:
        for text, meta in documents:
            writer.write(text, meta)
    assert [(document.text, document.meta) for document in read_documents(path)] == documents
    assert writer.documents == 3
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl.zst"]


def test_frames_are_bounded_have_checksums_and_end_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    with JsonlZstWriter(path, frame_bytes=1000) as writer:
        for k in range(100):
            writer.write("x" * 90, {"k": k})
    data, contents = path.read_bytes(), []
    while data:
        parameters = zstandard.get_frame_parameters(data)
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        contents.append(decompressor.decompress(data))
        assert parameters.has_checksum
        assert parameters.content_size == len(contents[-1])
        data = decompressor.unused_data
    assert len(contents) > 8
    assert all(content.endswith(b"\n") for content in contents)
    assert all(1000 <= len(content) < 1200 for content in contents[:-1])
    assert [document.meta["k"] for document in read_documents(path)] == list(range(100))


def test_a_file_without_documents_is_a_zstd_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    with JsonlZstWriter(path):
        pass
    assert zstandard.ZstdDecompressor().decompress(path.read_bytes()) == b""
    assert list(read_documents(path)) == []


def write_and_stop(path: Path) -> None:
    with JsonlZstWriter(path, frame_bytes=1) as writer:
        writer.write("a")
        raise KeyboardInterrupt


def test_an_exception_leaves_nothing_behind_and_the_old_file_untouched(tmp_path: Path) -> None:
    old, new = tmp_path / "old.jsonl.zst", tmp_path / "new.jsonl.zst"
    old.write_bytes(b"old")
    for path in (old, new):
        with pytest.raises(KeyboardInterrupt):
            write_and_stop(path)
    assert [file.name for file in tmp_path.iterdir()] == ["old.jsonl.zst"]
    assert old.read_bytes() == b"old"


def test_the_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    with JsonlZstWriter(path, frame_bytes=1) as writer:
        writer.write("a")
        assert not path.exists()
    assert path.exists()


@pytest.mark.parametrize(
    ("text", "meta", "message"),
    [
        (
            "half \ud800",
            {},
            r"a\.jsonl\.zst: document number 2 cannot be written as JSON: .*surrogates",
        ),
        ("a", {"x": Path("p")}, "document number 2 cannot be written as JSON: .*PosixPath"),
        (
            "a",
            {"x": 2**70, "y": float("nan")},
            "document number 2 cannot be written as JSON: .*not JSON compliant",
        ),
    ],
)
def test_what_json_cannot_hold_is_an_error(
    tmp_path: Path, text: str, meta: dict[str, Any], message: str
) -> None:
    with JsonlZstWriter(tmp_path / "a.jsonl.zst") as writer:
        writer.write("good")
        with pytest.raises(DataError, match=message):
            writer.write(text, meta)


def test_a_frame_size_below_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frame_bytes=0"):
        JsonlZstWriter(tmp_path / "a.jsonl.zst", frame_bytes=0)


def test_the_level_is_that_of_the_compressor(tmp_path: Path) -> None:
    sizes = []
    for level in (-5, 3, 19):
        path = tmp_path / f"{level}.jsonl.zst"
        with JsonlZstWriter(path, level=level) as writer:
            for k in range(2000):
                writer.write(f"document {k} of a small corpus, with {k * k} words", {"k": k})
        sizes.append(path.stat().st_size)
    assert sizes[0] > sizes[1] > sizes[2]
