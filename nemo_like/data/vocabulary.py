"""A tokenizer trained from a corpus, once."""

from __future__ import annotations

import hashlib
import heapq
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from nemo_like.data.cache import build_once
from nemo_like.data.corpus import OnError, Progress, find_subset, hash_corpus, hash_key, read_corpus
from nemo_like.data.held_out import is_held_out
from nemo_like.text.tokenizer import Tokenizer, train_bpe

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Part of the key of a cache folder: another number trains all of them anew."""


def learn_tokenizer(
    paths: Sequence[Path],
    *,
    vocab_size: int,
    max_bytes: int,
    cache_dir: Path,
    held_out_fraction: float,
    exclude: Collection[str] = (),
    subset_key: str = "subset",
    on_error: OnError = "raise",
    progress: Progress | None = None,
) -> Tokenizer:
    """Trains a byte-level BPE from a sample of the training split, or finds it trained.

    Args:
        paths: jsonl.zst files.
        vocab_size: Tokens of the vocabulary.
        max_bytes: UTF-8 bytes of text to train from.
        cache_dir: Folder that holds the cache folders.
        held_out_fraction: Share of documents that it must not see.
        exclude: Subsets that it must not see.
        subset_key: Key of a document's ``meta`` that names its subset.
        on_error: What a record that cannot be read does: it is left out, or it ends the work.
        progress: Told how far the reading is.
    """
    key = {
        "format": FORMAT_VERSION,
        "files": hash_corpus(paths, cache_dir),
        "vocab_size": vocab_size,
        "max_bytes": max_bytes,
        "held_out_fraction": held_out_fraction,
        "exclude": sorted(exclude),
        "subset_key": subset_key,
    }
    folder = cache_dir / "tokenizers" / hash_key(key)

    def build(part: Path) -> None:
        texts = (
            document.text
            for document in read_corpus(paths, on_error=on_error, progress=progress)
            if find_subset(document, subset_key=subset_key) not in exclude
            and not is_held_out(document.text, held_out_fraction)
        )
        train_bpe(sample_texts(texts, max_bytes=max_bytes), vocab_size=vocab_size).save(part)

    start = time.perf_counter()
    if build_once(folder, build):
        logger.info("trained a tokenizer in %.1f s: %s", time.perf_counter() - start, folder)
    return Tokenizer.load(folder)


def sample_texts(texts: Iterable[str], *, max_bytes: int) -> list[str]:
    """A random sample of texts that fills a number of bytes, the same wherever they stand.

    Those with the smallest hashes are taken, so memory holds no more than the sample. One text is
    always taken, however long.

    Args:
        texts: Read once.
        max_bytes: Of UTF-8, in all.
    """
    kept: list[tuple[int, int, str]] = []  # a heap, the largest hash first
    total = 0
    for number, text in enumerate(texts):
        content = text.encode()
        rank = int.from_bytes(hashlib.sha256(b"sample\0" + content).digest()[:8], "big")
        heapq.heappush(kept, (-rank, number, text))
        total += len(content)
        while total > max_bytes and len(kept) > 1:
            total -= len(heapq.heappop(kept)[2].encode())
    return [text for _, _, text in sorted(kept, reverse=True)]
