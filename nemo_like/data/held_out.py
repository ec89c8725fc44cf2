"""Which documents are held out: a matter of their content alone."""

from __future__ import annotations

import hashlib


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out split.

    The choice hangs on the SHA-256 of the text, so it is the same wherever the document stands,
    copies of a document fall on the same side, and a larger fraction holds out what a smaller one
    did and more.

    Args:
        text: The raw document.
        fraction: Expected share of documents, 0 (none) to 1 (all).

    Raises:
        ValueError: ``fraction`` is outside 0 to 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction={fraction}: must lie between 0 and 1")
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64
