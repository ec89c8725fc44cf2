"""The text that ships with the package: enough, free, clean, and as docs/sample_data.md says."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import zstandard

ALLOWED_LICENSES = {"public domain", "Apache-2.0", "BSD-3-Clause", "PSF-2.0", "WordNet"}
DOCS = Path(__file__).resolve().parents[2] / "docs" / "sample_data.md"


@pytest.fixture(scope="module")
def lines() -> dict[str, list[bytes]]:
    folder = files("nemo_like.samples") / "text"
    found = {}
    for file in folder.iterdir():
        if file.name.endswith(".jsonl.zst"):
            with zstandard.ZstdDecompressor().stream_reader(
                io.BytesIO(file.read_bytes())
            ) as stream:
                found[file.name.removesuffix(".jsonl.zst")] = stream.read().splitlines()
    return found


@pytest.fixture(scope="module")
def documents(lines: dict[str, list[bytes]]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [json.loads(line.decode("utf-8")) for line in rows] for name, rows in lines.items()
    }


def test_at_least_four_megabytes_in_six_subsets(documents: dict[str, list[dict[str, Any]]]) -> None:
    assert len(documents) >= 6
    assert sum(len(d["text"].encode()) for rows in documents.values() for d in rows) >= 4_000_000


def test_package_stays_small() -> None:
    folder = files("nemo_like.samples") / "text"
    assert sum(len(file.read_bytes()) for file in folder.iterdir()) < 2_500_000


def test_every_document_names_subset_source_licence_and_path(
    documents: dict[str, list[dict[str, Any]]],
) -> None:
    for name, rows in documents.items():
        for document in rows:
            assert set(document) == {"text", "meta"}
            assert set(document["meta"]) == {"subset", "source", "licence", "path"}
            assert document["meta"]["subset"] == name
            assert all(document["meta"].values())


def test_every_licence_is_free_and_has_its_notice(
    documents: dict[str, list[dict[str, Any]]],
) -> None:
    used = {d["meta"]["licence"] for rows in documents.values() for d in rows}
    assert used <= ALLOWED_LICENSES
    notices = (files("nemo_like.samples") / "LICENSES.md").read_text("utf-8")
    for license in used - {"public domain"}:
        assert f"\n## {license}:" in notices


def test_no_two_documents_are_alike(documents: dict[str, list[dict[str, Any]]]) -> None:
    texts = [re.sub(r"\W+", " ", d["text"]).lower() for rows in documents.values() for d in rows]
    assert len(set(texts)) == len(texts)
    paths = [(d["meta"]["subset"], d["meta"]["path"]) for rows in documents.values() for d in rows]
    assert len(set(paths)) == len(paths)


def test_text_is_clean(documents: dict[str, list[dict[str, Any]]]) -> None:
    for rows in documents.values():
        for document in rows:
            text = document["text"]
            assert unicodedata.is_normalized("NFC", text)
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ufeff\ufffd]| \n|\n{3}", text)
            assert not re.search(r"\w@\w+\.\w", text), "a mail address"


def test_documents_are_of_a_size_and_number_that_leave_ten_to_hold_out(
    documents: dict[str, list[dict[str, Any]]],
) -> None:
    for rows in documents.values():
        assert len(rows) >= 200  # one in twenty is ten
        assert all(2_000 <= len(d["text"].encode()) <= 20_000 for d in rows)


def test_documentation_gives_the_figures_of_each_subset_and_every_source(
    documents: dict[str, list[dict[str, Any]]],
) -> None:
    page = DOCS.read_text("utf-8")
    sources = defaultdict(set)
    for name, rows in documents.items():
        size = sum(len(d["text"].encode()) for d in rows)
        packed = len((files("nemo_like.samples") / "text" / f"{name}.jsonl.zst").read_bytes())
        assert f"| `{name}` | {len(rows):,} | {size:,} | {packed:,} |" in page
        sources[name] |= {d["meta"]["source"] for d in rows}
    for name, titles in sources.items():
        for title in titles:
            author, _, work = title.partition(": ")
            if name != "speeches":
                assert author in page, title
                assert work in page, title
    presidents = {title.partition(":")[0] for title in sources["speeches"]}
    assert f"{len(presidents)} presidents" in page
