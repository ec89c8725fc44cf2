"""Leaving early without losing a step: on a signal, a file, or when the time is over."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from nemo_like.callbacks.checkpointing import Checkpointing
from nemo_like.core import notice
from nemo_like.core.agreement import Agreement, Flag
from nemo_like.core.lifeline import settle_exit
from nemo_like.core.requeue import ask_for_time, requeue_job
from nemo_like.core.status import write_status
from nemo_like.core.units import parse_duration

logger = logging.getLogger(__name__)

# Causes besides the numbers of signals, which end at 64. Of several causes the largest counts.
SENTINEL, MAX_TIME = 100, 101
_MORE_TIME = frozenset({signal.SIGUSR1, signal.SIGUSR2})
_LOOK_EVERY_S = 2.0


class Preemption(pl.Callback):
    """Saves and ends a run between two steps when it is told to stop.

    It is told by a signal, by a file called ``sentinel``, or by the clock (``max_time``), on any rank. All ranks agree,
    save the same step, and leave together with exit code 75; after Ctrl-C with 130. What belongs to the end of a run
    (a last validation, a report) is not done: a scheduler gives little time. A run at its last step is not stopped. A
    second signal ends the process at once.

    Its state is saved by the run's :class:`~nemo_like.callbacks.Checkpointing`; without one, Lightning writes
    ``preempted.ckpt`` into ``trainer.default_root_dir``. Nothing is saved where no step was done since the start.

    Args:
        signals: Names of the signals that mean to stop; others keep their handlers.
        sentinel: A file that means to stop; removed when that was done. None looks for none.
        max_time: ``HH:MM:SS`` or ``DD:HH:MM:SS`` since the start of the process; None has no limit.
        requeue: Inside SLURM: have the job started again, unless Ctrl-C or ``max_time`` was the cause.
        more_time_minutes: At SIGUSR1 and SIGUSR2, which announce the end of the time: ask SLURM for so many minutes
            first. If they are granted the run goes on and asks again when they are over.
        status: A file that is to say how the run stands; None writes none.

    Raises:
        ValueError: A signal that cannot be handled, or a duration that cannot be read.
    """

    heeds_notices = True

    def __init__(
        self,
        *,
        signals: Sequence[str] = notice.DEFAULT_SIGNALS,
        sentinel: str | Path | None = None,
        max_time: str | None = None,
        requeue: bool = True,
        more_time_minutes: int | None = None,
        status: str | Path | None = None,
    ) -> None:
        for name in signals:
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
                raise ValueError(
                    f"signals={list(signals)}: {name!r} is no signal that can be handled"
                )
        if more_time_minutes is not None and more_time_minutes < 1:
            raise ValueError(f"more_time_minutes={more_time_minutes}: must be at least 1, or None")
        self.signals, self.requeue = tuple(signals), requeue
        self.more_time_minutes = more_time_minutes
        self.max_time = max_time
        self._max_time_s = None if max_time is None else parse_duration(max_time)
        self.sentinel = None if sentinel is None else Path(sentinel)
        self.status = None if status is None else Path(status)
        self._agreement = Agreement()
        self._owns_agreement = self._is_listener = self._is_time_keeper = False
        self._raised: set[int] = set()
        self._first_step = 0
        self._next_look_s = 0.0
        # When minutes that were granted are over: by the monotonic clock, and which signal had announced their end.
        self._again: tuple[float, int] | None = None

    # What Lightning calls.

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Listens, if nobody does, and moves behind the other callbacks: they have seen a step that is saved."""
        if stage != "fit":
            return
        self._is_listener = notice.start_listening(self.signals)
        # A new list: Lightning is walking through the old one.
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [*(it for it in callbacks if it is not self), self]  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes part in the agreement of the strategy, or makes one for a strategy of Lightning's own."""
        agreement = getattr(trainer.strategy, "agreement", None)
        self._owns_agreement = agreement is None
        self._agreement = agreement or Agreement.among_ranks()
        self._agreement.sources.append(self._look)
        self._is_time_keeper = trainer.is_global_zero
        self._raised, self._again, self._next_look_s = set(), None, 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves before the first step, if something came while the run started."""
        notice.reclaim()
        self._first_step = trainer.global_step
        # What is sent by the first call is known after the second.
        self._agreement.exchange()
        self._agreement.exchange()
        self._stop_if_agreed(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Leaves at the boundary of a step."""
        if self._owns_agreement:
            self._agreement.exchange()
        self._stop_if_agreed(trainer)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Leaves in the middle of a validation, which does not change what is saved; all ranks have as many batches."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._agreement.exchange()
            self._stop_if_agreed(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Puts the signal handlers back."""
        if stage == "fit":
            self._let_go()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Puts the signal handlers back."""
        self._let_go(trainer)

    # Sources of a stop.

    def _look(self) -> None:
        """Raises the flag once for each cause that there is on this rank."""
        if (number := notice.find_signal()) is not None:
            self._raise(number)
        now = time.monotonic()
        if self._again is not None and now >= self._again[0]:
            self._raise(self._again[1])
        if now < self._next_look_s:
            return
        self._next_look_s = now + _LOOK_EVERY_S
        if self.sentinel is not None and self.sentinel.exists():
            self._raise(SENTINEL)
        if self._is_time_keeper and self._max_time_s is not None:
            left_s = self._max_time_s - notice.measure_age_s()
            self._next_look_s = min(self._next_look_s, now + max(left_s, 0))
            if left_s <= 0:
                self._raise(MAX_TIME)

    def _raise(self, cause: int) -> None:
        if cause not in self._raised:
            self._raised.add(cause)
            self._agreement.raise_flag(Flag.STOP, cause=cause)
            logger.info("%s: the run stops between two steps, once it is saved", self._say(cause))

    def _say(self, cause: int) -> str:
        if cause == SENTINEL:
            return f"{self.sentinel} is there"
        if cause == MAX_TIME:
            return f"max_time={self.max_time} is over"
        if cause == signal.SIGINT:
            return "Ctrl-C (SIGINT)"
        return signal.Signals(cause).name if cause else "a callback asked for it"

    # Leaving.

    def _stop_if_agreed(self, trainer: pl.Trainer) -> None:
        if Flag.STOP not in self._agreement.agreed:
            return
        cause = self._agreement.cause
        if 0 <= trainer.max_steps <= trainer.global_step:
            logger.info("%s: the run is at its last step and ends by itself", self._say(cause))
            self._agreement.clear(Flag.STOP)
        elif not self._may_stay(trainer, cause):
            self._stop(trainer, cause)

    def _may_stay(self, trainer: pl.Trainer, cause: int) -> bool:
        """Asks for more time where that may help; alike on all ranks."""
        if self.more_time_minutes is None or cause not in _MORE_TIME:
            return False
        granted = trainer.is_global_zero and ask_for_time(self.more_time_minutes)
        if not trainer.strategy.broadcast(granted):
            return False
        self._agreement.clear(Flag.STOP)
        notice.forget()
        self._raised.discard(cause)
        self._again = (time.monotonic() + 60 * self.more_time_minutes, cause)
        if not trainer.is_global_zero:
            self._again = None
        return True

    def _stop(self, trainer: pl.Trainer, cause: int) -> None:
        why, step = self._say(cause), trainer.global_step
        saved = self._save(trainer) if step > self._first_step else None
        what = f"{saved} is saved" if saved else "nothing was trained since the start"
        logger.info("stopped by %s at step %d: %s; the same command goes on", why, step, what)
        # From here on SLURM may take the job down, which is no second notice.
        notice.ignore()
        if trainer.is_global_zero:
            if self.status is not None:
                write_status(self.status, "stopped", step=step, reason=why)
            if self.sentinel is not None:
                self.sentinel.unlink(missing_ok=True)
            if (
                self.requeue
                and cause not in (signal.SIGINT, MAX_TIME)
                and "SLURM_JOB_ID" in os.environ
            ):
                requeue_job()
        self._agreement.close()
        trainer.strategy.barrier("stopped")
        code = notice.EXIT_INTERRUPTED if cause == signal.SIGINT else notice.EXIT_STOPPED
        raise notice.StopRun(why, code=settle_exit(code), is_settled=True)

    def _save(self, trainer: pl.Trainer) -> Path:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, Checkpointing):
                path = callback.save(trainer)
                callback.flush()
                return path
        path = Path(trainer.default_root_dir) / "preempted.ckpt"
        hidden = path.with_name(f".{path.name}.new")
        trainer.save_checkpoint(hidden)
        if trainer.is_global_zero:
            os.replace(hidden, path)
        return path

    def _let_go(self, failed: pl.Trainer | None = None) -> None:
        if self._look in self._agreement.sources:
            self._agreement.sources.remove(self._look)
        if self._owns_agreement:
            self._agreement.abandon() if failed else self._agreement.close()
        if not self._is_listener:
            return
        self._is_listener = False
        found = notice.stop_listening()
        # After an exception Lightning puts back the handlers that it found, which are ours, behind the last hook.
        connector = getattr(failed, "_signal_connector", None)
        getattr(connector, "_original_handlers", {}).update(found)
