"""Compares the speed of reading jsonl.zst: ours, lm_dataformat, and a bare loop over zstandard and orjson.

    python tools/bench_jsonl.py --corpus 'corpus/*.jsonl.zst'        # makes a file of about 100 MB of text from it
    python tools/bench_jsonl.py --file shard.jsonl.zst               # a shard, as it is

The readers run in turn, round after round, in one process; each counts documents and characters, which must agree.
Needs ``pip install 'nemo-like[bench]'``; without lm_dataformat its row is left out. lm_dataformat parses with orjson
where that is installed, as it is here, and with the slower ujson elsewhere.
"""

from __future__ import annotations

import argparse
import glob
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import zstandard

from nemo_like.core.errors import MissingExtraError
from nemo_like.core.extras import require
from nemo_like.data.jsonl_zst import read_documents

Reader = Callable[[Path], Iterator[str]]


def read_ours(path: Path) -> Iterator[str]:
    """Reads with nemo_like."""
    return (document.text for document in read_documents(path))


def read_bare(path: Path) -> Iterator[str]:
    """Reads with zstandard and orjson and no checks: what a careful user would write in three lines."""
    with path.open("rb") as file:
        stream = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(
            file, read_across_frames=True
        )
        for line in io.BufferedReader(stream, 2**17):
            yield orjson.loads(line)["text"]


def read_lm_dataformat(path: Path) -> Iterator[str]:
    """Reads with lm_dataformat."""
    return iter(require("lm_dataformat").Reader(str(path)).stream_data())


def write_sample(corpus: list[str], path: Path, *, size_mb: float) -> None:
    """Writes documents of a corpus, over and over if it is small, as one zstd frame of level 3."""
    with path.open("wb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file) as out:
        written = 0
        for document in itertools.cycle(read_documents(corpus)):
            written += out.write(
                orjson.dumps({"text": document.text, "meta": document.meta}) + b"\n"
            )
            if written >= size_mb * 1e6:
                return


def count(reader: Reader, path: Path) -> tuple[int, int]:
    """Gives the number of documents and characters."""
    documents = characters = 0
    for text in reader(path):
        documents += 1
        characters += len(text)
    return documents, characters


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", nargs="+", help="files or patterns to make the sample from")
    source.add_argument("--file", type=Path, help="a jsonl.zst file to read as it is")
    parser.add_argument(
        "--size-mb", type=float, default=100, help="uncompressed size of the sample (default: 100)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    """Runs the comparison and prints a table."""
    options = parse_arguments()
    readers: dict[str, Reader] = {
        "nemo_like": read_ours,
        "lm_dataformat": read_lm_dataformat,
        "bare": read_bare,
    }
    try:
        require("lm_dataformat")
    except MissingExtraError as error:
        print(error, file=sys.stderr)
        del readers["lm_dataformat"]

    with tempfile.TemporaryDirectory() as folder:
        path = options.file
        if path is None:
            path = Path(folder) / "sample.jsonl.zst"
            files = sorted(file for pattern in options.corpus for file in glob.glob(pattern))
            write_sample(files, path, size_mb=options.size_mb)
        totals = {
            name: count(reader, path) for name, reader in readers.items()
        }  # warms the file cache, too
        if len(set(totals.values())) != 1:
            raise SystemExit(f"the readers disagree on (documents, characters): {totals}")
        wall_s: dict[str, list[float]] = {name: [] for name in readers}
        cpu_s: dict[str, list[float]] = {name: [] for name in readers}
        for _ in range(options.rounds):
            for name, reader in readers.items():
                wall, cpu = time.perf_counter(), time.process_time()
                count(reader, path)
                wall_s[name].append(time.perf_counter() - wall)
                cpu_s[name].append(time.process_time() - cpu)
        with path.open("rb") as file:
            stream = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(
                file, read_across_frames=True
            )
            size_mb = sum(map(len, iter(lambda: stream.read(2**20), b""))) / 1e6

    documents, characters = totals["nemo_like"]
    print(
        f"{documents} documents, {characters} characters, {size_mb:.1f} MB; {options.rounds} rounds"
    )
    print(
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; medians; ratios are medians over the rounds\n"
    )
    print("| reader | MB/s | best MB/s | CPU s per GB | speed against it |")
    print("|---|---|---|---|---|")
    for name in readers:
        ratio = statistics.median(
            theirs / ours for theirs, ours in zip(wall_s[name], wall_s["nemo_like"], strict=True)
        )
        print(
            f"| {name} | {size_mb / statistics.median(wall_s[name]):.0f} | {size_mb / min(wall_s[name]):.0f}"
            f" | {statistics.median(cpu_s[name]) / size_mb * 1000:.2f} | {ratio:.2f}x |"
        )


if __name__ == "__main__":
    main()
