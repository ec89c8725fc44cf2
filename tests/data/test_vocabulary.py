from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from nemo_like.data import vocabulary
from nemo_like.data.held_out import is_held_out
from nemo_like.data.jsonl_zst import read_documents
from nemo_like.data.vocabulary import learn_tokenizer, sample_texts
from nemo_like.testing.corpus import write_corpus
from nemo_like.text.tokenizer import Tokenizer, train_bpe


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return list(write_corpus(tmp_path_factory.mktemp("corpus")).values())


def learn(paths: list[Path], cache_dir: Path, **changes: Any) -> Tokenizer:
    settings = {"vocab_size": 300, "max_bytes": 10**6, "held_out_fraction": 0.2} | changes
    return learn_tokenizer(paths, cache_dir=cache_dir, **settings)


def test_it_learns_from_the_training_split_of_the_subsets_that_are_left(
    paths: list[Path], tmp_path: Path
) -> None:
    texts = [
        document.text
        for document in read_documents(paths)
        if document.meta["subset"] != "code" and not is_held_out(document.text, 0.2)
    ]
    expected = train_bpe(texts, vocab_size=300)
    assert learn(paths, tmp_path, exclude=["code"]).to_bytes() == expected.to_bytes()


def test_it_learns_once(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = learn(paths, tmp_path)
    monkeypatch.setattr(vocabulary, "train_bpe", pytest.fail)
    assert learn(paths, tmp_path).to_bytes() == first.to_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 280},
        {"max_bytes": 5000},
        {"held_out_fraction": 0.5},
        {"exclude": ["stories"]},
        {"subset_key": "licence", "exclude": []},
    ],
)
def test_each_setting_makes_another_one(
    paths: list[Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    learn(paths, tmp_path)
    learn(paths, tmp_path, **changes)
    assert len(list((tmp_path / "tokenizers").glob("*/tokenizer.json"))) == 2


def test_a_sample_fills_the_bytes_and_does_not_hang_on_the_order() -> None:
    texts = [f"text {number} ü" for number in range(1000)]
    shuffled = random.Random(0).sample(texts, k=1000)
    sample = sample_texts(texts, max_bytes=1000)
    assert sample == sample_texts(shuffled, max_bytes=1000)
    assert 980 < sum(len(text.encode()) for text in sample) <= 1000
    numbers = [texts.index(text) for text in sample]
    assert 350 < sum(numbers) / len(numbers) < 650  # from everywhere, not from the start


def test_one_long_text_is_taken_all_the_same() -> None:
    assert sample_texts(["x" * 100], max_bytes=10) == ["x" * 100]
