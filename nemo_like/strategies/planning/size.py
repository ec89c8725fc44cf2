"""Sizes of memory as people write them."""

from __future__ import annotations

import os
import re

_UNITS = {"b": 1, "": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024), ("", 1024))
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")


def parse_bytes(text: str) -> int:
    """``80GiB``, ``80G`` (the same), ``80GB`` (powers of 1000), or a number of bytes.

    Raises:
        ValueError: It is no size above 0.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise ValueError(f"{text!r}: must be a size of memory above 0, such as 80GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(count: float) -> str:
    """``17.6 GiB``; the largest unit of which there is at least one."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.1f} {unit}"
    return f"{count:.0f} B"


def measure_machine() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
