from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nemo_like.data.packing import BlockReader
from nemo_like.data.token_shards import TokenShard, TokenShardWriter

BOS, EOS = 1, 2


def open_shard(folder: Path, documents: list[list[int]], name: str = "x") -> TokenShard:
    with TokenShardWriter(folder / name, dtype=np.uint16) as writer:
        for document in documents:
            writer.add(np.array(document))
    return TokenShard(folder / name)


def read(reader: BlockReader, *sample_ids: int) -> tuple[list[list[int]], ...]:
    tokens_BT, targets_BT, segments_BT = reader.read(sample_ids)
    assert segments_BT is not None
    return tokens_BT.tolist(), targets_BT.tolist(), segments_BT.tolist()


def test_where_the_prefix_is_the_end_a_documents_last_token_predicts_it(tmp_path: Path) -> None:
    # E a b c E d E e f: the same token opens a document and ends the one before.
    shard = open_shard(tmp_path, [[EOS, 10, 11, 12], [EOS, 20], [EOS, 30, 31]])
    reader = BlockReader([shard], seq_len=4, prefix_id=EOS, eos_id=EOS)
    assert len(reader) == 2
    assert read(reader, 0, 1) == (
        [[EOS, 10, 11, 12], [EOS, 20, EOS, 30]],
        [[10, 11, 12, EOS], [20, EOS, 30, 31]],
        [[0, 0, 0, 0], [0, 0, 1, 1]],
    )


def test_where_the_prefix_is_another_token_the_end_predicts_nothing(tmp_path: Path) -> None:
    shard = open_shard(tmp_path, [[BOS, 10, EOS], [BOS, 20, 21, 22, EOS], [BOS, EOS]])
    reader = BlockReader([shard], seq_len=4, prefix_id=BOS, eos_id=EOS)
    assert len(reader) == 3
    assert read(reader, 0, 1, 2) == (
        [[BOS, 10, EOS, BOS], [20, 21, 22, EOS], [BOS, EOS, EOS, EOS]],
        [[10, EOS, -100, 20], [21, 22, EOS, -100], [EOS, -100, -100, -100]],
        [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1]],
    )


def test_a_block_inside_one_document_needs_no_segments(tmp_path: Path) -> None:
    shard = open_shard(tmp_path, [[EOS, *range(10, 20)], [EOS, 5, 6, 7]])
    reader = BlockReader([shard], seq_len=5, prefix_id=EOS, eos_id=EOS)
    assert reader.read([0]).segments_BT is None
    assert reader.read([0, 1]).segments_BT is None
    assert reader.read([1, 2]).segments_BT is not None
    # A block that ends with its document is whole as well, whatever follows.
    shard = open_shard(tmp_path, [[BOS, 5, 6, 7, EOS], [BOS, 8, 8, 8, EOS], [BOS, EOS]])
    reader = BlockReader([shard], seq_len=5, prefix_id=BOS, eos_id=EOS)
    tokens_BT, targets_BT, segments_BT = reader.read([0, 1])
    assert segments_BT is None
    assert targets_BT[:, -1].tolist() == [-100, -100]
    assert tokens_BT[:, -1].tolist() == [EOS, EOS]


def test_short_documents_each_get_their_segment(tmp_path: Path) -> None:
    shard = open_shard(tmp_path, [[EOS, 5]] * 4 + [[EOS]] * 3)
    reader = BlockReader([shard], seq_len=8, prefix_id=EOS, eos_id=EOS)
    assert read(reader, 0)[2] == [[0, 0, 1, 1, 2, 2, 3, 3]]
    assert read(reader, 1)[2] == [[0, 1, 2, 3, 3, 3, 3, 3]]


@pytest.mark.parametrize("num_tokens", [2, 3, 4, 5, 6, 8, 9, 10])
def test_every_token_but_the_last_is_an_input_once(tmp_path: Path, num_tokens: int) -> None:
    shard = open_shard(tmp_path, [list(range(100, 100 + num_tokens))])
    reader = BlockReader([shard], seq_len=4, prefix_id=EOS, eos_id=EOS)
    tokens_BT, targets_BT, _ = reader.read(range(len(reader)))
    learnt = targets_BT != -100
    assert tokens_BT[learnt].tolist() == list(range(100, 99 + num_tokens))
    assert targets_BT[learnt].tolist() == list(range(101, 100 + num_tokens))


def test_subsets_are_numbered_through_and_empty_ones_take_no_number(tmp_path: Path) -> None:
    shards = [
        open_shard(tmp_path, documents, name)
        for name, documents in {
            "a": [[EOS, 10, 11, 12, 13]],
            "none": [],
            "lone": [[EOS]],
            "b": [[EOS, 20, 21]],
        }.items()
    ]
    reader = BlockReader(shards, seq_len=2, prefix_id=EOS, eos_id=EOS)
    assert reader.num_blocks == [2, 0, 0, 1]
    assert [reader.find_subset(sample) for sample in range(3)] == [0, 0, 3]
    assert reader.read([2, 0]).tokens_BT.tolist() == [[EOS, 20], [EOS, 10]]


def test_tokens_of_four_bytes_are_read(tmp_path: Path) -> None:
    with TokenShardWriter(tmp_path / "x", dtype=np.int32) as writer:
        writer.add(np.array([EOS, 128_000]))
        writer.add(np.array([EOS, 7]))
    reader = BlockReader([TokenShard(tmp_path / "x")], seq_len=3, prefix_id=EOS, eos_id=EOS)
    assert read(reader, 0) == ([[EOS, 128_000, EOS]], [[128_000, EOS, 7]], [[0, 0, 1]])
