"""Which base an adapter belongs to: where it lies, and a hash of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_like.core.checkpoint import MANIFEST
from nemo_like.core.errors import CheckpointError

from ..hf_folder import list_weight_files


@dataclass(frozen=True)
class BaseModel:
    """The frozen model that an adapter was trained on."""

    path: str
    """Folder that it was read from."""
    sha256: str | None
    """Of its weights, as :func:`hash_weights` gives it; None where nobody wrote it down (folders of peft)."""

    def refuse_other(self, other: BaseModel, *, source: str) -> None:
        """Compares with the base that is there.

        Args:
            other: What is there.
            source: The adapter, for the message.

        Raises:
            CheckpointError: The hashes differ.
        """
        if self.sha256 is None or other.sha256 is None or self.sha256 == other.sha256:
            return
        raise CheckpointError(
            f"{source}: was trained on another base: {self.path} with SHA-256 {self.sha256}, "
            f"but the weights in {other.path} have {other.sha256}; give the folder of that base"
        )


def hash_weights(folder: Path) -> str:
    """SHA-256 of the weights in a Hugging Face folder or a checkpoint of ours.

    Of a single file it is that of the file, as ``sha256sum`` and the Hugging Face hub show it; of several that of
    the lines ``<hash>  <name>``, sorted by name.

    Args:
        folder: With ``config.json``, or with a manifest, whose hashes are taken as they are.
    """
    manifest = folder / MANIFEST
    if manifest.is_file():
        entries = json.loads(manifest.read_bytes())["files"]
        hashes = {name: it["sha256"] for name, it in entries.items() if name.startswith("model/")}
        # What an adapter's checkpoint stands on is written in this file.
        hashes |= {name: entries[name]["sha256"] for name in (ADAPTER_FILE,) if name in entries}
        return _combine(hashes)
    return _combine({file.name: _hash_file(file) for file in list_weight_files(folder)})


ADAPTER_FILE = "adapter.json"
"""File of an adapter run's checkpoint: the adapter's configuration and its base."""


def _combine(hashes: Mapping[str, str]) -> str:
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    lines = "".join(f"{value}  {name}\n" for name, value in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
