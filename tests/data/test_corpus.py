from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_like.core.errors import DataError
from nemo_like.data.corpus import find_subset, hash_corpus, hash_key, read_corpus
from nemo_like.data.jsonl_zst import Document, Position, ReadReport


def make_document(meta: dict[str, Any]) -> Document:
    return Document("text", meta, Path("folder/books.v2.jsonl.zst"), 1, 0, Position())


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize(
    ("meta", "subset"),
    [
        ({"subset": "law", "pile_set_name": "FreeLaw"}, "law"),
        ({"pile_set_name": "FreeLaw"}, "FreeLaw"),
        ({"subset": None, "pile_set_name": ""}, "books"),
        ({}, "books"),
        ({"subset": 7}, "7"),
    ],
)
def test_a_subset_is_named_by_meta_or_file(meta: dict[str, Any], subset: str) -> None:
    assert find_subset(make_document(meta)) == subset


def test_another_key_may_name_the_subset() -> None:
    document = make_document({"subset": "law", "language": "de"})
    assert find_subset(document, subset_key="language") == "de"


def test_files_are_read_in_order_and_progress_ends_at_the_total(tmp_path: Path) -> None:
    paths = [write(tmp_path / "b.jsonl", "1", "2"), write(tmp_path / "a.jsonl", "3")]
    seen: list[tuple[int, int]] = []
    documents = list(read_corpus(paths, progress=lambda done, total: seen.append((done, total))))
    assert [document.text for document in documents] == ["1", "2", "3"]
    total = sum(path.stat().st_size for path in paths)
    assert seen[-1] == (total, total)
    assert all(0 <= done <= total for done, _ in seen)


def test_what_is_skipped_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "1")
    path.write_bytes(path.read_bytes() + b"{broken\n" + path.read_bytes())
    report = ReadReport()
    documents = list(read_corpus([path], on_error="skip", report=report))
    assert (len(documents), report.faults.total()) == (2, 1)
    with pytest.raises(DataError, match=r"a.jsonl:2"):
        list(read_corpus([path]))


def test_a_corpus_is_its_content_and_names_not_its_place(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    cache = tmp_path / "cache"
    here = [write(tmp_path / "here" / name, name) for name in ("a.jsonl", "b.jsonl")]
    there = [write(tmp_path / "there" / name, name) for name in ("a.jsonl", "b.jsonl")]
    renamed = [write(tmp_path / "there" / name, name[0] + ".jsonl") for name in ("a.jsonl", "c")]
    assert hash_corpus(here, cache) == hash_corpus(there, cache)
    keys = {hash_key(hash_corpus(paths, cache)) for paths in (here, here[::-1], here[:1], renamed)}
    assert len(keys) == 4


def test_a_file_named_twice_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "1")
    (tmp_path / "link.jsonl").symlink_to(path)
    with pytest.raises(DataError, match=r"link.jsonl: is named twice"):
        hash_corpus([path, tmp_path / "link.jsonl"], tmp_path / "cache")


@pytest.mark.parametrize("name", ["", "nowhere.jsonl"])
def test_a_folder_or_nothing_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"{name}: is no file; a folder is named by its files"):
        hash_corpus([tmp_path / name], tmp_path / "cache")
