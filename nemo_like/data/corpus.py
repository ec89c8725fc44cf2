"""A corpus as the rest of this room sees it: documents of files, each in a subset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from nemo_like.core.errors import DataError
from nemo_like.data.cache import hash_files
from nemo_like.data.jsonl_zst import Document, ReadReport, read_documents

OnError = Literal["skip", "raise"]
Progress = Callable[[int, int], None]
"""Called now and then with the bytes of files that were read, and their total."""

_PROGRESS_EVERY = 64  # documents


def read_corpus(
    paths: Sequence[Path],
    *,
    on_error: OnError = "raise",
    report: ReadReport | None = None,
    progress: Progress | None = None,
) -> Iterator[Document]:
    """The documents of a corpus, telling how far it is.

    Args:
        paths: The files.
        on_error: What a record that cannot be read does: it is skipped and counted, or it ends the
            reading.
        report: Receives the counts.
        progress: Told of the start of the frame that is being read.
    """
    before = [0]
    for path in paths:
        before.append(before[-1] + path.stat().st_size)
    documents = read_documents(paths, on_error=on_error, report=report)
    for number, document in enumerate(documents):
        if progress and number % _PROGRESS_EVERY == 0:
            progress(before[document.position.shard] + document.position.frame, before[-1])
        yield document
    if progress:
        progress(before[-1], before[-1])


def find_subset(document: Document, *, subset_key: str = "subset") -> str:
    """The subset that a document belongs to.

    That is ``meta[subset_key]``, else ``meta["pile_set_name"]``, else the name of its file without
    endings.
    """
    for key in (subset_key, "pile_set_name"):
        name = document.meta.get(key)
        if name is not None and name != "":
            return str(name)
    return document.file.name.partition(".")[0]


def hash_corpus(paths: Sequence[Path], cache_dir: Path) -> list[list[str]]:
    """What the files of a corpus are, wherever they lie: name and SHA-256 of each.

    Args:
        paths: The files.
        cache_dir: Where hashes are kept, so that a file is read once.

    Raises:
        DataError: A file is not there, or is named twice, which would double its weight unseen.
    """
    seen = set()
    for path in paths:
        if not path.is_file():
            raise DataError(
                "is no file; a folder is named by its files: folder/*.jsonl.zst", file=path
            )
        if path.resolve() in seen:
            raise DataError("is named twice in the corpus; take one of the two out", file=path)
        seen.add(path.resolve())
    hashes = hash_files(paths, cache_dir)
    return [[path.name, digest] for path, digest in zip(paths, hashes, strict=True)]


def hash_key(key: object) -> str:
    """A name for what is made under these conditions."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
