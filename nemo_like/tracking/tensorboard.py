"""Metrics as TensorBoard events, in the run folder."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl


class TensorBoardLogger(pl.loggers.TensorBoardLogger):
    """Writes events to ``<folder>/tensorboard``; a resumed run goes on there.

    Args:
        folder: The run folder.
    """

    def __init__(self, *, folder: str | Path) -> None:
        super().__init__(save_dir=folder, name="tensorboard", version="")
