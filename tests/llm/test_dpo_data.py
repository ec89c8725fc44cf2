"""Pairs from files: what is read, cut, left out and counted, and how batches are laid out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.collections.llm.config import TokenizerConfig
from nemo_like.collections.llm.data import IGNORE_INDEX
from nemo_like.collections.llm.finetune.samples import read_sample
from nemo_like.collections.llm.held_out_samples import find_prompts
from nemo_like.collections.llm.loading import _blank
from nemo_like.collections.llm.preference import PreferenceBatch, PreferenceDataModule
from nemo_like.core.errors import ConfigError, DataError
from nemo_like.testing.loaders import attach
from nemo_like.text.tokenizer import train_bpe

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def make_pair(number: int) -> dict[str, Any]:
    word = WORDS[number % 10]
    answer = " ".join([word] * (1 + number % 3))
    return {"prompt": f"say {number}", "chosen": answer, "rejected": f"not {word}"}


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    train_bpe([" ".join(WORDS) + " say not"] * 5, vocab_size=330).save(folder / "model")
    write(folder / "pairs.jsonl", [make_pair(number) for number in range(40)])
    return folder


def make_data(folder: Path, **changes: Any) -> PreferenceDataModule:
    settings = {
        "files": str(folder / "pairs.jsonl"),
        "tokenizer": TokenizerConfig(path=str(folder / "model")),
        "seq_len": 96,
        "global_batch_size": 4,
        "held_out_fraction": 0.2,
        "seed": 1,
        "cache_dir": str(folder / "cache"),
    } | changes
    data = PreferenceDataModule(**settings)
    data.setup()
    return data


def test_both_answers_of_a_pair_share_a_batch_and_only_answers_are_scored(folder: Path) -> None:
    data = make_data(folder)
    batch = data.read_pairs([3, 0])
    assert isinstance(batch, PreferenceBatch)
    assert batch.pair_ids_P is not None
    assert batch.pair_ids_P.tolist() == [3, 0]
    texts = []
    for tokens_T, targets_T in zip(batch.tokens_BT, batch.targets_BT, strict=True):
        is_scored_T = targets_T != IGNORE_INDEX
        prompt = data.tokenizer.decode(tokens_T[: int(is_scored_T.nonzero()[0]) + 1].tolist())
        texts.append((prompt, data.tokenizer.decode(targets_T[is_scored_T].tolist()).strip()))
    for (prompt, better), (same, worse) in zip(texts[:2], texts[2:], strict=True):
        number = int(prompt.split("say ")[1].split()[0])
        expected = make_pair(number)
        assert prompt == same
        assert (better, worse) == (expected["chosen"], expected["rejected"])
    # What validation by generation shows is the better answer.
    shown = [data.tokenizer.decode(it.reference).strip() for it in find_prompts(batch.better, 9)]
    assert shown == [better for _, better in texts[:2]]


def test_tokens_and_masks_are_those_of_the_encoder(folder: Path) -> None:
    data = make_data(folder, held_out_fraction=0.0)
    batch = data.read_pairs([7])
    assert data._data is not None
    sample = read_sample(make_pair(7), kind="preference")
    for row, encoded in enumerate(data._data.encoder.encode_preference(sample)):  # type: ignore[arg-type]
        length = len(encoded.ids_T) - 1
        assert np.array_equal(batch.tokens_BT[row, :length].numpy(), encoded.ids_T[:-1])
        scored = batch.targets_BT[row, :length] != IGNORE_INDEX
        assert np.array_equal(scored.numpy(), encoded.is_learnt_T[1:])
        assert (batch.targets_BT[row, length:] == IGNORE_INDEX).all()


def test_a_blank_batch_stays_a_batch_of_pairs(folder: Path) -> None:
    batch = make_data(folder).read_pairs([0])
    blank = _blank(batch)
    assert isinstance(blank, PreferenceBatch)
    assert blank.pair_ids_P is batch.pair_ids_P
    assert (blank.targets_BT == IGNORE_INDEX).all()


def test_held_out_pairs_are_numbered_behind_those_of_training(folder: Path) -> None:
    data = make_data(folder)
    train, held_out = data.prepared.train, data.prepared.held_out
    assert len(train) + len(held_out) == data.num_pairs == 40
    assert 0 < len(held_out) < 20
    batch = data.read_pairs([39])
    assert torch.equal(batch.tokens_BT, held_out.read([len(held_out) - 1]).tokens_BT)
    assert isinstance(batch, PreferenceBatch)
    assert batch.pair_ids_P is not None
    assert batch.pair_ids_P.tolist() == [39]


def test_pairs_of_one_prompt_fall_on_one_side(folder: Path) -> None:
    records = [
        make_pair(n) | {"rejected": f"never {WORDS[k]}"} for n in range(20) for k in range(2)
    ]
    files = write(folder / "prompts.jsonl", records)
    data = make_data(folder, files=files, held_out_fraction=0.4)
    for side in (data.prepared.train, data.prepared.held_out):
        assert len(side)
        assert len(side) % 2 == 0


def test_position_decides_and_ranks_share_a_step(folder: Path) -> None:
    data = make_data(folder)
    attach(data, max_steps=6)
    whole = [it.sample_ids for it in data.train_dataloader()]
    assert len(whole) == 6
    data.position = 8
    attach(data, max_steps=6, global_step=2)
    assert [it.sample_ids for it in data.train_dataloader()] == whole[2:]
    data.position = 0
    ranks = []
    for rank in range(2):
        attach(data, rank=rank, size=2, max_steps=6)
        ranks.append([it.sample_ids for it in data.train_dataloader()])
    assert [one + two for one, two in zip(*ranks, strict=True)] == whole


def test_what_says_nothing_is_left_out_and_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [make_pair(number) for number in range(6)]
    records[1]["rejected"] = records[1]["chosen"]
    long = " ".join(WORDS * 20)
    records[2] |= {"chosen": f"{long} one", "rejected": f"{long} two"}  # the same once cut
    records[3] |= {"prompt": long}  # no answer once cut
    records[4] |= {"chosen": long}
    files = write(folder / "odd.jsonl", records)
    with caplog.at_level(logging.INFO, "nemo_like"):
        data = make_data(folder, files=files, seq_len=120, held_out_fraction=0.0)
    assert data.num_pairs == 3
    for text in (
        "3 pairs to learn from",
        "3 longer than 120 tokens (only their start is kept)",
        "1 left out, since cutting left no answer",
        "1 left out, since cutting left two times the same",
        "1 left out, whose answers are the same",
    ):
        assert text in caplog.text
        assert text in (data.describe()[0].note or "")
    assert data.read_pairs([0, 1, 2]).tokens_BT.shape == (6, 120)
    dropped = make_data(folder, files=files, seq_len=120, held_out_fraction=0.0, too_long="drop")
    assert dropped.num_pairs == 2
    assert "3 longer than 120 tokens (left out)" in (dropped.describe()[0].note or "")
    assert dropped.pairs_key != data.pairs_key


def test_rows_may_all_have_one_length(folder: Path) -> None:
    assert make_data(folder, pad_to="seq_len").read_pairs([0]).tokens_BT.shape == (2, 96)


def test_files_without_a_pair_are_refused(folder: Path) -> None:
    same = [{"prompt": "say 1", "chosen": "one", "rejected": "one"}] * 2
    files = write(folder / "same.jsonl", same)
    with pytest.raises(
        DataError, match=r"no pair is left to train on .*2 left out, whose answers are the same"
    ):
        make_data(folder, files=files)


def test_records_that_are_no_preference_end_the_run_or_are_skipped(folder: Path) -> None:
    files = write(folder / "mixed.jsonl", [make_pair(1), {"text": "one"}, make_pair(2)])
    with pytest.raises(DataError, match=r"mixed.jsonl:2.*'chosen' is missing.*on_error=skip"):
        make_data(folder, files=files, held_out_fraction=0.0)
    data = make_data(folder, files=files, held_out_fraction=0.0, on_error="skip")
    assert data.num_pairs == 2
    assert "1 records skipped" in (data.describe()[0].note or "")


def test_validation_files_are_read_beside_the_training_files(folder: Path) -> None:
    files = write(folder / "validation.jsonl", [make_pair(number) for number in range(50, 53)])
    data = make_data(folder, validation_files=files, held_out_fraction=None)
    assert (len(data.prepared.train), len(data.prepared.held_out)) == (40, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": []}, r"files=\[\]: names no file"),
        ({"seq_len": 0}, "seq_len=0: must be at least 1"),
        ({"held_out_fraction": 1.0}, "held_out_fraction=1.0: must be at least 0 and below 1"),
        ({"num_workers": -1}, "num_workers=-1: must be at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_data(folder, **changes)


def test_data_that_are_not_ready_say_so(folder: Path) -> None:
    data = PreferenceDataModule(
        files="x.jsonl", tokenizer=TokenizerConfig(path="x"), seq_len=8, global_batch_size=1
    )
    with pytest.raises(RuntimeError, match="call setup"):
        data.describe()
