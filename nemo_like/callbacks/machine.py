"""Memory and machine of every rank, into the metrics; and a word about memory that only grows."""

from __future__ import annotations

import logging
import math
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from nemo_like.core.summary import Section, Table
from nemo_like.tracking.leak import LeakDetector
from nemo_like.tracking.machine import FIGURES, Meter, name_throttles

logger = logging.getLogger(__name__)

_SENT = (*FIGURES, "growth", "leak", "since", "grown")
# Without a limit to it, a page of a run on a thousand ranks would show nothing but them.
_MOST_ROWS = 64
# Shown for each rank: figure, heading, digits.
_COLUMNS = (
    ("rss_gb", "memory GB"),
    ("rss_peak_gb", "peak GB"),
    ("cpu_percent", "processor %"),
    ("device_allocated_gb", "device GB"),
    ("device_reserved_gb", "device reserved GB"),
    ("device_temperature_c", "device C"),
    ("device_power_w", "device W"),
    ("device_utilization_percent", "device load %"),
)


class MachineMonitor(pl.Callback):
    """Every n steps reads memory, processor and GPU of each rank and writes one record of all ranks.

    ``machine/rss_gb`` is the mean over the ranks; with more than one rank ``machine/rss_gb_min`` and ``_max`` stand
    beside it; likewise for the other figures (see ``nemo_like.tracking.machine.FIGURES``). What there is not on a
    machine is left out. ``machine/rss_growth_mb_per_step`` is how fast memory grows, of the rank where it does most.
    The report shows the last figures of each rank. A leak is reported once a rank.

    Args:
        every_n_steps: None takes ``trainer.log_every_n_steps``.
        warmup_steps: Steps of this start of the run in which memory may grow without a word.
        leak_mb: Steady growth that is worth a warning, 1e6 bytes.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self, *, every_n_steps: int | None = None, warmup_steps: int = 20, leak_mb: float = 64.0
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: must be at least 1, or None")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps}: must be at least 0")
        if not leak_mb > 0:
            raise ValueError(f"leak_mb={leak_mb}: must be above 0")
        self.every_n_steps = every_n_steps
        self._detector = LeakDetector(warmup_steps=warmup_steps, smallest_mb=leak_mb)
        self._meter: Meter | None = None
        self._interval = 1
        self._last = np.empty((0, len(_SENT)))
        self._leaking: set[int] = set()
        self._throttled: set[str] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to measure."""
        # Lightning sets it without declaring it; its 0 (never) is no interval here.
        self._interval = self.every_n_steps or getattr(trainer, "log_every_n_steps", 0) or 1
        self._meter = Meter(trainer.strategy.root_device)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Reads, gathers and records if it is this step's turn; the same steps on all ranks."""
        step = trainer.global_step
        if step % self._interval and step != trainer.max_steps:
            return
        self._last = self._gather(trainer, self._read(step))
        if trainer.is_global_zero:
            values = summarize(self._last)
            for it in trainer.loggers:
                it.log_metrics(values, step=step)
            self._warn(step)

    def _read(self, step: int) -> list[float]:
        assert self._meter is not None, "training has started"
        figures = self._meter.read()
        self._detector.add(step, figures["private_gb"] * 1000)
        growth, leak = self._detector.compute_growth(), self._detector.find()
        found = [leak.mb_per_step, leak.since, leak.grown_mb] if leak else [math.nan] * 3
        return [*figures.values(), math.nan if growth is None else growth, *found]

    def _gather(self, trainer: pl.Trainer, row: list[float]) -> np.ndarray:
        """(ranks, figures), by rank."""
        if trainer.world_size == 1:
            return np.array([row])
        # float32 counts steps exactly up to 16 million.
        mine = torch.tensor(row, device=trainer.strategy.root_device)
        rows: np.ndarray = trainer.strategy.all_gather(mine).cpu().double().numpy()
        return rows.reshape(trainer.world_size, len(_SENT))

    def _warn(self, step: int) -> None:
        for rank, row in enumerate(self._last):
            figures = dict(zip(_SENT, row.tolist(), strict=True))
            if not math.isnan(figures["leak"]) and rank not in self._leaking:
                self._leaking.add(rank)
                logger.warning(
                    "step %d: the memory of rank %d grows by %.2f MB a step, since about step %d: %.0f MB so far, "
                    "%.1f GB of the machine are left; something is kept that no step needs any more",
                    step,
                    rank,
                    figures["leak"],
                    figures["since"],
                    figures["grown"],
                    figures["host_available_gb"],
                )
            for reason in filter(None, name_throttles(figures["device_throttle"]).split(", ")):
                # At full load a GPU is most often held by its power cap, which is as it should be.
                if reason != "power cap" and reason not in self._throttled:
                    self._throttled.add(reason)
                    logger.warning(
                        "step %d: the GPU of rank %d is slowed down: %s", step, rank, reason
                    )

    def describe(self) -> list[Section]:
        """The last figures of each rank, for the report of a run; on rank zero."""
        if not len(self._last):
            return []
        last = {name: self._last[:, index] for index, name in enumerate(_SENT)}
        shown = [it for it in _COLUMNS if not np.isnan(last[it[0]]).all()]
        ranks = range(min(len(self._last), _MOST_ROWS))
        table = Table(
            columns=["rank", *(heading for _, heading in shown), "grows by MB a step", "slowed by"],
            rows=[
                [
                    rank,
                    *(f"{last[name][rank]:.3g}" for name, _ in shown),
                    "-" if np.isnan(last["growth"][rank]) else f"{last['growth'][rank]:.3f}",
                    name_throttles(last["device_throttle"][rank]) or "-",
                ]
                for rank in ranks
            ],
            emphasis=[rank for rank in ranks if not np.isnan(last["leak"][rank])],
        )
        notes = [
            f"Rank {rank} leaks: {last['leak'][rank]:.2f} MB a step since about step "
            f"{last['since'][rank]:.0f}, {last['grown'][rank]:.0f} MB in all."
            for rank in table.emphasis
        ]
        if len(self._last) > _MOST_ROWS:
            notes.append(f"{len(self._last) - _MOST_ROWS} more ranks are not shown.")
        return [Section(title="Memory and machine", table=table, note=" ".join(notes))]


def summarize(rows: np.ndarray) -> dict[str, float]:
    """One record of all ranks; what no rank has is left out.

    Args:
        rows: (ranks, figures).
    """
    record: dict[str, float] = {}
    for index, name in enumerate(_SENT):
        values = rows[:, index][~np.isnan(rows[:, index])]
        if not len(values) or name in ("leak", "since", "grown"):
            continue
        if name == "growth":
            record["machine/rss_growth_mb_per_step"] = float(values.max())
        elif name == "device_throttle":
            record["machine/device_throttled"] = float((values > 0).mean())
        else:
            record[f"machine/{name}"] = float(values.mean())
            if len(rows) > 1:
                record[f"machine/{name}_min"] = float(values.min())
                record[f"machine/{name}_max"] = float(values.max())
    return record
