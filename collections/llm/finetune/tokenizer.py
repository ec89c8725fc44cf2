"""The tokenizer of the model that is fine-tuned, wherever the model lies."""

from __future__ import annotations

from pathlib import Path

from nemo_like.core.errors import DataError
from nemo_like.core.paths import resolve
from nemo_like.text.tokenizer import Tokenizer


def open_tokenizer(
    path: str | Path, *, bos_token: str | None = None, eos_token: str | None = None
) -> Tokenizer:
    """Opens a tokenizer.

    Args:
        path: A tokenizer.json, a Hugging Face folder, a checkpoint, or a run folder (its newest checkpoint).
        bos_token: Begin of text, where the files do not say or say something else.
        eos_token: End of text, likewise.

    Raises:
        DataError: There is none.
    """
    found = resolve(str(path))[0]
    if (found / "checkpoints").is_dir() and not (found / "tokenizer.json").is_file():
        from nemo_like.core.checkpoint import find_checkpoints  # brings torch

        saved = find_checkpoints(found / "checkpoints")
        if not saved:
            raise DataError("has no whole checkpoint yet, so no tokenizer", file=found)
        found = saved[-1]
    return Tokenizer.load(found, bos_token=bos_token, eos_token=eos_token)
