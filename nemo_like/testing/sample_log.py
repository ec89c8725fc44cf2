"""Which samples a run saw at which step, in files that survive a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from nemo_like.core.datamodule import StepBatch


class SampleLog(pl.Callback):
    """Appends a line to ``<folder>/samples-<rank>.jsonl`` at each step: ``{"step": 3, "ids": [7, 1], "loss": 2.5}``.

    A line is one write, so that a run which is killed leaves whole lines; one that goes on writes the steps since its
    checkpoint again.

    Args:
        folder: Made if it is not there.
    """

    def __init__(self, *, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: StepBatch,
        batch_idx: int,
    ) -> None:
        """Writes the line of this step."""
        metrics: dict[str, Any] = pl_module.step_metrics  # type: ignore[assignment]
        line = {
            "step": trainer.global_step,
            "ids": batch.sample_ids,
            "loss": float(metrics["train/loss"]),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"samples-{trainer.global_rank}.jsonl"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, f"{json.dumps(line)}\n".encode())
        finally:
            os.close(file)


def read_sample_log(folder: Path) -> dict[tuple[int, int], set[str]]:
    """What was written of each step, by step and rank; more than one entry where a step was not the same again."""
    seen: dict[tuple[int, int], set[str]] = {}
    for path in sorted(folder.glob("samples-*.jsonl")):
        rank = int(path.stem.partition("-")[2])
        for row in path.read_text("utf-8").splitlines():
            seen.setdefault((json.loads(row)["step"], rank), set()).add(row)
    return seen
