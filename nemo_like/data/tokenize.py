"""Corpus to token shards, once for each combination of files, tokenizer and split.

A cache folder holds one shard pair for each subset and split, ``held_out.jsonl.zst`` with the raw
held-out documents, and ``manifest.json`` with what was read: counts, and what was skipped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nemo_like.core.errors import DataError
from nemo_like.core.notice import leave_if_asked
from nemo_like.data.cache import build_once
from nemo_like.data.corpus import (
    OnError,
    Progress,
    find_subset,
    hash_corpus,
    hash_key,
    read_corpus,
)
from nemo_like.data.encode import encode_in_order
from nemo_like.data.held_out import is_held_out
from nemo_like.data.jsonl_zst import Document, ReadReport, read_documents
from nemo_like.data.jsonl_zst_writer import JsonlZstWriter
from nemo_like.data.token_shards import TokenShard, TokenShardWriter, choose_dtype
from nemo_like.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Part of the key of a cache folder: another number makes all of them anew."""
Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
HELD_OUT_FILE = "held_out.jsonl.zst"

_BATCH_CHARS = 1 << 20
_MAX_SUBSETS = 200  # each keeps four files open
_SMALL_CORPUS = 32 << 20  # compressed bytes below which starting processes gains nothing


@dataclass
class Counts:
    """What one split of one subset holds."""

    documents: int = 0
    tokens: int = 0
    """Stored tokens: prefixes and ends of text included."""
    bytes: int = 0
    """Of the raw text in UTF-8."""


class _Entry(NamedTuple):
    subset: str
    split: Split
    text: str


class TokenCorpus:
    """A tokenised corpus.

    Args:
        folder: Cache folder, as :func:`tokenize_corpus` makes it.

    Attributes:
        subsets: Names, sorted.
        counts: Subset -> split -> what it holds.
        report: What of the files could not be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = json.loads((folder / "manifest.json").read_bytes())
        self._stems: dict[str, str] = {
            name: entry["stem"] for name, entry in manifest["subsets"].items()
        }
        self.subsets = sorted(self._stems)
        self.counts: dict[str, dict[Split, Counts]] = {
            name: {split: Counts(**entry[split]) for split in SPLITS}
            for name, entry in manifest["subsets"].items()
        }
        report = manifest["report"]
        self.report = ReadReport(**report | {"faults": Counter(report["faults"])})

    def open_shard(self, subset: str, split: Split) -> TokenShard:
        """The tokens of one split of one subset."""
        return TokenShard(self.folder / f"{self._stems[subset]}.{split}")

    def read_held_out(self) -> Iterator[tuple[str, str]]:
        """Subset and raw text of every held-out document, in the order of the corpus."""
        for document in read_documents([self.folder / HELD_OUT_FILE], on_error="raise"):
            yield document.meta["subset"], document.text


def tokenize_corpus(
    paths: Sequence[Path],
    *,
    tokenizer: Tokenizer,
    cache_dir: Path,
    held_out_fraction: float,
    subset_key: str = "subset",
    on_error: OnError = "raise",
    processes: int | None = None,
    progress: Progress | None = None,
) -> TokenCorpus:
    """Tokenises a corpus, or finds it tokenised.

    The result hangs on the content of the files, their order and names, the tokenizer and the
    split, never on the number of processes. Of several processes that ask at once, one works and
    the others wait.

    Args:
        paths: jsonl.zst files.
        tokenizer: What encodes them.
        cache_dir: Folder that holds the cache folders.
        held_out_fraction: Share of documents, chosen by content, that form the split ``held_out``.
        subset_key: Key of a document's ``meta`` that names its subset.
        on_error: What a record that cannot be read does: it is counted and left out, or it ends the
            work.
        processes: How many encode; None is one for each core, or this one alone for a small corpus.
        progress: Told how far the work is.

    Raises:
        DataError: A record cannot be read, a file is named twice, the corpus has no documents, or
            it has far too many subsets.
    """
    key = {
        "format": FORMAT_VERSION,
        "files": hash_corpus(paths, cache_dir),
        "tokenizer": tokenizer.content_hash,
        "held_out_fraction": held_out_fraction,
        "subset_key": subset_key,
    }
    folder = cache_dir / "tokens" / hash_key(key)
    if processes is None:
        is_small = sum(path.stat().st_size for path in paths) < _SMALL_CORPUS
        processes = 1 if is_small else len(os.sched_getaffinity(0))

    def build(part: Path) -> None:
        report = ReadReport()
        documents = read_corpus(paths, on_error=on_error, report=report, progress=progress)
        subsets = _write_shards(
            part,
            _split(documents, held_out_fraction, subset_key),
            tokenizer=tokenizer,
            processes=processes,
        )
        manifest = {"key": key, "subsets": subsets, "report": vars(report)}
        (part / "manifest.json").write_text(json.dumps(manifest, indent=1))

    start = time.perf_counter()
    if build_once(folder, build):
        logger.info("tokenised in %.1f s: %s", time.perf_counter() - start, folder)
    corpus = TokenCorpus(folder)
    if corpus.report.faults and on_error == "raise":  # a run that skips them has been here
        raise DataError(f"{corpus.report.places[0]}; on_error=skip leaves such records out")
    if not corpus.subsets:
        raise DataError(f"the corpus has no documents: {', '.join(map(str, paths))}")
    return corpus


def _split(
    documents: Iterable[Document], held_out_fraction: float, subset_key: str
) -> Iterator[_Entry]:
    for document in documents:
        held_out = is_held_out(document.text, held_out_fraction)
        subset = find_subset(document, subset_key=subset_key)
        yield _Entry(subset, "held_out" if held_out else "train", document.text)


def _batch(entries: Iterable[_Entry]) -> Iterator[tuple[list[_Entry], list[str]]]:
    """Entries in batches of about a megabyte, with their texts."""
    batch: list[_Entry] = []
    num_chars = 0
    for entry in entries:
        batch.append(entry)
        num_chars += len(entry.text)
        if num_chars >= _BATCH_CHARS:
            yield batch, [entry.text for entry in batch]
            batch, num_chars = [], 0
    if batch:
        yield batch, [entry.text for entry in batch]


def _write_shards(
    folder: Path, entries: Iterable[_Entry], *, tokenizer: Tokenizer, processes: int
) -> dict[str, Any]:
    """Writes all shards and the held-out documents; gives the manifest's table of subsets."""
    dtype = choose_dtype(tokenizer.vocab_size)
    writers: dict[str, dict[Split, TokenShardWriter]] = {}
    num_bytes: Counter[tuple[str, Split]] = Counter()
    with ExitStack() as stack:
        held_out = stack.enter_context(JsonlZstWriter(folder / HELD_OUT_FILE))
        for batch, stored in encode_in_order(_batch(entries), tokenizer, processes=processes):
            leave_if_asked()
            for entry, ids in zip(batch, stored, strict=True):
                if entry.subset not in writers:
                    _refuse_too_many(writers, entry.subset)
                    stem = _name_files(entry.subset)
                    writers[entry.subset] = {
                        split: stack.enter_context(
                            TokenShardWriter(folder / f"{stem}.{split}", dtype=dtype)
                        )
                        for split in SPLITS
                    }
                writers[entry.subset][entry.split].add(ids)
                num_bytes[entry.subset, entry.split] += len(entry.text.encode())
                if entry.split == "held_out":
                    held_out.write(entry.text, {"subset": entry.subset})
    return {
        subset: {"stem": _name_files(subset)}
        | {
            split: asdict(Counts(writer.num_documents, writer.num_tokens, num_bytes[subset, split]))
            for split, writer in pair.items()
        }
        for subset, pair in sorted(writers.items())
    }


def _refuse_too_many(known: Collection[str], subset: str) -> None:
    if len(known) == _MAX_SUBSETS:
        raise DataError(
            f"more than {_MAX_SUBSETS} subsets, among them {subset!r}: subset_key must name a key "
            "of meta that divides the corpus into few parts"
        )


def _name_files(subset: str) -> str:
    """A name for the files of a subset that any file system takes, different for each."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", subset).strip("_")[:60]
    if plain == subset.lower():
        return plain
    return f"{plain.lower()}-{hashlib.sha256(subset.encode()).hexdigest()[:8]}"
