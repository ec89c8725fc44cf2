"""The fine-tuning data module: what is drawn, held out, cut and skipped; exact resume on any number of ranks."""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.collections.llm.config import TokenizerConfig
from nemo_like.collections.llm.data import IGNORE_INDEX, TextBatch
from nemo_like.collections.llm.finetune import FinetuneDataModule
from nemo_like.collections.llm.finetune.chat import open_chat_template
from nemo_like.collections.llm.finetune.config import KeysConfig, SourceConfig
from nemo_like.collections.llm.finetune.template import JinjaTemplate
from nemo_like.collections.llm.finetune.tokenizer import open_tokenizer
from nemo_like.collections.llm.loading import TokenDataModule
from nemo_like.core.build import build
from nemo_like.core.datamodule import StepBatch
from nemo_like.core.errors import ConfigError, DataError
from nemo_like.testing import loaders
from nemo_like.testing.loaders import attach, list_ids
from nemo_like.text.tokenizer import Tokenizer, train_bpe

SEQ_LEN = 96
BATCH = 4
MICRO = 2
WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "user",
    "assistant",
]


def make_chat(number: int) -> dict[str, Any]:
    answer = " ".join(WORDS[(number + step) % 10] for step in range(1 + number % 4))
    return {
        "messages": [
            {"role": "user", "content": f"{WORDS[number % 10]} {number}"},
            {"role": "assistant", "content": answer},
        ]
    }


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, two files of chats, and a cache that the tests of this file share."""
    folder = tmp_path_factory.mktemp("finetune")
    train_bpe([" ".join(WORDS) + " <|im_start|>"] * 5, vocab_size=330).save(folder / "model")
    write(folder / "a.jsonl", [make_chat(number) for number in range(60)])
    write(folder / "b.jsonl", [make_chat(number) for number in range(100, 120)])
    return folder


def make_data(folder: Path, **changes: Any) -> FinetuneDataModule:
    settings = {
        "files": str(folder / "a.jsonl"),
        "tokenizer": TokenizerConfig(path=str(folder / "model")),
        "seq_len": SEQ_LEN,
        "global_batch_size": BATCH,
        "held_out_fraction": 0.2,
        "seed": 1,
        "cache_dir": str(folder / "cache"),
    } | changes
    data = FinetuneDataModule(**settings)
    data.setup("fit")
    return data


def read_steps(
    folder: Path, *, size: int = 1, position: int = 0, done: int = 0, **changes: Any
) -> list[list[StepBatch]]:
    make = functools.partial(make_data, folder, **changes)
    return loaders.read_steps(make, size=size, position=position, done=done, micro=MICRO)


def count_targets(batch: TextBatch) -> int:
    return int((batch.targets_BT != IGNORE_INDEX).sum())


def list_answers(data: FinetuneDataModule, loader: Any) -> Counter[str]:
    """The learnt runs of all rows, each with the text before it, counted."""
    found: Counter[str] = Counter()
    for item in loader:
        for batch in item.micro_batches if isinstance(item, StepBatch) else [item]:
            for tokens_T, targets_T in zip(batch.tokens_BT, batch.targets_BT, strict=True):
                learnt = targets_T[targets_T != IGNORE_INDEX].tolist()
                text = data.tokenizer.decode(learnt, skip_special_tokens=False)
                found.update(text.split("<|endoftext|>")[:-1])
                assert len(tokens_T) <= SEQ_LEN
    return found


def list_expected(numbers: range) -> Counter[str]:
    return Counter(make_chat(number)["messages"][1]["content"] for number in numbers)


@pytest.mark.parametrize("packing", [True, False])
def test_every_answer_is_learnt_once_an_epoch_or_held_out(folder: Path, packing: bool) -> None:
    data = make_data(folder, packing=packing)
    attach(data, max_steps=-(-data.order.epoch_size // BATCH))
    trained = list_answers(data, data.train_dataloader())
    held_out = list_answers(data, data.val_dataloader())
    assert trained + held_out == list_expected(range(60))
    assert held_out
    assert (data.order.epoch_size < sum(trained.values())) == packing


@pytest.mark.parametrize(("size", "num_workers"), [(2, 0), (3, 0), (2, 2)])
def test_global_batches_do_not_hang_on_ranks_and_workers(
    folder: Path, size: int, num_workers: int
) -> None:
    alone, split = read_steps(folder), read_steps(folder, size=size, num_workers=num_workers)
    assert list_ids(split) == list_ids(alone)
    for ours, theirs in zip(alone, split, strict=True):
        assert {rank.position for rank in theirs} == {ours[0].position}
        assert len({len(rank.micro_batches) for rank in theirs}) == 1
        number = sum(count_targets(batch) for rank in theirs for batch in rank.micro_batches)
        assert number == sum(map(count_targets, ours[0].micro_batches))


@pytest.mark.parametrize(("size", "done"), [(1, 1), (1, 7), (3, 5)])
def test_a_resumed_run_reads_the_tail_of_the_uninterrupted_one(
    folder: Path, size: int, done: int
) -> None:
    whole = read_steps(folder)
    tail = read_steps(folder, size=size, done=done, position=whole[done - 1][0].position)
    assert list_ids(tail) == list_ids(whole)[done:]
    if size == 1:
        for ours, theirs in zip(whole[done:], tail, strict=True):
            for mine, other in zip(ours[0].micro_batches, theirs[0].micro_batches, strict=True):
                assert torch.equal(mine.tokens_BT, other.tokens_BT)
                assert torch.equal(mine.targets_BT, other.targets_BT)


def test_other_data_than_those_of_the_checkpoint_are_noticed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = attach(make_data(folder))
    data.position = 8
    state = data.state_dict()
    same, other = attach(make_data(folder)), attach(make_data(folder, too_long="drop", seq_len=64))
    for resumed in (same, other):
        resumed.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        same.train_dataloader()
        assert not caplog.text
        other.train_dataloader()
    assert "at position 8 of another order of samples" in caplog.text


def test_files_are_tokenised_once_and_packed_once_for_each_length(
    folder: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    options = {"cache_dir": str(tmp_path)}
    with caplog.at_level(logging.INFO):
        for length in (32, 32, 24):
            make_data(folder, seq_len=length, **options)
    assert caplog.text.count("tokenising the samples of 1 files") == 1
    count = lambda name: len([it for it in (tmp_path / name).iterdir() if it.is_dir()])  # noqa: E731
    assert (count("samples"), count("blocks")) == (1, 4)  # of each length one for either split
    make_data(folder, chat_template="none", **options)
    assert count("samples") == 2


def test_sources_are_drawn_by_their_weights(folder: Path) -> None:
    def make(weight_a: float | None, weight_b: float | None) -> FinetuneDataModule:
        sources = {
            "a": SourceConfig(files=str(folder / "a.jsonl"), weight=weight_a),
            "b": SourceConfig(files=str(folder / "b.jsonl"), weight=weight_b),
        }
        return make_data(folder, files=None, sources=sources, packing=False)

    even, plain = make(1, 1), make(None, None)
    assert plain.order.draws == plain.order.num_blocks
    assert even.order.draws[0] == pytest.approx(even.order.draws[1], abs=1)
    assert sum(even.order.draws) == sum(plain.order.draws)
    table = attach(even).describe()[0].table
    assert table is not None
    assert [row[0] for row in table.rows] == ["a", "b"]
    assert sum(row[-1] for row in table.rows) == pytest.approx(1)


def test_separate_files_validate(folder: Path) -> None:
    options = {"validation_files": str(folder / "b.jsonl"), "held_out_fraction": None}
    data = attach(make_data(folder, **options), max_steps=100)
    assert list_answers(data, data.val_dataloader()) == list_expected(range(100, 120))
    assert sum(map(len, (it.shard for it in data._data.blocks.values()))) == 60  # type: ignore[union-attr]
    nothing = attach(make_data(folder, held_out_fraction=0.0))
    assert nothing.val_dataloader() == []


@pytest.mark.parametrize("size", [1, 3])
def test_validation_does_not_hang_on_the_number_of_ranks(folder: Path, size: int) -> None:
    ranks = []
    for rank in range(size):
        data = attach(make_data(folder), rank=rank, size=size, micro=1)
        ranks.append(list(data.val_dataloader()))
    assert len({len(batches) for batches in ranks}) == 1
    alone = list(attach(make_data(folder), micro=1).val_dataloader())
    dealt = [batch for turn in zip(*ranks, strict=True) for batch in turn if count_targets(batch)]
    assert [it.tokens_BT.tolist() for it in dealt] == [it.tokens_BT.tolist() for it in alone]


def test_what_was_too_long_is_counted_in_log_and_report(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = make_chat(0)
    long["messages"][1]["content"] = " ".join(WORDS * 10)
    hopeless = make_chat(1)
    hopeless["messages"][0]["content"] = " ".join(WORDS * 10)
    files = write(tmp_path / "long.jsonl", [make_chat(2), long, hopeless])
    expected = {
        "keep_start": ("only their start is kept", 2, "1 left out, since cutting left nothing"),
        "keep_end": ("only their end is kept", 3, "2 longer"),
        "split": ("split", 3, "left out"),
        "drop": ("dropped", 1, "2 longer"),
    }
    for policy, (action, least, text) in expected.items():
        caplog.clear()
        with caplog.at_level(logging.INFO):
            data = make_data(
                folder, files=files, too_long=policy, packing=False, held_out_fraction=0.0
            )
        assert data.order.epoch_size >= least
        note = attach(data).describe()[0].note
        for told in (caplog.text, note):
            assert f"2 longer than {SEQ_LEN} tokens ({action})" in told
            assert text in told


def test_records_that_cannot_be_used_are_fatal_or_counted(folder: Path, tmp_path: Path) -> None:
    records = [make_chat(0), {"messages": [{"role": "user", "content": "x"}]}, make_chat(1)]
    records.append({"prompt": "x", "chosen": "y", "rejected": "z"})
    files = write(tmp_path / "bad.jsonl", records)
    options = {"files": files, "held_out_fraction": 0.0}
    with pytest.raises(DataError, match=r"bad.jsonl:2: .*no answer.*; on_error=skip leaves"):
        make_data(folder, **options)
    data = attach(make_data(folder, on_error="skip", **options))
    note = data.describe()[0].note
    assert "2 records skipped" in note
    assert "2 documents read, skipped: 2 sample" in note
    assert "bad.jsonl:4: is a preference pair" in note
    with pytest.raises(DataError, match=r"bad.jsonl:2"):  # now from the cache
        make_data(folder, **options)
    preference = write(tmp_path / "preference.jsonl", records[3:])
    keys = KeysConfig(completion="chosen")
    chosen = make_data(folder, files=preference, kind="pair", keys=keys, held_out_fraction=0.0)
    assert chosen.order.epoch_size == 1


def test_a_data_module_must_say_how_its_samples_are_made_ready() -> None:
    bare = TokenDataModule(seq_len=1, global_batch_size=1, num_workers=0, seed=0)
    with pytest.raises(NotImplementedError, match="TokenDataModule must define prepare"):
        bare.setup()


def test_nothing_to_train_on_is_an_error(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"no sample is left to train on in train.*60 longer than 2"
    ):
        make_data(folder, seq_len=2, too_long="drop", held_out_fraction=0.0)


def test_the_tokenizer_is_found_where_the_model_is(folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "run" / "checkpoints" / "step_00000002"
    Tokenizer.load(folder / "model").save(whole)
    with pytest.raises(DataError, match="run: has no whole checkpoint yet"):
        open_tokenizer(tmp_path / "run")
    (whole / "manifest.json").write_text("{}")
    expected = Tokenizer.load(folder / "model").content_hash
    assert open_tokenizer(tmp_path / "run").content_hash == expected
    assert open_tokenizer(whole).content_hash == expected


@pytest.mark.parametrize("name", [None, "none"])
def test_a_checkpoint_carries_the_template_that_it_was_trained_with(
    folder: Path, tmp_path: Path, name: str | None
) -> None:
    data = make_data(folder, chat_template=name)
    files = data.artefacts()
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    chat = open_chat_template(Tokenizer.load(tmp_path))
    assert isinstance(chat.template, JinjaTemplate)
    call = {"type": "function", "function": {"name": "one", "arguments": {"zwölf": [1, "2"]}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    plain = [{"role": "system", "content": "ten"}, *make_chat(3)["messages"]]
    cases: list[tuple[list[dict[str, Any]], list[Any] | None]] = [(plain, None), (plain[:2], None)]
    if name is None:
        calls = [*plain[:2], calling, calling | {"content": "two"}]
        cases += [(calls, None), (calls, [call]), (calls[1:], [call, call])]
    for messages, tools in cases:
        for asks in (False, True):
            expected = data.chat.render(messages, tools, asks_for_answer=asks)
            assert chat.render(messages, tools, asks_for_answer=asks) == expected
    assert chat.end_id == data.chat.end_id


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": None}, r"files=None and sources=\[\]: give one of the two"),
        ({"sources": {"a": SourceConfig(files="x")}}, r"and sources=\['a'\]: give one of the two"),
        ({"files": []}, r"files=\[\]: names no file"),
        (
            {
                "files": None,
                "sources": {"a": SourceConfig(files="x", weight=1), "b": SourceConfig(files="y")},
            },
            "sources: no weight for b",
        ),
        (
            {"files": None, "sources": {"a": SourceConfig(files="", weight=0)}},
            r"(?s)sources.a.files='': names no file.*sources.a.weight=0: must be a number above 0",
        ),
        ({"seq_len": 0}, "seq_len=0: must be at least 1"),
        ({"global_batch_size": 0}, "global_batch_size=0: must be at least 1"),
        ({"num_workers": -1}, "num_workers=-1: must be at least 0"),
        ({"pad_to": "seq_len"}, "pad_to=seq_len: has no effect with packing=true"),
        ({"held_out_fraction": 1.0}, "held_out_fraction=1.0: must be at least 0 and below 1"),
        ({"validation_files": "x"}, "held_out_fraction=0.2: has no effect beside validation_files"),
        (
            {"tokenizer": TokenizerConfig(train_vocab_size=300)},
            "tokenizer.train_vocab_size=300: fine-tuning takes the tokenizer of the model",
        ),
        ({"tokenizer": TokenizerConfig()}, "tokenizer.path=None and train_vocab_size=None"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_data(folder, **changes)


def test_a_configuration_becomes_a_data_module(folder: Path) -> None:
    data = build(
        {
            "_target_": "nemo_like.collections.llm.finetune.FinetuneDataModule",
            "sources": {"a": {"files": str(folder / "a.jsonl"), "keys": {"role": "role"}}},
            "tokenizer": {"path": str(folder / "model")},
            "seq_len": 16,
            "global_batch_size": 4,
            "cache_dir": str(folder / "cache"),
        }
    )
    assert isinstance(data, FinetuneDataModule)
    assert data.config.sources["a"].keys == KeysConfig(role="role")
    assert data.config.held_out == 0.02
    with pytest.raises(RuntimeError, match="has no data yet"):
        data.describe()


def test_the_shipped_chats_are_whole_and_free(folder: Path) -> None:
    data = make_data(
        folder, files="pkg://nemo_like.samples/chat/*.jsonl.zst", seq_len=512, on_error="raise"
    )
    table = attach(data).describe()[0].table
    assert table is not None
    assert table.rows[0][1] + len(data._data.held_out_blocks["train"].shard) == 1418  # type: ignore[operator, union-attr]
