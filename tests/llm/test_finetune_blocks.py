"""Cutting and packing: nothing is lost without a count, and a packed sample is computed as if it were alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from nemo_like.collections.llm.data import IGNORE_INDEX, TextBatch
from nemo_like.collections.llm.decoder.config import DecoderConfig
from nemo_like.collections.llm.decoder.network import DecoderNetwork
from nemo_like.collections.llm.finetune.blocks import BlockReader, plan_blocks
from nemo_like.collections.llm.finetune.cut import cut_samples
from nemo_like.collections.llm.finetune.pack import keep_apart, pack_best_fit
from nemo_like.collections.llm.finetune.store import SampleShard, Store
from nemo_like.collections.llm.losses import token_losses
from nemo_like.data.jsonl_zst import ReadReport
from nemo_like.data.token_shards import TokenShardWriter

SEQ_LEN = 16


def write_shard(
    prefix: Path, lengths: list[int], *, learnt_from: int = 3, seed: int = 0
) -> SampleShard:
    """Random samples whose first tokens are context."""
    draw = np.random.default_rng(seed)
    with (
        TokenShardWriter(f"{prefix}.ids", dtype=np.uint16) as ids,
        TokenShardWriter(f"{prefix}.learnt", dtype=np.uint8) as learnt,
    ):
        for length in lengths:
            ids.add(draw.integers(1, 64, length).astype(np.uint16))
            learnt.add((np.arange(length) >= learnt_from).astype(np.uint8))
    return SampleShard(prefix)


def list_pieces(shard: SampleShard, **options: object) -> tuple[list[list[int]], dict[str, int]]:
    pieces = cut_samples(shard, seq_len=SEQ_LEN, **options)  # type: ignore[arg-type]
    return pieces.table_P3.tolist(), pieces.counts


def test_each_policy_does_what_it_says_and_counts(tmp_path: Path) -> None:
    # Of 17 tokens 16 are inputs: it fits. 40 tokens are 39 inputs: three pieces.
    shard = write_shard(tmp_path / "a", [5, 17, 40, 18])
    whole = [[0, 0, 5], [1, 0, 17]]
    count = {"too long": 2, "without a target": 0}
    assert list_pieces(shard, too_long="keep_start") == ([*whole, [2, 0, 17], [3, 0, 17]], count)
    assert list_pieces(shard, too_long="keep_end") == ([*whole, [2, 23, 40], [3, 1, 18]], count)
    assert list_pieces(shard, too_long="drop") == (whole, count)
    split = [[2, 0, 17], [2, 16, 33], [2, 32, 40], [3, 0, 17], [3, 16, 18]]
    assert list_pieces(shard, too_long="split") == ([*whole, *split], count)


def test_pieces_where_nothing_is_learnt_are_left_out_and_counted(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a", [40, 19], learnt_from=17)
    assert list_pieces(shard, too_long="keep_start") == ([], {"too long": 2, "without a target": 2})
    table, counts = list_pieces(shard, too_long="split")
    assert table == [[0, 16, 33], [0, 32, 40], [1, 16, 19]]
    assert counts == {"too long": 2, "without a target": 2}


def test_packing_keeps_pieces_whole_and_is_tight(tmp_path: Path) -> None:
    draw = random.Random(3)
    lengths = [draw.randint(1, 100) for _ in range(1000)]
    packing = pack_best_fit(lengths, capacity=128)
    blocks = [packing[number].tolist() for number in range(len(packing))]
    assert sorted(piece for block in blocks for piece in block) == list(range(1000))
    fill = [sum(lengths[piece] for piece in block) for block in blocks]
    assert max(fill) <= 128
    assert len(blocks) <= -(-sum(lengths) // 128) * 1.02
    again = pack_best_fit(np.array(lengths), capacity=128)
    assert np.array_equal(again.order_P, packing.order_P)
    assert pack_best_fit([6, 4, 5, 3, 2], capacity=10).order_P.tolist() == [0, 1, 2, 3, 4]
    assert [keep_apart(2)[number].tolist() for number in (0, 1)] == [[0], [1]]
    assert len(pack_best_fit([], capacity=4)) == 0
    with pytest.raises(ValueError, match="a piece of 5 tokens does not fit into a block of 4"):
        pack_best_fit([5], capacity=4)


def make_reader(
    folder: Path, shard: SampleShard, *, is_packed: bool, too_long: str = "split", **options: str
) -> BlockReader:
    store = Store(folder / "store", {"train": shard}, ReadReport())
    blocks = plan_blocks(
        store,
        "train",
        seq_len=SEQ_LEN,
        too_long=too_long,  # type: ignore[arg-type]
        is_packed=is_packed,
        cache_dir=folder,
    )
    return BlockReader([blocks], seq_len=SEQ_LEN, pad_id=0, is_packed=is_packed, **options)  # type: ignore[arg-type]


LENGTHS = [5, 9, 17, 40, 3, 8, 12, 6, 4]


@pytest.fixture(scope="module")
def network() -> DecoderNetwork:
    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        max_positions=SEQ_LEN,
        tie_embeddings=False,
    )
    return DecoderNetwork(shape).eval()


@torch.no_grad()
def compute_losses(network: DecoderNetwork, batch: TextBatch) -> torch.Tensor:
    hidden = network.compute_hidden(batch.tokens_BT, segments_BT=batch.segments_BT)
    return token_losses(hidden, network.output_weight_VD, batch.targets_BT)


def list_losses(
    network: DecoderNetwork, reader: BlockReader
) -> dict[tuple[int, int], torch.Tensor]:
    """(sample, first token) -> loss of each position of the piece."""
    losses = compute_losses(network, reader.read(range(len(reader))))
    found = {}
    for row in range(len(reader)):
        place = 0
        for sample, start, stop in reader.list_pieces(row)[1]:
            found[sample, start] = losses[row, place : place + stop - start - 1]
            place += stop - start - 1
        assert not losses[row, place:].any()  # padding
    return found


def test_packed_samples_are_computed_as_if_they_were_alone(
    network: DecoderNetwork, tmp_path: Path
) -> None:
    shard = write_shard(tmp_path / "a", LENGTHS)
    packed_reader = make_reader(tmp_path, shard, is_packed=True)
    alone_reader = make_reader(tmp_path, shard, is_packed=False)
    assert len(packed_reader) < len(alone_reader) == len(LENGTHS) + 2  # 40 tokens are three pieces
    packed, alone = list_losses(network, packed_reader), list_losses(network, alone_reader)
    assert packed.keys() == alone.keys()
    for piece, losses in alone.items():
        assert_close(packed[piece], losses, rtol=1e-6, atol=1e-6)
    total = sum(int((it != 0).sum()) for it in packed.values())
    assert total == sum(length - 3 for length in LENGTHS)  # each learnt token once


@torch.no_grad()
def test_a_sample_of_a_block_does_not_change_the_others(
    network: DecoderNetwork, tmp_path: Path
) -> None:
    reader = make_reader(tmp_path, write_shard(tmp_path / "a", LENGTHS), is_packed=True)
    batch = reader.read(range(len(reader)))
    assert batch.segments_BT is not None
    before = network.compute_hidden(batch.tokens_BT, segments_BT=batch.segments_BT)
    changed = batch.segments_BT == 0
    tokens = torch.where(changed, (batch.tokens_BT + 1) % 64, batch.tokens_BT)
    after = network.compute_hidden(tokens, segments_BT=batch.segments_BT)
    assert (batch.segments_BT == 1).any()
    assert torch.equal(before[~changed], after[~changed])
    assert not torch.equal(before[changed], after[changed])


def test_a_batch_holds_tokens_and_what_is_learnt(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a", [5, 9])
    reader = make_reader(tmp_path, shard, is_packed=False)
    batch = reader.read([1, 0])
    first, second = (torch.tensor(shard[number][0].astype(np.int64)) for number in (1, 0))
    assert batch.segments_BT is None
    assert batch.tokens_BT.tolist() == [first[:8].tolist(), [*second[:4].tolist(), 0, 0, 0, 0]]
    ignored = [IGNORE_INDEX] * 2
    assert batch.targets_BT.tolist() == [
        ignored + first[3:].tolist(),
        ignored + second[3:].tolist() + [IGNORE_INDEX] * 4,
    ]
    fixed = make_reader(tmp_path, shard, is_packed=False, pad_to="seq_len")
    assert fixed.read([0]).tokens_BT.shape == (1, SEQ_LEN)
    packed = make_reader(tmp_path, shard, is_packed=True).read([0])
    assert packed.segments_BT is not None
    assert packed.segments_BT.tolist() == [[0] * 8 + [1] * 4 + [2] * 4]


def test_the_end_is_learnt_where_padding_is_the_same_token(tmp_path: Path) -> None:
    with (
        TokenShardWriter(tmp_path / "a.ids", dtype=np.uint16) as ids,
        TokenShardWriter(tmp_path / "a.learnt", dtype=np.uint8) as learnt,
    ):
        ids.add(np.array([7, 8, 0], dtype=np.uint16))  # 0 is the end, and pads
        learnt.add(np.array([0, 1, 1], dtype=np.uint8))
    for is_packed in (True, False):
        reader = make_reader(
            tmp_path / str(is_packed), SampleShard(tmp_path / "a"), is_packed=is_packed
        )
        targets = reader.read([0]).targets_BT[0]
        assert targets[:2].tolist() == [8, 0]
        assert (targets[2:] == IGNORE_INDEX).all()
