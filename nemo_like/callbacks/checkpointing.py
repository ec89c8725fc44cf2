"""When a run saves, and what it keeps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl

from nemo_like.core.agreement import Agreement, Flag
from nemo_like.core.checkpoint import checkpoint_name, find_checkpoints, read_figures, write_figures
from nemo_like.core.checkpoint_writer import CheckpointWriter, SaveOptions
from nemo_like.core.errors import CheckpointError
from nemo_like.core.resume_point import clear_incomplete
from nemo_like.core.retention import Retention

logger = logging.getLogger(__name__)


class Checkpointing(pl.Callback):
    """Saves checkpoint folders at step boundaries and keeps the newest and the best.

    A save takes a copy of the state and writes it behind the next steps. A step is saved before it is validated; the
    figures of its validation are added to the checkpoint when they are known. A run that was stopped between the two
    starts with that validation.

    Args:
        folder: Where the checkpoints go, usually ``<run folder>/checkpoints``.
        every_n_steps: Save when the number of steps done is a multiple of it; None saves only the last step.
        every_minutes: Save besides when so much time has passed since the last save, by the clock of rank zero.
        asynchronous: Write behind the next steps; else a step that saves lasts until all is on the disk.
        keep_last: How many of the newest to keep.
        keep_best: How many of the best by ``monitor`` to keep besides.
        keep_every_hours: Time between two checkpoints that stay for good; None keeps none.
        monitor: A validation figure, e.g. ``val/loss``.
        mode: Whether a smaller or a larger figure is better.
        include: Files that every checkpoint holds a copy of, by name (the composed configuration of the run).

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        *,
        folder: str | Path,
        every_n_steps: int | None = None,
        every_minutes: float | None = None,
        asynchronous: bool = True,
        keep_last: int = 2,
        keep_best: int = 1,
        keep_every_hours: float | None = None,
        monitor: str = "val/loss",
        mode: Literal["min", "max"] = "min",
        include: Sequence[str | Path] = (),
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: must be at least 1, or None")
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"every_minutes={every_minutes}: must be above 0, or None")
        self.folder = Path(folder)
        self.every_n_steps, self.every_minutes = every_n_steps, every_minutes
        self.asynchronous = asynchronous
        self.retention = Retention(
            keep_last=keep_last,
            keep_best=keep_best,
            keep_every_hours=keep_every_hours,
            monitor=monitor,
            mode=mode,
        )
        self.include = [Path(path) for path in include]
        self._writer = CheckpointWriter()
        self._agreement = Agreement()
        self._is_global_zero = True
        # Figures of validations whose checkpoint is not whole yet, by its folder.
        self._pending: dict[Path, dict[str, float]] = {}
        self._lock = threading.Lock()
        self._saved_s = 0.0
        self._is_asked = False
        self._is_step_lent = False

    # Around the training.

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Puts the saving of steps behind all other callbacks, so that what they say of a step is in its checkpoint."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = [it for it in callbacks if not isinstance(it, _Boundary)]
        # A new list: Lightning is walking through the old one.
        trainer.callbacks = [*others, _Boundary(self)]  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the writer of the strategy, and removes what a killed save left behind.

        Raises:
            TypeError: The strategy writes no checkpoint folders.
        """
        writer = getattr(trainer.strategy, "checkpoint_writer", None)
        if writer is None:
            raise TypeError(
                f"{type(trainer.strategy).__name__} writes no checkpoint folders: use one of nemo_like.strategies, "
                "e.g. Trainer(strategy='nemo_ddp')"
            )
        self._writer, self._agreement = writer, trainer.strategy.agreement  # type: ignore[attr-defined]
        self._is_global_zero = trainer.is_global_zero
        if self._is_global_zero:
            clear_incomplete(self.folder)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Lends one step more to a run that owes only its last validation, or Lightning would end it at once."""
        step = int(checkpoint.get("step", 0))
        interval = trainer.val_check_interval
        is_last = trainer.state.fn == "fit" and trainer.max_steps == step
        if is_last and isinstance(interval, int) and step % interval == 0:
            self._is_step_lent = self._owes_figures(trainer)
            trainer.fit_loop.epoch_loop.max_steps += int(self._is_step_lent)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validates the step that the run resumes from, if it was stopped before that."""
        self._saved_s = time.monotonic()
        if self._is_step_lent:
            trainer.fit_loop.epoch_loop.max_steps -= 1
        is_due = trainer.ckpt_path is not None and _is_validated(trainer)
        if self._is_step_lent or (is_due and self._owes_figures(trainer)):
            logger.info(
                "validating step %d first: the run was stopped before that", trainer.global_step
            )
            _validate(trainer)
        self._is_step_lent = False

    def _owes_figures(self, trainer: pl.Trainer) -> bool:
        """Whether the checkpoint that is resumed from waits for its figures; alike on all ranks."""
        if not trainer.enable_validation:
            return False
        is_owed = self._is_global_zero and read_figures(Path(str(trainer.ckpt_path))) is None
        return trainer.strategy.broadcast(is_owed)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the files that belong to the run."""
        files = {path.name: path.read_bytes() for path in self.include if path.is_file()}
        checkpoint["files"] = {**checkpoint.get("files", {}), **files}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves the last step, and waits until it is whole."""
        self.save(trainer)
        self.flush()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Lets a save that was begun become whole; a failure of it does not hide why the run ends."""
        try:
            self.flush()
        except CheckpointError as error:
            logger.error("%s", error)

    # At the boundaries of steps.

    def act(self, trainer: pl.Trainer) -> None:
        """Saves at the boundary of a step, before its validation.

        Raises:
            CheckpointError: A save behind the steps has failed; on all ranks at the same step.
        """
        agreement = self._agreement
        if Flag.FAILED in agreement.agreed:
            agreement.clear(Flag.FAILED)
            self._writer.wait()
        if Flag.SAVE in agreement.agreed or self._is_due(trainer):
            self.save(trainer)
        elif not self._is_asked and self._is_time_over():
            # Once: a second flag would arrive after the save that the first one asked for.
            self._is_asked = True
            agreement.raise_flag(Flag.SAVE)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Adds the figures to the checkpoint of this step, if there is one."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._note_figures(trainer)
            if self._is_global_zero:
                self._tidy_up()

    def _is_time_over(self) -> bool:
        """Whether the clock asks for a save; that of rank zero alone."""
        if self.every_minutes is None or not self._is_global_zero:
            return False
        return time.monotonic() - self._saved_s >= 60 * self.every_minutes

    def _is_due(self, trainer: pl.Trainer) -> bool:
        step = trainer.global_step
        if step == trainer.max_steps:
            return True
        return step > 0 and self.every_n_steps is not None and step % self.every_n_steps == 0

    def save(self, trainer: pl.Trainer) -> Path:
        """Saves the current step, if it is not saved yet; called on all ranks.

        Raises:
            CheckpointError: This save has failed, or the one before that was written behind the steps.
        """
        path = self.folder / checkpoint_name(trainer.global_step)
        self._agreement.clear(Flag.SAVE)
        # Rank zero decides for all: on a shared file system others may see the folder later.
        if not trainer.strategy.broadcast(path in (self._writer.folder, *_existing(path))):
            options = SaveOptions(asynchronous=self.asynchronous, after=self._tidy_up)
            trainer.save_checkpoint(path, weights_only=False, storage_options=options)
            self._note_figures(trainer)
        self._saved_s, self._is_asked = time.monotonic(), False
        return path

    def flush(self) -> None:
        """Waits until what was begun is whole on all ranks.

        Raises:
            CheckpointError: It has failed; on all ranks.
        """
        self._writer.wait()
        if self._is_global_zero:
            self._tidy_up()

    def _note_figures(self, trainer: pl.Trainer) -> None:
        model: Any = trainer.lightning_module
        if self._is_global_zero and getattr(model, "val_step", -1) == trainer.global_step:
            path = self.folder / checkpoint_name(trainer.global_step)
            with self._lock:
                self._pending = {path: dict(model.val_metrics)}

    def _tidy_up(self) -> None:
        """Adds figures to checkpoints that have become whole, then removes surplus ones; rank zero, either thread."""
        with self._lock:
            try:
                saved = find_checkpoints(self.folder)
                for path in [path for path in self._pending if path in saved]:
                    write_figures(path, self._pending[path])
                    del self._pending[path]
                self.retention.apply(self.folder)
            except OSError as error:
                # No reason to end a run whose state is saved; tried again with the next save.
                logger.warning("%s: cannot be tidied up now: %s", self.folder, error)


class _Boundary(pl.Callback):
    """The last to see a step."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        self.checkpointing = checkpointing

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.checkpointing.act(trainer)


def _existing(path: Path) -> list[Path]:
    return [path] if path.exists() else []


def _is_validated(trainer: pl.Trainer) -> bool:
    """Whether a validation follows the current step."""
    interval = trainer.val_check_batch
    return (
        trainer.enable_validation
        and isinstance(interval, int)
        and trainer.global_step % interval == 0
    )


def _validate(trainer: pl.Trainer) -> None:
    """What Lightning's loop does behind a step."""
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True
