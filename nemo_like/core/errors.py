"""The exceptions that a user can meet.

NemoLikeError
├── ConfigError (ValueError)        every fault of a configuration at once
├── DataError (ValueError)          a bad record, with file, line and byte offset
├── CheckpointError (RuntimeError)  a folder that is no whole checkpoint, or does not fit the model
├── NonfiniteError (ArithmeticError) training whose loss or gradient is not finite any more
├── DeviceMemoryError (RuntimeError) memory ran out, with what would need less
└── MissingExtraError (ImportError) an optional dependency, with the pip extra that brings it
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path


def suggest(name: str, options: Iterable[str]) -> str:
    """``; did you mean 'x'`` with the option nearest to ``name``, or nothing."""
    close = difflib.get_close_matches(name, list(options), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}" if close else ""


class NemoLikeError(Exception):
    """Base of all errors raised on purpose; the command line shows them without a trace-back."""


class ConfigError(NemoLikeError, ValueError):
    """A configuration that cannot be run.

    Args:
        faults: One line each: place, what came, what is allowed, what to do.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        super().__init__("\n".join(self.faults))


class DataError(NemoLikeError, ValueError):
    """A record that cannot be read.

    Args:
        message: What is wrong and what was expected.
        file: The file it stands in.
        line: 1-based line number, where the format has lines.
        byte_offset: Offset of the record in the file (in the uncompressed stream for compressed
            lines, in the compressed file for a broken frame; the message says which).
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | Path | None = None,
        line: int | None = None,
        byte_offset: int | None = None,
    ) -> None:
        self.message, self.file, self.line, self.byte_offset = message, file, line, byte_offset
        place = str(file) if file is not None else ""
        if line is not None:
            place += f":{line}"
        if byte_offset is not None:
            place += f" (byte {byte_offset})"
        super().__init__(f"{place}: {message}" if place else message)


class CheckpointError(NemoLikeError, RuntimeError):
    """A checkpoint that is incomplete, damaged, or made for another model.

    Args:
        message: What is wrong, with the folder, and what to do.
        missing: All names that the model has and the checkpoint lacks.
        unexpected: All names that the checkpoint has and the model lacks.
    """

    def __init__(
        self, message: str, *, missing: Sequence[str] = (), unexpected: Sequence[str] = ()
    ) -> None:
        self.missing, self.unexpected = list(missing), list(unexpected)
        lines = [message]
        lines += [f"  missing:    {name}" for name in self.missing]
        lines += [f"  unexpected: {name}" for name in self.unexpected]
        super().__init__("\n".join(lines))


class NonfiniteError(NemoLikeError, ArithmeticError):
    """Training whose loss or gradient has not been finite for too many steps in a row."""


class DeviceMemoryError(NemoLikeError, RuntimeError):
    """What a step computes does not fit into the memory of the device, or of the host."""


class MissingExtraError(NemoLikeError, ImportError):
    """An optional dependency that is not installed."""
