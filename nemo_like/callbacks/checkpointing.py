"""When a run saves, and what it keeps."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl

from nemo_like.core.checkpoint import STATE, checkpoint_name, find_checkpoints, remove_checkpoint

logger = logging.getLogger(__name__)


class Checkpointing(pl.Callback):
    """Saves checkpoint folders at step boundaries and keeps the newest and the best.

    A step that is also validated is saved after its validation, so that the checkpoint knows its figures.

    Args:
        folder: Where the checkpoints go, usually ``<run folder>/checkpoints``.
        every_n_steps: Save when the number of steps done is a multiple of it; None saves only at the end.
        keep_last: How many of the newest to keep.
        keep_best: How many of the best by ``monitor`` to keep besides.
        monitor: A validation figure, e.g. ``val/loss``.
        mode: Whether a smaller or a larger figure is better.
        include: Files that every checkpoint holds a copy of, by name (the composed configuration of the run).

    Raises:
        ValueError: A count is out of range.
    """

    def __init__(
        self,
        *,
        folder: str | Path,
        every_n_steps: int | None = None,
        keep_last: int = 2,
        keep_best: int = 1,
        monitor: str = "val/loss",
        mode: Literal["min", "max"] = "min",
        include: Sequence[str | Path] = (),
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: must be at least 1, or None")
        if keep_last < 1:
            raise ValueError(
                f"keep_last={keep_last}: must be at least 1, or there is nothing to resume from"
            )
        self.folder = Path(folder)
        self.every_n_steps, self.keep_last, self.keep_best = every_n_steps, keep_last, keep_best
        self.monitor, self.mode = monitor, mode
        self.include = [Path(path) for path in include]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Removes what a killed save left behind."""
        if trainer.is_global_zero:
            for path in self.folder.glob(".step_*.incomplete"):
                logger.warning("removing %s, a checkpoint that was never finished", path)
                shutil.rmtree(path)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the files that belong to the run."""
        files = {path.name: path.read_bytes() for path in self.include if path.is_file()}
        checkpoint["files"] = {**checkpoint.get("files", {}), **files}

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Saves at the boundary of a step, unless its validation is still to come."""
        if self._is_due(trainer) and not self._is_validated(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves a step that was due, now that its figures are known."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self._is_due(trainer):
            self.save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves the last step."""
        self.save(trainer)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        step = trainer.global_step
        return step > 0 and self.every_n_steps is not None and step % self.every_n_steps == 0

    def _is_validated(self, trainer: pl.Trainer) -> bool:
        interval = trainer.val_check_batch
        if not trainer.enable_validation or not interval or math.isinf(interval):
            return False
        return trainer.global_step % interval == 0

    def save(self, trainer: pl.Trainer) -> Path:
        """Saves the current step, if it is not saved yet; called on all ranks."""
        path = self.folder / checkpoint_name(trainer.global_step)
        # Rank zero decides for all: on a shared file system others may see the folder later.
        if not trainer.strategy.broadcast(path.exists()):
            trainer.save_checkpoint(path, weights_only=False)
            logger.info("saved %s", path)
            if trainer.is_global_zero:
                self._remove_surplus()
            trainer.strategy.barrier("checkpoint")
        return path

    def _remove_surplus(self) -> None:
        saved = find_checkpoints(self.folder)
        keep = set(saved[-self.keep_last :])
        if self.keep_best:
            keep |= set(self._sort_by_figure(saved)[: self.keep_best])
        for path in saved:
            if path not in keep:
                remove_checkpoint(path)

    def _sort_by_figure(self, saved: list[Path]) -> list[Path]:
        """Best first; those without the figure are left out."""
        figures = []
        for path in saved:
            figure = json.loads((path / STATE).read_bytes()).get("metrics", {}).get(self.monitor)
            if figure is not None and not math.isnan(figure):
                figures.append((figure if self.mode == "min" else -figure, path))
        return [path for _, path in sorted(figures)]
