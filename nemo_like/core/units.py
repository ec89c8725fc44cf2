"""Physical quantities and the only rounding rules between them."""

from __future__ import annotations

from typing import TypeAlias

Seconds: TypeAlias = float
Hertz: TypeAlias = int
Decibels: TypeAlias = float


def seconds_to_samples(duration_s: Seconds, sampling_rate_hz: Hertz) -> int:
    """Number of samples that lie in a duration: rounded half up, never by banker's rounding.

    Raises:
        ValueError: A negative duration or a sampling rate below 1.
    """
    if duration_s < 0 or sampling_rate_hz < 1:
        raise ValueError(
            f"seconds_to_samples({duration_s}, {sampling_rate_hz}): "
            "the duration must not be negative, the sampling rate at least 1 Hz"
        )
    return int(duration_s * sampling_rate_hz + 0.5)


def format_count(count: float) -> str:
    """A count as people say it: ``5.8 M``, ``1.2 k``, ``31``."""
    for limit, suffix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= limit:
            return f"{count / limit:.1f}{suffix}"
    return f"{count:.0f}"


def parse_duration(text: str) -> Seconds:
    """Seconds of ``HH:MM:SS`` or ``DD:HH:MM:SS``.

    Raises:
        ValueError: Something else.
    """
    parts = text.split(":")
    if len(parts) not in (3, 4) or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{text!r} is no duration: write HH:MM:SS or DD:HH:MM:SS, as 03:45:00")
    seconds = 0
    for factor, part in zip((86400, 3600, 60, 1)[-len(parts) :], parts, strict=True):
        seconds += factor * int(part)
    return float(seconds)
