"""Lines: what is a document, what is a fault, and what is said about it."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from nemo_like.core.errors import DataError
from nemo_like.data.jsonl_zst import Document, Position, ReadReport, read_documents

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.gz": gzip.compress,
    ".jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
GOOD = b'{"text": "good"}\n'


def write(folder: Path, data: bytes, *, suffix: str = ".jsonl.zst") -> Path:
    path = folder / f"shard{suffix}"
    path.write_bytes(PACK[suffix](data))
    return path


def read_one(folder: Path, line: bytes) -> Document:
    (document,) = read_documents(write(folder, line))
    return document


@pytest.mark.parametrize("suffix", PACK)
def test_a_document_knows_its_place(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, b'{"text": "a", "meta": {"n": 1}}\n\n"b\\n"\n', suffix=suffix)
    first, second = read_documents([path])
    assert (first.text, first.meta, first.file, first.line, first.byte_offset) == (
        "a",
        {"n": 1},
        path,
        1,
        0,
    )
    assert (second.text, second.meta, second.line, second.byte_offset) == ("b\n", {}, 3, 33)
    assert (second.position.line, second.position.byte_offset) == (4, 39)


@pytest.mark.parametrize("suffix", PACK)
def test_shards_are_read_in_order_and_counted(tmp_path: Path, suffix: str) -> None:
    paths = []
    for i in range(3):
        paths.append(tmp_path / f"{i}{suffix}")
        paths[-1].write_bytes(
            PACK[suffix](b"".join(b'{"text": "%d.%d"}\n' % (i, k) for k in range(4)))
        )
    report = ReadReport()
    texts = [document.text for document in read_documents(paths, report=report)]
    assert texts == [f"{i}.{k}" for i in range(3) for k in range(4)]
    assert (report.documents, report.faults.total()) == (12, 0)


@pytest.mark.parametrize(
    ("line", "text", "meta"),
    [
        (b'{"text": "a"}', "a", {}),
        (b'{"text": "a"}\r\n', "a", {}),
        (b'\xef\xbb\xbf{"text": "a"}\n', "a", {}),
        (b' \t{"text": "a"} \r\n', "a", {}),
        (b'"hello"\n', "hello", {}),
        (b'{"text": ""}\n', "", {}),
        (b'{"text": "nul \\u0000 escaped"}\n', "nul \0 escaped", {}),
        (b'{"text": "\xe2\x80\xa8 and \\ud83d\\ude00"}\n', "\u2028 and \N{GRINNING FACE}", {}),
        (b'{"text": ["one", "two", "three"]}\n', "one\n\ntwo\n\nthree", {}),
        (b'{"text": "a", "meta": null}\n', "a", {}),
        (b'{"text": "a", "meta": "book"}\n', "a", {"meta": "book"}),
        (b'{"id": 7, "text": "a", "url": "u"}\n', "a", {"id": 7, "url": "u"}),
        (b'{"id": 7, "text": "a", "meta": {"id": 8, "x": []}}\n', "a", {"id": 8, "x": []}),
        (b'{"text": "first", "text": "last"}\n', "last", {}),
        (b'{"text": "a", "meta": {"x": 1, "x": 2}}\n', "a", {"x": 2}),
        (b'{"text": "a", "meta": {"x": 1.5, "y": 1e300}}\n', "a", {"x": 1.5, "y": 1e300}),
        (b'{"text": "a", "meta": {"x": Infinity}}\n', "a", {"x": float("inf")}),
    ],
)
def test_what_is_read(tmp_path: Path, line: bytes, text: str, meta: dict[str, Any]) -> None:
    document = read_one(tmp_path, line)
    assert (document.text, document.meta) == (text, meta)


@pytest.mark.parametrize(
    "number",
    [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30 + 7, -(10**400) + 1],
)
def test_integers_are_exact(tmp_path: Path, number: int) -> None:
    meta = {"a": number, "b": [0.5, {"c": [number]}], "d": "x"}
    document = read_one(tmp_path, json.dumps({"text": "t", "meta": meta}).encode())
    assert document.meta == meta
    assert type(document.meta["b"][1]["c"][0]) is int


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        (b'{"text": "a\xff"}', "utf8", r"byte 11 of the line is 0xff"),
        (b'{"text": "\xed\xa0\x80"}', "utf8", r"byte 10 of the line is 0xed"),
        (b'{"text": "\xc3', "utf8", r"byte 10 of the line is 0xc3"),
        (b'{"text": "\\ud800"}', "utf8", r"the escape \\ud800 is half of a surrogate pair"),
        (
            b'{"text": "a"',
            "json",
            r"at character 13 of the line, which begins b'\{\"text\": \"a\"\\r'",
        ),
        (b'{"text": "a",}', "json", r"no JSON: .* at character 1[23]"),
        (b'{"text": "a"}{"text": "b"}', "json", r"Extra data at character 13"),
        (b'{"text": "a\tb"}', "json", r"Invalid control character at"),
        (b"[" * 100_000, "json", r"nested too deeply"),
        (b'{"text": "a", "n": 1' + b"0" * 5000 + b"}", "json", r"4300 digits"),
        (b'{"text": "a\0\0"}', "nul", r"2 NUL bytes, the first at byte 11 of the line"),
        (b"\0" * 50, "nul", r"50 NUL bytes, the first at byte 0 of the line"),
        (b'{"Text": "a", "id": 1}', "text", r"'text' is missing; there are: 'Text', 'id'"),
        (b"{}", "text", r"'text' is missing; there are: none"),
        (b'{"text": null}', "text", r"this is null"),
        (b'{"text": 3}', "text", r"this is a number"),
        (b'{"text": {"a": 1}}', "text", r"this is an object"),
        (b'{"text": ["a", 3]}', "text", r"this is a list of other things"),
        (b"12", "record", r"this is a number"),
        (b"[1]", "record", r"this is an array"),
        (b"true", "record", r"this is a boolean"),
    ],
)
def test_a_bad_line_is_reported_with_its_place_and_the_others_arrive(
    tmp_path: Path, line: bytes, kind: str, message: str
) -> None:
    path = write(tmp_path, GOOD + line + b"\r\n" + GOOD)
    documents = read_documents(path)
    assert next(documents).text == "good"
    with pytest.raises(DataError, match=message) as caught:
        next(documents)
    assert (caught.value.file, caught.value.line, caught.value.byte_offset) == (path, 2, len(GOOD))

    report = ReadReport()
    kept = list(read_documents(path, on_error="skip", report=report))
    assert [(document.text, document.line) for document in kept] == [("good", 1), ("good", 3)]
    assert kept[1].byte_offset == len(GOOD) + len(line) + 2
    assert report.faults == {kind: 1}
    assert f"{path}:2 (byte {len(GOOD)})" in report.places[0]


def test_a_line_that_the_end_of_the_file_cuts_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + b'{"text": "lo')
    with pytest.raises(DataError, match="the file ends in this line") as caught:
        list(read_documents(path))
    assert caught.value.line == 2


def test_skipped_lines_are_counted_by_kind_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, b"\n" + GOOD + b"{\n" * 7 + b"{}\n \t\r\n" + GOOD)
    report = ReadReport()
    assert len(list(read_documents(path, on_error="skip", report=report))) == 2
    assert (report.documents, report.blank_lines, report.faults) == (2, 2, {"json": 7, "text": 1})
    assert len(report.places) == 5
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "2 documents read, skipped: 7 json, 1 text" in record.getMessage()
    assert f"{path}:3 (byte 18)" in record.getMessage()


def test_what_was_skipped_is_logged_too_when_the_reader_is_left_early(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = read_documents(write(tmp_path, b"{\n" + GOOD + GOOD), on_error="skip")
    next(documents)
    documents.close()
    assert "skipped: 1 json" in caplog.text


def test_reports_add_up() -> None:
    one, two = ReadReport(documents=2, blank_lines=1), ReadReport(documents=3, lost_bytes=9)
    one.count_fault("json", DataError("a"))
    for _ in range(6):
        two.count_fault("json", DataError("b"))
    one.add(two)
    assert (one.documents, one.blank_lines, one.lost_bytes, one.faults["json"]) == (5, 1, 9, 7)
    assert one.places == ["a", "b", "b", "b", "b"]


def test_a_bad_line_does_not_move_the_places_behind_it(tmp_path: Path) -> None:
    path = write(tmp_path, b"{\n" + GOOD)
    (document,) = read_documents(path, on_error="skip")
    assert (document.line, document.byte_offset) == (2, 2)


def test_lines_of_50_mb_are_read(tmp_path: Path) -> None:
    text = "long \u00e9 " * 6_500_000
    path = write(tmp_path, GOOD + json.dumps(text, ensure_ascii=False).encode() + b"\n" + GOOD)
    assert len(text.encode()) > 50e6
    first, long, last = read_documents(path)
    assert long.text == text
    assert (first.text, last.text, last.line, last.byte_offset) == (
        "good",
        "good",
        3,
        len(GOOD) + len(text.encode()) + 3,
    )


@pytest.mark.parametrize("length", [100, 3_000_000])
def test_a_line_over_the_limit_is_a_fault_and_not_kept(tmp_path: Path, length: int) -> None:
    path = write(tmp_path, GOOD + b'"' + b"x" * (length - 2) + b'"\n' + GOOD)
    report = ReadReport()
    documents = list(read_documents(path, on_error="skip", report=report, max_line_bytes=99))
    assert [(document.line, document.byte_offset) for document in documents] == [
        (1, 0),
        (3, len(GOOD) + length + 1),
    ]
    assert report.faults == {"too_long": 1}
    with pytest.raises(DataError, match=f"a line of {length} bytes, more than 99"):
        list(read_documents(path, max_line_bytes=99))
    assert len(list(read_documents(path, max_line_bytes=length))) == 3


@pytest.mark.parametrize("suffix", PACK)
def test_a_file_without_lines_has_no_documents(tmp_path: Path, suffix: str) -> None:
    assert list(read_documents(write(tmp_path, b"", suffix=suffix))) == []


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_zero_bytes_are_no_compressed_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"empty{suffix}"
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty") as caught:
        list(read_documents(path))
    assert (caught.value.file, caught.value.byte_offset) == (path, 0)
    report, files = ReadReport(), [path, write(tmp_path, GOOD)]
    assert [
        document.text for document in read_documents(files, on_error="skip", report=report)
    ] == ["good"]
    assert report.faults == {"damage": 1}


def test_a_missing_file_is_named_before_anything_is_read(tmp_path: Path) -> None:
    documents = read_documents([write(tmp_path, GOOD), tmp_path / "gone.jsonl"], on_error="skip")
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        next(documents)


def test_another_kind_of_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    path.write_bytes(b"RIFF\x24\x00\x00\x00WAVEfmt ")
    with pytest.raises(DataError, match=r"sound\.wav:1 \(byte 0\): \d NUL bytes"):
        list(read_documents(path))


@pytest.mark.parametrize("suffix", PACK)
def test_every_way_of_packing_gives_the_same_documents(tmp_path: Path, suffix: str) -> None:
    lines = [
        json.dumps({"text": "w" * (k * 7919 % 60_000), "meta": {"k": k}}).encode()
        for k in range(200)
    ]
    data = b"\n".join(lines)
    documents = list(read_documents(write(tmp_path, data, suffix=suffix)))
    assert [document.meta["k"] for document in documents] == list(range(200))
    for document, line in zip(documents, lines, strict=True):
        assert document.text == json.loads(line)["text"]
        assert data[document.byte_offset : document.byte_offset + len(line)] == line
    assert documents[0].position.shard == Position().shard
