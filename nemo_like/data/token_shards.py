"""Token shards: documents as token ids in Megatron's ``.bin``/``.idx`` pair, written in a stream
and read by mmap.

``.bin`` holds the ids of all documents, one after the other. ``.idx`` (little endian, no padding)
holds

- 9 bytes ``MMIDIDX\\0\\0``, uint64 version 1, uint8 code of the id type,
- uint64 number of sequences S, uint64 number of document marks D,
- S int32 lengths of the sequences, in tokens,
- S int64 places of the sequences in ``.bin``, in bytes,
- D int64 document marks: the sequences that start a document, and S at the end.

We write one sequence a document. Source of the layout:
``megatron/core/datasets/indexed_dataset.py`` of megatron-core, the format that Megatron-LM, NeMo
and GPT-NeoX share.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_like.core.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
_CHUNK = 1 << 16  # entries of the index that are held in memory while it is written


def choose_dtype(vocab_size: int) -> type[np.generic]:
    """The id type of a vocabulary: uint16 below 65,500 tokens, as in Megatron, else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


class TokenShardWriter:
    """Writes one shard, a document at a time, in memory that does not grow with it.

    The files appear under their names at :meth:`close`, ``.idx`` last; leaving the context by an
    exception removes what was written.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        dtype: Id type, as :func:`choose_dtype` gives it.
    """

    def __init__(self, prefix: str | Path, *, dtype: type[np.generic]) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.num_documents = 0
        self.num_tokens = 0
        self._code = next(code for code, known in DTYPES.items() if known is dtype)
        self._bin_path, self._idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self._bin_part, self._idx_part = Path(f"{prefix}.bin.part"), Path(f"{prefix}.idx.part")
        self._bin = self._bin_part.open("wb")
        self._idx = self._idx_part.open("w+b")
        self._idx.write(bytes(HEADER.size))

    def add(self, ids: NDArray[Any]) -> None:
        """Appends a document.

        Raises:
            ValueError: An id does not fit the id type.
        """
        if ids.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            if len(ids) and not (limits.min <= ids.min() and ids.max() <= limits.max):
                raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit {self.dtype}")
            ids = ids.astype(self.dtype)
        self._bin.write(ids.tobytes())
        self._idx.write(struct.pack("<i", len(ids)))
        self.num_documents += 1
        self.num_tokens += len(ids)

    def close(self) -> None:
        """Finishes the index and gives both files their names."""
        self._idx.seek(HEADER.size)
        place = 0
        for start in range(0, self.num_documents, _CHUNK):
            self._idx.seek(HEADER.size + 4 * start)
            lengths = np.fromfile(
                self._idx, dtype="<i4", count=min(_CHUNK, self.num_documents - start)
            )
            ends = place + np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
            self._idx.seek(0, os.SEEK_END)
            self._idx.write(np.concatenate([[place], ends[:-1]]).astype("<i8").tobytes())
            place = int(ends[-1])
        self._idx.seek(0, os.SEEK_END)
        for start in range(0, self.num_documents + 1, _CHUNK):
            marks = np.arange(start, min(start + _CHUNK, self.num_documents + 1), dtype="<i8")
            self._idx.write(marks.tobytes())
        self._idx.seek(0)
        self._idx.write(
            HEADER.pack(MAGIC, 1, self._code, self.num_documents, self.num_documents + 1)
        )
        for file in (self._bin, self._idx):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        os.replace(self._bin_part, self._bin_path)
        os.replace(self._idx_part, self._idx_path)

    def discard(self) -> None:
        """Removes what was written."""
        for file, path in ((self._bin, self._bin_part), (self._idx, self._idx_part)):
            file.close()
            path.unlink(missing_ok=True)

    def __enter__(self) -> TokenShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class TokenShard:
    """Reads one shard; nothing but the pages that are asked for enters memory.

    Attributes:
        tokens: All ids, in the type of the file.
        num_documents: Sequences, in Megatron's words.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.

    Raises:
        DataError: The files are not a whole shard.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        idx_path, bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (idx_path, bin_path):
            if not path.is_file():
                raise DataError(
                    "no such token shard: a .bin and an .idx belong together", file=path
                )
        with idx_path.open("rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise DataError(
                f"no token shard: starts with {head[:9]!r}, expected {MAGIC!r}", file=idx_path
            )
        _, version, code, num_sequences, num_marks = HEADER.unpack(head)
        if version != 1 or code not in DTYPES:
            raise DataError(
                f"version {version} and type code {code}: expected version 1 and a code of {sorted(DTYPES)}",
                file=idx_path,
            )
        expected = HEADER.size + 12 * num_sequences + 8 * num_marks
        if idx_path.stat().st_size < expected:  # more is a table of modes, which text has not
            raise DataError(
                f"cut off: {idx_path.stat().st_size} bytes, {num_sequences} sequences need {expected}",
                file=idx_path,
            )
        self.num_documents = int(num_sequences)
        self.dtype = np.dtype(DTYPES[code])
        index = np.memmap(idx_path, dtype=np.uint8, mode="r")
        places_at = HEADER.size + 4 * num_sequences
        marks_at = places_at + 8 * num_sequences
        self.lengths: NDArray[np.int32] = np.asarray(index[HEADER.size : places_at]).view("<i4")
        self.document_marks: NDArray[np.int64] = np.asarray(
            index[marks_at : marks_at + 8 * num_marks]
        ).view("<i8")
        # A memoryview takes the places as they stand (they are not aligned) and hands out plain
        # integers, which is what a binary search wants; numpy would copy the table for every
        # search.
        self._places = np.asarray(index[places_at:marks_at]).data.cast("q")
        self.tokens: NDArray[Any] = np.empty(0, self.dtype)
        if bin_path.stat().st_size:
            self.tokens = np.asarray(np.memmap(bin_path, dtype=self.dtype, mode="r"))
        if num_sequences:
            end = self._places[-1] // self.dtype.itemsize + int(self.lengths[-1])
            if end > len(self.tokens):
                raise DataError(
                    f"cut off: {len(self.tokens)} tokens, the index speaks of {end}", file=bin_path
                )

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, document: int) -> NDArray[Any]:
        """The ids of one document."""
        start = self._places[document] // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[document])]

    @property
    def num_tokens(self) -> int:
        """Ids in the shard."""
        return len(self.tokens)

    def find_starts(self, start: int, stop: int) -> list[int]:
        """The tokens behind ``start`` and before ``stop`` that begin a document.

        Args:
            start: Place of a token in the shard.
            stop: Place of another.

        Returns:
            Their places less ``start``, ascending.
        """
        size, places = self.dtype.itemsize, self._places
        document = bisect_right(places, start * size)
        starts = []
        while document < len(places) and (place := places[document] // size) < stop:
            starts.append(place - start)
            document += 1
        return starts

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenShard, (self.prefix,)
