"""What general compressors make of a text: the figure that a language model has to beat."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

from nemo_like.metrics.ranks import gather_from_ranks

_GZIP_FORMAT = 31  # zlib's wbits: a window of 2^15 and gzip's header and checksum


def measure_gzip(texts: Sequence[bytes]) -> int:
    """Size in bytes of ``gzip -9`` of the texts, one behind the other."""
    compressor = zlib.compressobj(level=9, wbits=_GZIP_FORMAT)
    return sum(len(compressor.compress(text)) for text in texts) + len(compressor.flush())


def measure_zstd(texts: Sequence[bytes]) -> int:
    """Size in bytes of ``zstd -19`` of the texts, one behind the other.

    As the command line tool does with a file, it knows the size beforehand and adds a checksum.
    """
    import zstandard

    # The parameters of a level depend on the size.
    options = zstandard.ZstdCompressor(level=19, write_checksum=True)
    compressor = options.compressobj(size=sum(map(len, texts)))
    return sum(len(compressor.compress(text)) for text in texts) + len(compressor.flush())


COMPRESSORS: dict[str, Callable[[Sequence[bytes]], int]] = {
    "gzip -9": measure_gzip,
    "zstd -19": measure_zstd,
}


def measure_compression(
    texts: Mapping[str, Sequence[bytes]], *, rank: int = 0, world_size: int = 1
) -> dict[str, tuple[dict[str, int], int]]:
    """Compresses each subset, and all of them one behind the other.

    Args:
        texts: Documents of each subset, the same on every rank.
        rank: Which share of the work this process does; all ranks must call it.
        world_size: How many ranks share it.

    Returns:
        Compressor -> bytes of each subset, and bytes of all together.
    """
    everything = [text for subset in texts.values() for text in subset]
    jobs = [(name, subset) for name in COMPRESSORS for subset in (*texts, None)]
    sizes = [
        COMPRESSORS[name](everything if subset is None else texts[subset])
        if index % world_size == rank
        else 0
        for index, (name, subset) in enumerate(jobs)
    ]
    by_rank = gather_from_ranks(sizes, world_size=world_size)
    total = dict(zip(jobs, (sum(parts) for parts in zip(*by_rank, strict=True)), strict=True))
    return {
        name: ({subset: total[name, subset] for subset in texts}, total[name, None])
        for name in COMPRESSORS
    }
