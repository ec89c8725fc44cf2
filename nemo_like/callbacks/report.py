"""What a run shows for itself when it is done."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from nemo_like.core.summary import Section
from nemo_like.tracking.environment import collect_environment
from nemo_like.tracking.logger import read_metrics
from nemo_like.tracking.plot import plot_loss
from nemo_like.tracking.report import Curves, RunFacts, write_report
from nemo_like.tracking.terminal import print_sections
from nemo_like.tracking.wording import format_cell, format_duration, format_number

logger = logging.getLogger(__name__)


class Report(pl.Callback):
    """After the last step: prints what the model has to show, and writes it into the run folder.

    ``model.summarize()`` is called on all ranks, in evaluation mode and without gradients. Rank zero then writes
    ``loss.png``, ``report.html``, ``summary.json`` and ``environment.json``. The curves are those of ``metrics.jsonl``,
    the configuration is ``config.yaml``; both are looked for in the run folder. An interrupted run has no report.

    Args:
        run_dir: The run folder; None takes ``trainer.default_root_dir``.
        name: Shown at the top of the page; None takes the name of the folder.
    """

    def __init__(self, *, run_dir: str | Path | None = None, name: str | None = None) -> None:
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.name = name
        self._started_s = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock."""
        self._started_s = time.monotonic()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gathers, prints and writes."""
        duration_s = time.monotonic() - self._started_s
        sections = _summarize(pl_module)
        if not trainer.is_global_zero:
            return
        folder = self.run_dir or Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        describe = getattr(getattr(trainer, "datamodule", None), "describe", None)
        if describe is not None:
            sections += describe()
        sections += _describe_callbacks(trainer)
        curves = read_metrics(folder)
        facts = _collect_facts(
            trainer,
            pl_module,
            curves,
            name=self.name or folder.resolve().name,
            duration_s=duration_s,
        )
        environment = collect_environment()
        config = folder / "config.yaml"
        summary = {**asdict(facts), "sections": [asdict(section) for section in sections]}
        _write_json(folder / "summary.json", summary)
        _write_json(folder / "environment.json", environment)
        plot_loss(curves, folder / "loss.png", title=facts.name)
        write_report(
            folder / "report.html",
            facts=facts,
            curves=curves,
            sections=sections,
            config=config.read_text(encoding="utf-8") if config.is_file() else "",
            environment=environment,
        )
        print_sections([*sections, _describe_run(facts, folder)])


def _summarize(pl_module: pl.LightningModule) -> list[Section]:
    summarize = getattr(pl_module, "summarize", None)
    if summarize is None:
        return []
    was_training = pl_module.training
    pl_module.eval()
    try:
        with torch.no_grad():
            return list(summarize())
    finally:
        pl_module.train(was_training)


def _describe_callbacks(trainer: pl.Trainer) -> list[Section]:
    """What the callbacks that watched the run have to show."""
    sections: list[Section] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        describe = getattr(callback, "describe", None)
        sections += describe() if describe is not None else []
    return sections


def _collect_facts(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    curves: Curves,
    *,
    name: str,
    duration_s: float,
) -> RunFacts:
    unit = getattr(pl_module, "unit", "targets")
    val_loss = getattr(pl_module, "val_metrics", {}).get("val/loss")
    _, rates = curves.get(f"perf/{unit}_per_s", (None, np.empty(0)))
    return RunFacts(
        name=name,
        steps=trainer.global_step,
        duration_s=round(duration_s, 3),
        units_per_s=float(np.median(rates)) if len(rates) else None,
        unit=unit,
        val_loss=None if val_loss is None else float(val_loss),
        num_parameters=sum(parameter.numel() for parameter in pl_module.parameters()),
        finished=time.strftime("%Y-%m-%d %H:%M"),
    )


def _describe_run(facts: RunFacts, folder: Path) -> Section:
    lines = [f"{facts.steps:,} steps in {format_duration(facts.duration_s)}"]
    if facts.units_per_s is not None:
        lines[0] += f", {format_number(facts.units_per_s)} {facts.unit}/s"
    if facts.val_loss is not None:
        lines[0] += f", validation loss {format_cell(facts.val_loss)}"
    lines.append(str(folder / "report.html"))
    return Section(title=facts.name, text="\n".join(lines))


def _write_json(path: Path, value: Any) -> None:
    hidden = path.with_name(f".{path.name}.new")
    # Numbers that JSON lacks become null, or no other program could read the file.
    plain = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
    hidden.write_text(
        json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", errors="replace"
    )
    os.replace(hidden, path)
