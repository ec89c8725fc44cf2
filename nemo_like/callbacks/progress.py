"""One line that says how a run is doing."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from typing import Any, TextIO

import lightning.pytorch as pl

from nemo_like.tracking.wording import format_duration, format_number

_CLEAR_LINE = "\r\x1b[K"
_BAR_WIDTH = 24


class ProgressBar(pl.Callback):
    """Shows step, loss, throughput and time left while a run trains and validates.

    On a terminal it is a bar that redraws itself; elsewhere (a file, a pipe, CI) it is a plain line every now and then.
    It takes the place of Lightning's bar: ``Trainer(enable_progress_bar=False)``. The throughput is what
    :class:`~nemo_like.callbacks.metrics.MetricsWriter` measured last. Between two refreshes a step costs one look at
    the clock. Log lines of ``nemo_like`` are printed above the bar.

    Args:
        refresh_s: Seconds between two refreshes on a terminal.
        line_every_s: Seconds between two lines elsewhere.
        file: Where it goes; None is standard error.

    Raises:
        ValueError: A time is negative.
    """

    def __init__(
        self, *, refresh_s: float = 0.25, line_every_s: float = 15.0, file: TextIO | None = None
    ) -> None:
        for name, value in (("refresh_s", refresh_s), ("line_every_s", line_every_s)):
            if value < 0:
                raise ValueError(f"{name}={value}: must be at least 0 seconds")
        self.refresh_s, self.line_every_s = refresh_s, line_every_s
        self._file = file
        self._is_terminal = False
        self._is_shown = False
        self._has_line = False
        self._next_s = 0.0
        self._first: tuple[int, float] | None = None
        self._handlers: list[logging.Handler] = []

    # What Lightning calls.

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins at the step that the run resumes from."""
        self._is_shown = trainer.is_global_zero
        if not self._is_shown:
            return
        self._file = self._file or sys.stderr
        self._is_terminal = self._file.isatty() and os.environ.get("TERM") != "dumb"
        self._next_s = 0.0
        self._first = None
        if self._is_terminal:
            # A log line would be written into the bar: it is wiped first and comes back with the next refresh.
            self._handlers = list(logging.getLogger("nemo_like").handlers)
            for handler in self._handlers:
                handler.addFilter(self._wipe)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Refreshes, if it is time to."""
        now = time.monotonic()
        if now < self._next_s or not self._is_shown:
            return
        step = trainer.global_step
        # The first step warms up what later ones use, so time left is reckoned from its end.
        self._first = self._first or (step, now)
        self._show(self._describe(trainer, pl_module, now))

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Refreshes, if it is time to."""
        now = time.monotonic()
        if now < self._next_s or not self._is_shown or trainer.state.fn != "fit":
            return
        total = sum(n for n in trainer.num_val_batches if n != float("inf"))
        of = f"/{total:,.0f}" if total else ""
        self._show(f"{self._count(trainer)}  validating {batch_idx + 1:,}{of}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows the last step and leaves the line where it is."""
        if self._is_shown:
            self._show(self._describe(trainer, pl_module, time.monotonic()))
            self._close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leaves the terminal as it was found."""
        if self._is_shown:
            self._close()

    # The line.

    def _count(self, trainer: pl.Trainer) -> str:
        step, last = trainer.global_step, _last_step(trainer)
        if last is None:
            return f"step {step:,}"
        counted = f"step {step:,}/{last:,}"
        if not self._is_terminal:
            return f"{counted} ({100 * step / last:.0f} %)"
        filled = _BAR_WIDTH * step / last
        bar = "\u2501" * int(filled) + ("\u2578" if filled % 1 >= 0.5 else "")
        return f"{_paint(bar, 36)}{_paint(chr(0x2501) * (_BAR_WIDTH - len(bar)), 90)} {counted}"

    def _describe(self, trainer: pl.Trainer, pl_module: pl.LightningModule, now: float) -> str:
        metrics: dict[str, Any] = getattr(pl_module, "step_metrics", {})
        val_metrics: dict[str, Any] = getattr(pl_module, "val_metrics", {})
        parts = [self._count(trainer)]
        if "train/loss" in metrics:
            parts.append(f"loss {float(metrics['train/loss']):.4f}")
        if "val/loss" in val_metrics:
            parts.append(f"val {float(val_metrics['val/loss']):.4f}")
        if skipped := metrics.get("train/skipped"):
            parts.append(f"{skipped:.0f} skipped")
        unit = getattr(pl_module, "unit", "targets")
        if (rate := metrics.get(f"perf/{unit}_per_s")) is not None:
            parts.append(f"{format_number(rate)} {unit}/s")
        step, last = trainer.global_step, _last_step(trainer)
        if last is not None and step < last and self._first is not None and step > self._first[0]:
            per_step_s = (now - self._first[1]) / (step - self._first[0])
            parts.append(f"{format_duration(per_step_s * (last - step))} left")
        return "  ".join(parts)

    def _show(self, line: str) -> None:
        assert self._file is not None
        if self._is_terminal:
            width = _measure_width(self._file) - 1
            # The cursor rests at the start of the line, so what others print begins there.
            self._file.write(f"{_CLEAR_LINE}{_cut(line, width)}\r")
            self._has_line = True
            self._next_s = time.monotonic() + self.refresh_s
        else:
            self._file.write(line + "\n")
            self._next_s = time.monotonic() + self.line_every_s
        self._file.flush()

    def _wipe(self, record: logging.LogRecord) -> bool:
        if self._has_line and self._file is not None:
            self._file.write(_CLEAR_LINE)
            self._file.flush()
        return True

    def _close(self) -> None:
        for handler in self._handlers:
            handler.removeFilter(self._wipe)
        self._handlers = []
        if self._has_line and self._file is not None:
            self._file.write("\n")
            self._file.flush()
        self._has_line = self._is_shown = False


def _last_step(trainer: pl.Trainer) -> int | None:
    return trainer.max_steps if trainer.max_steps > 0 else None


def _measure_width(file: TextIO) -> int:
    try:
        # Of this terminal: standard output may be a file.
        columns = os.get_terminal_size(file.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns or shutil.get_terminal_size().columns


def _paint(text: str, color: int) -> str:
    return text if os.environ.get("NO_COLOR") else f"\x1b[{color}m{text}\x1b[0m"


def _cut(line: str, width: int) -> str:
    """The first ``width`` visible characters; colours take no room."""
    shown, room, index = [], width, 0
    while index < len(line):
        if line[index] == "\x1b":
            end = line.index("m", index) + 1
            shown.append(line[index:end])
            index = end
        else:
            if room > 0:
                shown.append(line[index])
                room -= 1
            index += 1
    return "".join(shown)
