from __future__ import annotations

import functools
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.collections.llm.config import MixtureConfig, TokenizerConfig
from nemo_like.collections.llm.data import IGNORE_INDEX, TextBatch, TextDataModule
from nemo_like.core.build import build
from nemo_like.core.datamodule import StepBatch
from nemo_like.core.errors import ConfigError, DataError
from nemo_like.data.held_out import is_held_out
from nemo_like.data.jsonl_zst import read_documents
from nemo_like.testing import loaders
from nemo_like.testing.corpus import write_corpus
from nemo_like.testing.loaders import list_ids
from nemo_like.text.tokenizer import Tokenizer

SEQ_LEN = 32
BATCH = 8
MICRO = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and a cache that the tests of this file share."""
    folder = tmp_path_factory.mktemp("text")
    write_corpus(folder / "corpus")
    return folder


attach = functools.partial(loaders.attach, micro=MICRO)


def make_data(folder: Path, **changes: Any) -> TextDataModule:
    settings = {
        "corpus": [str(folder / "corpus" / "*.jsonl.zst")],
        "tokenizer": TokenizerConfig(train_vocab_size=300),
        "seq_len": SEQ_LEN,
        "global_batch_size": BATCH,
        "held_out_fraction": 0.2,
        "seed": 1,
        "cache_dir": str(folder / "cache"),
    } | changes
    data = TextDataModule(**settings)
    data.setup("fit")
    return data


def read_steps(
    folder: Path, *, size: int = 1, position: int = 0, done: int = 0, **changes: Any
) -> list[list[StepBatch]]:
    make = functools.partial(make_data, folder, **changes)
    return loaders.read_steps(make, size=size, position=position, done=done, micro=MICRO)


def count_targets(batch: TextBatch) -> int:
    return int((batch.targets_BT != IGNORE_INDEX).sum())


@pytest.mark.parametrize(
    ("size", "num_workers"), [(2, 0), (3, 0), pytest.param(1, 2), pytest.param(3, 2)]
)
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


def test_each_sample_comes_once_an_epoch_and_its_last_batch_is_short(folder: Path) -> None:
    data = make_data(folder)
    size = data.order.epoch_size
    num_steps = -(-size // BATCH)
    assert size % BATCH
    steps = list(attach(data, max_steps=2 * num_steps).train_dataloader())
    for epoch in (steps[:num_steps], steps[num_steps:]):
        ids = [sample for step in epoch for sample in step.sample_ids]
        assert sorted(ids) == list(range(size))
        assert len(epoch[-1].sample_ids) == size % BATCH
    assert [step.position for step in steps[num_steps - 1 :][:2]] == [size, size + BATCH]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("done", [1, 5, 11])
def test_a_resumed_run_reads_the_tail_of_the_uninterrupted_one(
    folder: Path, done: int, size: int
) -> None:
    whole = read_steps(folder)
    tail = read_steps(folder, size=size, done=done, position=whole[done - 1][0].position)
    assert list_ids(tail) == list_ids(whole)[done:]


def test_the_same_bytes_come_with_and_without_workers(folder: Path) -> None:
    def list_tensors(num_workers: int) -> list[torch.Tensor]:
        steps = read_steps(folder, num_workers=num_workers)
        batches = [batch for step in steps for batch in step[0].micro_batches]
        rows = [(batch.tokens_BT, batch.targets_BT, batch.segments_BT) for batch in batches]
        return [tensor for row in rows for tensor in row if tensor is not None]

    alone = list_tensors(0)
    assert {tensor.dtype for tensor in alone} == {torch.int64, torch.int32}  # with segments
    torch.testing.assert_close(list_tensors(2), alone, rtol=0, atol=0)


def test_the_length_is_that_of_the_whole_run(folder: Path) -> None:
    data = attach(make_data(folder), global_step=9)
    loader = data.train_dataloader()
    assert (len(loader), len(list(loader))) == (12, 3)


def test_loading_draws_nothing_from_the_global_generator(folder: Path) -> None:
    before = torch.get_rng_state()
    data = attach(make_data(folder))
    list(data.train_dataloader())
    list(data.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_hold_the_text(folder: Path) -> None:
    data = attach(make_data(folder))
    step = next(iter(data.train_dataloader()))
    texts = [document.text for document in read_documents(sorted((folder / "corpus").iterdir()))]
    batch = step.micro_batches[0]
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == torch.int64
    assert batch.tokens_BT.shape == batch.targets_BT.shape == (3, SEQ_LEN)
    assert batch.tokens_BT.is_contiguous()
    for tokens_T in batch.tokens_BT:
        pieces = data.tokenizer.decode(tokens_T.tolist(), skip_special_tokens=False)
        for piece in pieces.split(data.tokenizer.eos_token):
            assert any(piece.strip("\ufffd") in text for text in texts)


def test_blank_micro_batches_have_no_targets(folder: Path) -> None:
    data = attach(make_data(folder, global_batch_size=1), rank=0, size=2)
    step = next(iter(data.train_dataloader()))
    assert [count_targets(batch) for batch in step.micro_batches] == [0]
    assert step.sample_ids == []
    data = attach(make_data(folder, global_batch_size=1), rank=1, size=2)
    step = next(iter(data.train_dataloader()))
    assert count_targets(step.micro_batches[0]) == SEQ_LEN


def test_another_tokenizer_with_begin_and_end_masks_what_follows_the_end(
    folder: Path, tmp_path: Path
) -> None:
    trained = make_data(folder).tokenizer
    trained.backend.add_special_tokens(["<s>"])
    trained.backend.save(str(tmp_path / "tokenizer.json"))
    config = TokenizerConfig(
        path=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token=trained.eos_token
    )
    data = attach(make_data(folder, tokenizer=config, cache_dir=str(tmp_path)))
    tokenizer = data.tokenizer
    batches = [b for step in data.train_dataloader() for b in step.micro_batches]
    tokens = torch.cat([batch.tokens_BT for batch in batches])
    targets = torch.cat([batch.targets_BT for batch in batches])
    assert (tokens == tokenizer.eos_id).any()
    assert (targets[tokens == tokenizer.eos_id] == IGNORE_INDEX).all()
    assert not (targets == tokenizer.prefix_id).any()
    assert (targets == tokenizer.eos_id).any()


def test_mixtures_are_drawn_as_the_table_says(folder: Path) -> None:
    mixture = MixtureConfig(epochs={"code": 2, "letters": 0, "stories": 0.5})
    data = make_data(folder, mixture=mixture)
    sizes = dict(zip(data.order.names, data.order.num_blocks, strict=True))
    expected = {"code": 2 * sizes["code"], "stories": int(sizes["stories"] / 2 + 0.5)}
    ids = data.order.sample_ids(0, data.order.epoch_size).tolist()
    limits = {"code": sizes["code"], "letters": sizes["code"] + sizes["letters"]}
    drawn = Counter(
        "code" if i < limits["code"] else "letters" if i < limits["letters"] else "stories"
        for i in ids
    )
    assert dict(drawn) == expected


def test_excluded_subsets_are_seen_nowhere(folder: Path) -> None:
    data = make_data(folder, mixture=MixtureConfig(exclude=["code"]))
    assert data.order.names == ["letters", "stories"]
    assert {subset for subset, _ in data.held_out_documents()} == {"letters", "stories"}
    assert data.tokenizer.content_hash != make_data(folder).tokenizer.content_hash


def test_subsets_of_zero_weight_are_held_out_all_the_same(folder: Path) -> None:
    weights = {"code": 0, "letters": 1, "stories": 1}
    data = make_data(folder, mixture=MixtureConfig(weights=weights))
    assert data.order.draws[0] == 0
    assert "code" in {subset for subset, _ in data.held_out_documents()}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", [1.0, 4])
def test_validation_does_not_hang_on_the_number_of_ranks(
    folder: Path, size: int, limit: float
) -> None:
    def read(rank: int, size: int) -> list[TextBatch]:
        data = attach(make_data(folder), rank=rank, size=size, micro=2, limit_val_batches=limit)
        return list(data.val_dataloader())

    alone = read(0, 1)
    ranks = [read(rank, size) for rank in range(size)]
    assert len({len(batches) for batches in ranks}) == 1
    dealt = [batch for turn in zip(*ranks, strict=True) for batch in turn if count_targets(batch)]
    assert len(dealt) == len(alone) == (4 if limit == 4 else len(alone))
    for ours, theirs in zip(alone, dealt, strict=True):
        assert torch.equal(ours.tokens_BT, theirs.tokens_BT)
        assert torch.equal(ours.targets_BT, theirs.targets_BT)


def test_validation_sees_every_held_out_token_and_mixes_the_subsets(folder: Path) -> None:
    data = attach(make_data(folder), micro=2)
    documents = list(data.held_out_documents())
    num_stored = sum(1 + len(data.tokenizer.encode(text)) for _, text in documents)
    batches = list(data.val_dataloader())
    # The last token of each of the three subsets has no successor.
    assert sum(map(count_targets, batches)) == num_stored - 3
    first = torch.cat([batch.tokens_BT for batch in batches[: len(batches) // 5]])
    text = data.tokenizer.decode(first.flatten().tolist())
    assert all(word in text for word in ("river", "import", "größer"))


def test_held_out_documents_are_raw_and_disjoint_from_training(folder: Path) -> None:
    data = make_data(folder)
    paths = sorted((folder / "corpus").iterdir())
    held_out = [text for _, text in data.held_out_documents()]
    all_texts = [document.text for document in read_documents(paths)]
    assert held_out == [text for text in all_texts if is_held_out(text, 0.2)]
    shard = data._ready.corpus.open_shard("stories", "train")
    stored = {data.tokenizer.decode(shard[number].tolist()) for number in range(len(shard))}
    assert not stored & set(held_out)


def test_without_held_out_documents_there_is_no_validation(folder: Path) -> None:
    data = attach(make_data(folder, held_out_fraction=0))
    assert data.val_dataloader() == []
    assert list(data.held_out_documents()) == []


def test_a_subset_without_held_out_documents_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make_data(folder, held_out_fraction=1e-9)
    assert "holds out no document of code, letters, stories" in caplog.text


def test_artefacts_are_the_files_of_the_tokenizer(folder: Path) -> None:
    data = make_data(folder)
    files = data.artefacts()
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    assert Tokenizer.from_bytes(files).content_hash == data.tokenizer.content_hash


def test_the_composition_is_what_was_drawn(folder: Path) -> None:
    data = attach(make_data(folder), max_steps=7)
    steps = list(data.train_dataloader())
    data.position = steps[4].position
    drawn = [sample for step in steps[:5] for sample in step.sample_ids]
    num_code = sum(sample < data.order.num_blocks[0] for sample in drawn)
    table = data.describe()[0].table
    assert table is not None
    assert [row[0] for row in table.rows] == ["code", "letters", "stories", "total"]
    assert table.rows[0][-1] == num_code / 40
    assert table.rows[0][-2] == num_code / data.order.num_blocks[0]
    assert "40 samples" in data.describe()[0].note
    data.position = 0
    assert "56 samples" in data.describe()[0].note  # what is going to be drawn


def test_held_out_text_is_described_in_bytes(folder: Path) -> None:
    data = make_data(folder)
    table = data.describe()[1].table
    assert table is not None
    num_bytes = sum(len(text.encode()) for _, text in data.held_out_documents())
    assert table.rows[-1][3] == num_bytes


def test_skipped_records_are_described(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text('{"text": "a few words"}\n{broken\n')
    config: dict[str, Any] = {"corpus": str(tmp_path / "corpus" / "*"), "held_out_fraction": 0}
    data = make_data(tmp_path, on_error="skip", **config)
    assert "a.jsonl:2" in data.describe()[0].note
    with pytest.raises(DataError, match=r"a.jsonl:2"):
        make_data(tmp_path, **config)


def test_the_position_travels_and_other_data_are_noticed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = attach(make_data(folder))
    data.position = 17
    state = data.state_dict()
    same, other = attach(make_data(folder)), attach(make_data(folder, seed=2))
    for resumed in (same, other):
        resumed.load_state_dict(state)
        assert resumed.position == 17
    with caplog.at_level(logging.WARNING):
        same.train_dataloader()
        assert not caplog.text
        other.train_dataloader()
    assert "at position 17 of another order of samples" in caplog.text


def test_a_configuration_becomes_a_data_module(folder: Path) -> None:
    data = build(
        {
            "_target_": "nemo_like.collections.llm.TextDataModule",
            "corpus": str(folder / "corpus" / "*.jsonl.zst"),
            "tokenizer": {"train_vocab_size": 300},
            "seq_len": 16,
            "global_batch_size": 4,
            "mixture": {"weights": {"code": 1, "letters": 1.5, "stories": 0}},
            "cache_dir": str(folder / "cache"),
        }
    )
    assert isinstance(data, TextDataModule)
    assert data.config.mixture.weights == {"code": 1, "letters": 1.5, "stories": 0}
    assert data.config.tokenizer.train_mb == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 0}, "seq_len=0: must be at least 1"),
        ({"global_batch_size": 0}, "global_batch_size=0: must be at least 1"),
        ({"held_out_fraction": 1.0}, "held_out_fraction=1.0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"tokenize_processes": 0}, "tokenize_processes=0"),
        ({"corpus": []}, r"corpus=\[\]: names no file"),
        ({"tokenizer": TokenizerConfig()}, "tokenizer.path=None and train_vocab_size=None"),
        (
            {"tokenizer": TokenizerConfig(path="x", train_vocab_size=300)},
            "tokenizer.path=x and train_vocab_size=300: give one of the two",
        ),
        ({"tokenizer": TokenizerConfig(train_vocab_size=200)}, "train_vocab_size=200"),
        (
            {"tokenizer": TokenizerConfig(train_vocab_size=300, eos_token="x")},
            "tokenizer.eos_token='x': is for a tokenizer to load",
        ),
        ({"tokenizer": TokenizerConfig(train_vocab_size=300, train_mb=0)}, "train_mb=0"),
        ({"mixture": MixtureConfig(weights={"code": -1})}, "mixture.weights.code=-1"),
        ({"mixture": MixtureConfig(weights={}, epochs={})}, "both are given"),
        (
            {"mixture": MixtureConfig(epochs={"code": 1}, exclude=["code"])},
            "mixture.epochs.code=1: is excluded as well",
        ),
        (
            {"mixture": MixtureConfig(exclude=["cod"])},
            "mixture.exclude.cod: no such subset; did you mean 'code'",
        ),
        (
            {"mixture": MixtureConfig(epochs={"storys": 2})},
            "mixture.epochs.storys: no such subset; did you mean 'stories'",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_data(folder, **changes)


def test_faults_come_all_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_data(folder, seq_len=-1, num_workers=-1, tokenizer=TokenizerConfig())
    assert len(caught.value.faults) == 3


def test_a_run_without_an_end_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_steps=-1"):
        attach(make_data(folder), max_steps=-1).train_dataloader()


def test_a_corpus_of_held_out_documents_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"the training split of a has no text"):
        make_data(tmp_path, corpus=str(tmp_path / "a.jsonl"), held_out_fraction=0)


def test_data_before_setup_are_refused() -> None:
    data = TextDataModule(
        corpus="x",
        tokenizer=TokenizerConfig(train_vocab_size=300),
        seq_len=8,
        global_batch_size=1,
    )
    with pytest.raises(RuntimeError, match=r"call setup\(\) first"):
        _ = data.tokenizer


def test_the_configuration_is_read_without_torch() -> None:
    code = (
        "import sys, nemo_like.collections.llm.config as config; import nemo_like.collections.llm; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shares_of_the_mixture_are_those_of_its_table(folder: Path) -> None:
    weights = {"stories": 1.0, "code": 2.0, "letters": 1.0}
    shares = make_data(folder, mixture=MixtureConfig(weights=weights)).mixture_shares
    assert shares is not None
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["code"] == pytest.approx(0.5, abs=0.02)
    # Without a table, or with a subset left out, they are no weights for a mean over all subsets.
    assert make_data(folder).mixture_shares is None
    without = MixtureConfig(weights=weights | {"code": 0.0})
    assert make_data(folder, mixture=without).mixture_shares is None
