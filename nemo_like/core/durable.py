"""Files that are on the disk when the call returns: written, synchronised, renamed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Buffer = Any
"""What has the buffer protocol: bytes, a NumPy array."""

_BLOCK_BYTES = 8 * 2**20


class HashedFile:
    """A new file whose bytes are hashed on their way, so that nobody has to read them again.

    Args:
        path: Must not exist yet.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def write(self, content: Buffer) -> None:
        """Appends; other threads run meanwhile."""
        view = memoryview(content).cast("B")
        for start in range(0, len(view), _BLOCK_BYTES):
            block = view[start : start + _BLOCK_BYTES]
            self._hash.update(block)
            while block:
                written = os.write(self._descriptor, block)
                self.num_bytes += written
                block = block[written:]

    @property
    def sha256(self) -> str:
        """Of what was written so far, hexadecimal."""
        return self._hash.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def write_new(path: Path, *contents: Buffer) -> dict[str, int | str]:
    """Writes a new file, making the folders above it.

    Returns:
        Its entry in a manifest: ``bytes`` and ``sha256``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with HashedFile(path) as file:
        for content in contents:
            file.write(content)
    return {"bytes": file.num_bytes, "sha256": file.sha256}


def replace(path: Path, content: bytes) -> None:
    """Writes a file in one step: whoever reads it sees the old content or the new one."""
    hidden = path.with_name(f".{path.name}.new")
    hidden.unlink(missing_ok=True)
    write_new(hidden, content)
    hidden.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
