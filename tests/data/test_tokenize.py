from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.core.errors import DataError
from nemo_like.data import tokenize
from nemo_like.data.held_out import is_held_out
from nemo_like.data.jsonl_zst import read_documents
from nemo_like.data.tokenize import TokenCorpus, tokenize_corpus
from nemo_like.testing.corpus import write_corpus
from nemo_like.text.tokenizer import Tokenizer, train_bpe

FRACTION = 0.2


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return list(write_corpus(tmp_path_factory.mktemp("corpus")).values())


@pytest.fixture(scope="module")
def tokenizer(paths: list[Path]) -> Tokenizer:
    return train_bpe((document.text for document in read_documents(paths)), vocab_size=300)


def run(paths: list[Path], tokenizer: Tokenizer, cache_dir: Path, **changes: Any) -> TokenCorpus:
    settings = {"held_out_fraction": FRACTION} | changes
    return tokenize_corpus(paths, tokenizer=tokenizer, cache_dir=cache_dir, **settings)


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_lines(path: Path, *lines: str | dict[str, Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def test_shards_hold_the_documents_of_their_subset_and_split_in_order(
    paths: list[Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    corpus = run(paths, tokenizer, tmp_path)
    documents = list(read_documents(paths))
    assert corpus.subsets == ["code", "letters", "stories"]
    for subset in corpus.subsets:
        for split in tokenize.SPLITS:
            texts = [
                document.text
                for document in documents
                if document.meta["subset"] == subset
                and is_held_out(document.text, FRACTION) == (split == "held_out")
            ]
            shard = corpus.open_shard(subset, split)
            stored = [shard[number].tolist() for number in range(len(shard))]
            assert stored == [[tokenizer.eos_id, *tokenizer.encode(text)] for text in texts]
            counts = corpus.counts[subset][split]
            assert counts.documents == len(texts) > 0
            assert counts.tokens == sum(map(len, stored)) == shard.num_tokens
            assert counts.bytes == sum(len(text.encode()) for text in texts)


def test_raw_held_out_documents_stay_within_reach(
    paths: list[Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    expected = [
        (document.meta["subset"], document.text)
        for document in read_documents(paths)
        if is_held_out(document.text, FRACTION)
    ]
    assert list(run(paths, tokenizer, tmp_path).read_held_out()) == expected


@pytest.mark.dist
def test_the_number_of_processes_changes_no_byte(
    paths: list[Path], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "_BATCH_CHARS", 3000)
    alone = run(paths, tokenizer, tmp_path / "1", processes=1)
    together = run(paths, tokenizer, tmp_path / "2", processes=2)
    assert read_folder(together.folder) == read_folder(alone.folder)


def test_a_second_run_touches_nothing(
    paths: list[Path], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(paths, tokenizer, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(tokenize, "read_corpus", pytest.fail)
    second = run(paths, tokenizer, tmp_path)
    locks = {path for path in before if "lock" in path.name}
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {k: v for k, v in after.items() if k not in locks} == {
        k: v for k, v in before.items() if k not in locks
    }
    assert (second.folder, second.counts) == (first.folder, first.counts)


def test_moved_files_are_known_again_and_changed_ones_are_not(
    paths: list[Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = run(paths, tokenizer, cache)
    moved = [Path(shutil.copy(path, tmp_path)) for path in paths]
    assert run(moved, tokenizer, cache).folder == first.folder
    content = bytearray(write_corpus(tmp_path / "new", seed=1)["code"].read_bytes())
    next(path for path in moved if path.name == "code.jsonl.zst").write_bytes(content)
    assert run(moved, tokenizer, cache).folder != first.folder


def test_tokenizer_split_and_subset_key_make_other_shards(
    paths: list[Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = train_bpe(["another"], vocab_size=260)
    folders = {
        run(paths, tokenizer, tmp_path).folder,
        run(paths, other, tmp_path).folder,
        run(paths, tokenizer, tmp_path, held_out_fraction=0.3).folder,
        run(paths, tokenizer, tmp_path, subset_key="licence").folder,
    }
    assert len(folders) == 4


def test_another_key_divides_the_corpus_otherwise(
    paths: list[Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert run(paths, tokenizer, tmp_path, subset_key="licence").subsets == ["CC0-1.0"]


def test_names_of_subsets_may_hold_anything(tokenizer: Tokenizer, tmp_path: Path) -> None:
    names = ["Wikipedia (en)", "wikipedia_en", "WIKIPEDIA_EN", "a/../b", "日本", "x" * 300, "."]
    path = write_lines(
        tmp_path / "all.jsonl", *({"text": name, "meta": {"subset": name}} for name in names)
    )
    corpus = run([path], tokenizer, tmp_path / "cache", held_out_fraction=0)
    assert corpus.subsets == sorted(names)
    for name in names:
        ids = corpus.open_shard(name, "train")[0]
        assert tokenizer.decode(ids.tolist()) == name
    # Some file systems do not tell capitals from small letters.
    stems = [path.name.lower() for path in corpus.folder.glob("*.train.idx")]
    assert len(set(stems)) == len(names)


def test_a_bad_record_ends_the_work_or_is_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    good = {"text": "good"}
    path = write_lines(tmp_path / "a.jsonl", good, "{broken", good, '{"no": "text"}')
    with pytest.raises(DataError, match=r"a.jsonl:2"):
        run([path], tokenizer, tmp_path / "cache", held_out_fraction=0)
    assert not list((tmp_path / "cache" / "tokens").glob("*[!k]"))  # nothing but the lock
    corpus = run([path], tokenizer, tmp_path / "cache", held_out_fraction=0, on_error="skip")
    assert corpus.counts["a"]["train"].documents == 2
    assert corpus.report.faults == {"json": 1, "text": 1}
    assert "a.jsonl:2" in corpus.report.describe()
    with pytest.raises(DataError, match=r"a.jsonl:2.*on_error=skip"):
        run([path], tokenizer, tmp_path / "cache", held_out_fraction=0)


def test_an_empty_corpus_is_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "empty.jsonl", "")
    with pytest.raises(DataError, match=r"no documents: .*empty.jsonl"):
        run([path], tokenizer, tmp_path)


def test_a_key_that_makes_hundreds_of_subsets_is_an_error(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    lines = [{"text": "t", "meta": {"url": f"page {number}"}} for number in range(201)]
    path = write_lines(tmp_path / "web.jsonl", *lines)
    with pytest.raises(DataError, match="more than 200 subsets, among them 'page 200'"):
        run([path], tokenizer, tmp_path / "cache", subset_key="url")


def test_large_vocabularies_take_four_bytes_a_token(paths: list[Path], tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    vocabulary = {"[unknown]": 0, "the": 70_000, "end": 1}
    backend = Backend(models.WordLevel(vocabulary, unk_token="[unknown]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    large = Tokenizer.load(tmp_path, eos_token="end")
    shard = run(paths, large, tmp_path / "cache").open_shard("stories", "train")
    assert shard.dtype == np.dtype(np.int32)
    assert 70_000 in shard[0]
