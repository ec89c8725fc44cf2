from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from nemo_like.testing.corpus import NUM_DOCUMENTS, write_corpus


def read(path: Path) -> list[dict[str, Any]]:
    with zstandard.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_each_subset_is_a_file_of_that_many_documents_with_meta(tmp_path: Path) -> None:
    files = write_corpus(tmp_path / "new")
    assert list(files) == ["stories", "code", "letters"]
    for subset, path in files.items():
        documents = read(path)
        assert path == tmp_path / "new" / f"{subset}.jsonl.zst"
        assert len(documents) == NUM_DOCUMENTS[subset]
        assert {it["meta"]["subset"] for it in documents} == {subset}
        assert all(20 <= len(str(it["text"]).split()) <= 200 for it in documents)


def test_one_subset_is_not_ascii(tmp_path: Path) -> None:
    text = str(read(write_corpus(tmp_path)["letters"])[0]["text"])
    assert len(text.encode()) > 1.1 * len(text)


def test_same_seed_gives_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (
        write_corpus(tmp_path / str(at), num_documents={"code": 3}, seed=seed)["code"].read_bytes()
        for at, seed in enumerate((0, 0, 1))
    )
    assert first == again != other


def test_unknown_subset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"names \['poems'\]: there are \['code', 'letters'"):
        write_corpus(tmp_path, num_documents={"poems": 1})
