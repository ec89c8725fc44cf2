"""Tiny text corpora in the format that training reads: jsonl.zst, several named subsets."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

# Uneven in size, and one of several bytes a character: what corpora really are like.
TEXTS = {
    "stories": "the old mill by the river stood still while rain fell and nobody came to the door",
    "code": "def return self for in range ( ) : if not None x = y + 1 import json",
    "letters": "größer Übung naïve café мир город 水 山 日本 dear sir yours",
}
WORDS = {subset: text.split() for subset, text in TEXTS.items()}
NUM_DOCUMENTS = {"stories": 30, "code": 17, "letters": 11}


def write_corpus(
    folder: Path, *, num_documents: Mapping[str, int] = NUM_DOCUMENTS, seed: int = 0
) -> dict[str, Path]:
    """Writes one ``<subset>.jsonl.zst`` each, the same bytes for the same arguments.

    A document is ``{"text": ..., "meta": {"subset", "source", "licence"}}`` of 20 to 200 words over
    a few lines.

    Args:
        folder: Made if it is not there.
        num_documents: Documents by subset; the subsets are those of :data:`WORDS`.
        seed: Another seed, other documents.

    Returns:
        The file of each subset.

    Raises:
        ValueError: A subset that is not in :data:`WORDS`.
    """
    import zstandard

    unknown = sorted(set(num_documents) - set(WORDS))
    if unknown:
        raise ValueError(f"num_documents names {unknown}: there are {sorted(WORDS)}")
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for subset, count in num_documents.items():
        draw = random.Random(f"{seed}/{subset}")
        lines = [json.dumps(_document(subset, draw), ensure_ascii=False) for _ in range(count)]
        data = "".join(f"{line}\n" for line in lines).encode()
        files[subset] = folder / f"{subset}.jsonl.zst"
        files[subset].write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(data))
    return files


def _document(subset: str, draw: random.Random) -> dict[str, object]:
    words = draw.choices(WORDS[subset], k=draw.randint(20, 200))
    lines = [" ".join(words[at : at + 12]) for at in range(0, len(words), 12)]
    meta = {"subset": subset, "source": "nemo_like.testing", "licence": "CC0-1.0"}
    return {"text": "\n".join(lines), "meta": meta}
