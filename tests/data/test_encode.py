from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nemo_like.data import encode
from nemo_like.data.encode import encode_in_order, store_documents
from nemo_like.text.tokenizer import Tokenizer, train_bpe

TEXTS = ["the sea was calm, and the ship", "", "größer Übung", "line\nline\n"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, vocab_size=280)


def add_bos(tokenizer: Tokenizer) -> Tokenizer:
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(["<s>"])
    files = {"tokenizer.json": backend.to_str().encode()}
    return Tokenizer(files, bos_token="<s>", eos_token=tokenizer.eos_token)


def test_a_stored_document_begins_with_the_end_where_there_is_no_begin(
    tokenizer: Tokenizer,
) -> None:
    stored = store_documents(tokenizer, TEXTS)
    assert [document.tolist() for document in stored] == [
        [tokenizer.eos_id, *tokenizer.encode(text)] for text in TEXTS
    ]
    assert {document.dtype for document in stored} == {np.dtype(np.uint16)}


def test_a_stored_document_has_begin_and_end_where_they_differ(tokenizer: Tokenizer) -> None:
    both = add_bos(tokenizer)
    stored = store_documents(both, TEXTS)
    assert both.bos_id != both.eos_id
    assert [document.tolist() for document in stored] == [
        [both.bos_id, *tokenizer.encode(text), both.eos_id] for text in TEXTS
    ]


def make_batches(number: int) -> Iterator[tuple[int, list[str]]]:
    for index in range(number):
        yield index, [f"{text} {index}" * (index % 5) for text in TEXTS[: index % 4]]


@pytest.mark.dist
def test_several_processes_give_the_same_in_the_same_order(tokenizer: Tokenizer) -> None:
    alone = list(encode_in_order(make_batches(40), tokenizer, processes=1))
    together = list(encode_in_order(make_batches(40), tokenizer, processes=2))
    assert [tag for tag, _ in together] == list(range(40))
    for (_, ours), (_, theirs) in zip(alone, together, strict=True):
        assert [document.tolist() for document in ours] == [it.tolist() for it in theirs]
        assert {document.dtype for document in theirs} <= {np.dtype(np.uint16)}


@pytest.mark.dist
def test_processes_read_no_further_ahead_than_they_need(tokenizer: Tokenizer) -> None:
    read = 0

    def count() -> Iterator[tuple[int, list[str]]]:
        nonlocal read
        for index in range(100):
            read = index + 1
            yield index, TEXTS

    encoded = encode_in_order(count(), tokenizer, processes=2)
    next(encoded)
    assert read <= 6
    encoded.close()


@pytest.mark.dist
def test_a_process_that_dies_is_an_error(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[Any] = []

    class Watched(encode._Pool):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            pools.append(self)

    monkeypatch.setattr(encode, "_Pool", Watched)
    encoded = encode_in_order(make_batches(1000), tokenizer, processes=2)
    next(encoded)
    for child in pools[0].children:
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="a tokenizing process ended with code -9"):
        list(encoded)
