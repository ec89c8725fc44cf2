from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nemo_like.core.errors import DataError
from nemo_like.data.token_shards import TokenShard, TokenShardWriter, choose_dtype

DOCUMENTS = [[5, 1, 2], [5], [5, 65499, 3, 4]]


def write(prefix: Path, documents: list[list[int]], dtype: type[np.generic] = np.uint16) -> None:
    with TokenShardWriter(prefix, dtype=dtype) as writer:
        for document in documents:
            writer.add(np.array(document))


def test_the_bytes_are_those_of_the_published_layout(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<8H", 5, 1, 2, 5, 5, 65499, 3, 4)
    assert (tmp_path / "x.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", 8)  # uint16
        + struct.pack("<QQ", 3, 4)
        + struct.pack("<3i", 3, 1, 4)
        + struct.pack("<3q", 0, 6, 8)
        + struct.pack("<4q", 0, 1, 2, 3)
    )


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_what_was_written_is_read(tmp_path: Path, dtype: type[np.generic]) -> None:
    documents = [*DOCUMENTS, []]
    write(tmp_path / "x", documents, dtype)
    shard = TokenShard(tmp_path / "x")
    assert [shard[number].tolist() for number in range(len(shard))] == documents
    assert (shard.num_documents, shard.num_tokens, shard.dtype) == (4, 8, np.dtype(dtype))
    assert shard.lengths.tolist() == [3, 1, 4, 0]
    assert shard.document_marks.tolist() == [0, 1, 2, 3, 4]


def test_an_empty_shard_is_written_and_read(tmp_path: Path) -> None:
    write(tmp_path / "x", [])
    shard = TokenShard(tmp_path / "x")
    assert (len(shard), shard.num_tokens, shard.find_starts(0, 10)) == (0, 0, [])


def test_an_index_longer_than_the_writers_buffer_is_whole(tmp_path: Path) -> None:
    lengths = np.arange(70_000) % 3
    with TokenShardWriter(tmp_path / "x", dtype=np.uint16) as writer:
        for number, length in enumerate(lengths):
            writer.add(np.full(length, number % 50_000, dtype=np.uint16))
    shard = TokenShard(tmp_path / "x")
    assert np.array_equal(shard.lengths, lengths)
    assert shard.document_marks.tolist() == list(range(70_001))
    for number in (0, 1, 65_535, 65_536, 65_537, 69_998):
        assert shard[number].tolist() == [number % 50_000] * (number % 3)


def test_starts_of_documents_are_found_anywhere(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    shard = TokenShard(tmp_path / "x")
    assert shard.find_starts(0, 8) == [3, 4]
    assert shard.find_starts(0, 4) == [3]  # not the stop itself
    assert shard.find_starts(3, 8) == [1]  # not the start itself
    assert shard.find_starts(5, 8) == []


def test_a_document_of_another_type_is_converted_or_refused(tmp_path: Path) -> None:
    with TokenShardWriter(tmp_path / "x", dtype=np.uint16) as writer:
        writer.add(np.array([65535], dtype=np.int64))
        with pytest.raises(ValueError, match="token ids 0 to 65536 do not fit uint16"):
            writer.add(np.array([65536, 0], dtype=np.int64))
        with pytest.raises(ValueError, match="token ids -1 to 0"):
            writer.add(np.array([-1, 0], dtype=np.int64))


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        write(tmp_path / "x", [[1], [70_000]])
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_shard_has_no_name_yet(tmp_path: Path) -> None:
    writer = TokenShardWriter(tmp_path / "x", dtype=np.uint16)
    writer.add(np.array([1]))
    with pytest.raises(DataError, match=r"x.idx: no such token shard"):
        TokenShard(tmp_path / "x")
    writer.close()
    assert len(TokenShard(tmp_path / "x")) == 1


def test_vocabularies_below_65500_take_two_bytes_a_token() -> None:
    assert choose_dtype(65_499) is np.uint16
    assert choose_dtype(65_500) is np.int32


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_a_shard_is_an_error(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "x", DOCUMENTS)
    (tmp_path / f"x{suffix}").unlink()
    with pytest.raises(DataError, match=rf"x\{suffix}: no such token shard"):
        TokenShard(tmp_path / "x")


def test_a_cut_index_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    content = (tmp_path / "x.idx").read_bytes()
    (tmp_path / "x.idx").write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"x.idx: cut off: 101 bytes, 3 sequences need 102"):
        TokenShard(tmp_path / "x")


def test_cut_tokens_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    (tmp_path / "x.bin").write_bytes(bytes(14))
    with pytest.raises(DataError, match=r"x.bin: cut off: 7 tokens, the index speaks of 8"):
        TokenShard(tmp_path / "x")


def test_another_file_is_no_shard(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    (tmp_path / "x.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(80))
    with pytest.raises(DataError, match=r"no token shard: starts with b'TNTIDX"):
        TokenShard(tmp_path / "x")


def test_another_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    content = bytearray((tmp_path / "x.idx").read_bytes())
    content[9] = 2
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(DataError, match="version 2 and type code 8"):
        TokenShard(tmp_path / "x")


def test_a_shard_travels_to_other_processes_by_its_path(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    copy = pickle.loads(pickle.dumps(TokenShard(tmp_path / "x")))  # noqa: TID251
    assert copy[2].tolist() == DOCUMENTS[2]


def test_reading_a_block_of_a_large_shard_takes_no_memory(tmp_path: Path) -> None:
    # A sparse file stands for 8 GB of tokens: reading it whole would be seen.
    write(tmp_path / "x", [[1]])
    with (tmp_path / "x.bin").open("r+b") as file:
        file.truncate(8 << 30)
    shard = TokenShard(tmp_path / "x")
    block: NDArray[np.uint16] = shard.tokens[3_000_000_000:3_000_000_256]
    assert (shard.num_tokens, int(block.sum())) == (4 << 30, 0)
    assert isinstance(shard.tokens.base, np.memmap)


@pytest.mark.slow
def test_megatron_reads_ours_and_we_read_megatrons(tmp_path: Path) -> None:
    indexed = pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed"
    )
    torch = pytest.importorskip("torch")
    write(tmp_path / "ours", DOCUMENTS)
    theirs = indexed.IndexedDataset(str(tmp_path / "ours"))
    assert [theirs[number].tolist() for number in range(3)] == DOCUMENTS
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]
    for dtype in (np.uint16, np.int32):
        prefix = str(tmp_path / f"theirs_{np.dtype(dtype)}")
        builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for document in DOCUMENTS:
            builder.add_item(torch.tensor(document))
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
        ours = TokenShard(prefix)
        assert [ours[number].tolist() for number in range(3)] == DOCUMENTS
        write(tmp_path / "again", DOCUMENTS, dtype)
        for suffix in (".bin", ".idx"):
            written = (tmp_path / f"again{suffix}").read_bytes()
            assert written == Path(prefix + suffix).read_bytes()
