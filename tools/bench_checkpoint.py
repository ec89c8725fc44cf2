"""What saving costs: the step that saves, the steps behind it, and the writing itself against torch.save.

    python tools/bench_checkpoint.py [--steps 200] [--rounds 7] [--state-mb 1000] [key=value ...]

First the quickstart run (or another, by overrides) with a save every 20 steps, and in the middle between two of them a
torch.save of the same state for comparison. Printed are medians: a normal step, the step that saves, the steps while
the checkpoint is being written, and what torch.save would stop the run for. Then both write the same state in turn,
without training; ours hashes and synchronises to the disk, torch.save is shown with and without that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from nemo_like.core.checkpoint_writer import CheckpointWriter, SaveOptions
from nemo_like.core.compose import compose
from nemo_like.core.console import setup_logging
from nemo_like.core.run import build_run
from nemo_like.strategies.resume import collect_optimizer_tensors

EVERY = 20


class Clock(pl.Callback):
    """Times whole steps, by what happened in them; to be the last callback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.times_ms: dict[str, list[float]] = {"normal": [], "saving": [], "behind": []}
        self.torch_save_ms: list[float] = []
        self._since = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, model: pl.LightningModule, *_: Any) -> None:
        """Notes the step that has just ended."""
        step, strategy = trainer.global_step, trainer.strategy
        duration_ms = (time.perf_counter() - self._since) * 1e3
        is_writing = strategy.checkpoint_writer.folder is not None  # type: ignore[attr-defined]
        kind = "behind" if is_writing else "normal"
        if step % EVERY == 0:
            kind = "saving"
        # Not the first save either, which makes its plan and its memory.
        if step > EVERY + 5 and step != trainer.max_steps:
            self.times_ms[kind].append(duration_ms)
        if step % EVERY == EVERY // 2:
            strategy.checkpoint_writer.wait()  # type: ignore[attr-defined]
            state = {"model": model.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
            since = time.perf_counter()
            torch.save(state, self.folder / "run.pt")
            self.torch_save_ms.append((time.perf_counter() - since) * 1e3)
        self._since = time.perf_counter()


def train(overrides: list[str], steps: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Runs with saves, prints what they cost, and gives the state at the end."""
    settings = [
        f"run_dir={folder / 'run'}",
        f"trainer.max_steps={steps}",
        "trainer.val_every_n_steps=null",
        "trainer.val_batches=1",
        f"checkpoint.every_n_steps={EVERY}",
        "callbacks.report=null",
        "callbacks.preemption=null",
    ]
    composed = compose("pretrain", [*overrides, *settings])
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(composed.yaml)
    trainer, model, data = build_run(composed.config, folder / "run")
    clock = Clock(folder)
    trainer.callbacks.append(clock)  # type: ignore[attr-defined]
    trainer.fit(model, datamodule=data)
    normal = statistics.median(clock.times_ms["normal"])
    for kind, times in clock.times_ms.items():
        if times:
            median = statistics.median(times)
            print(f"{kind:8} {median:8.1f} ms a step, {median / normal:.2f}x ({len(times)} steps)")
    stall = statistics.median(clock.times_ms["saving"]) - normal
    print(f"stall    {stall:8.1f} ms; torch.save {statistics.median(clock.torch_save_ms):.1f} ms")
    optimizer = collect_optimizer_tensors(trainer.optimizers[0], model)
    return {"model": dict(model.state_dict()), "optimizer": optimizer}


def write(state: Mapping[str, Mapping[str, Tensor]], rounds: int, folder: Path, name: str) -> None:
    """Writes a state in turn with torch.save and prints what both took."""
    num_mb = sum(it.nbytes for part in state.values() for it in part.values()) / 1e6
    writer = CheckpointWriter()
    times: dict[str, list[float]] = {"ours": [], "snapshot": [], "torch.save": [], "with fsync": []}
    for number in range(rounds + 1):
        path = folder / f"{name}_{number}"
        since = time.perf_counter()
        writer.save(
            path,
            model=state["model"],
            optimizer=state["optimizer"],
            state={},
            files={},
            options=SaveOptions(asynchronous=True),
        )
        snapshot_s = time.perf_counter() - since
        writer.wait()
        ours_s = time.perf_counter() - since
        size = sum(it.stat().st_size for it in path.rglob("*") if it.is_file())
        since = time.perf_counter()
        with (folder / f"{name}.pt").open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            plain_s = time.perf_counter() - since
            os.fsync(file.fileno())
        synchronised_s = time.perf_counter() - since
        if number:  # the first makes plan and memory
            for key, value in zip(
                times, (ours_s, snapshot_s, plain_s, synchronised_s), strict=True
            ):
                times[key].append(value)
    writer.close()
    ratio = size / (folder / f"{name}.pt").stat().st_size
    print(f"\n{name}: {num_mb:,.1f} MB; size of ours {ratio:.3f} of that of torch.save")
    for key, values in times.items():
        median_s = statistics.median(values)
        print(f"{key:10} {median_s * 1e3:8.1f} ms, {num_mb / median_s:8,.0f} MB/s")


def make_state(num_mb: int) -> dict[str, dict[str, Tensor]]:
    """Weights and two moments of a model of this size, in MB (1e6 bytes) together."""
    count = max(num_mb * 1_000_000 // (3 * 4 * 4_000_000), 1)
    model = {f"layer.{number}": torch.randn(2000, 2000) for number in range(count)}
    moments = ("exp_avg", "exp_avg_sq")
    optimizer = {f"{name}/{key}": it.clone() for name, it in model.items() for key in moments}
    return {"model": model, "optimizer": optimizer}


def main() -> None:
    """Both parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--state-mb", type=int, default=0, help="also write a made-up state")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("overrides", nargs="*", default=["+conf=llm/quickstart"])
    arguments = parser.parse_args()
    setup_logging()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        state = train(arguments.overrides, arguments.steps, folder)
        write(state, arguments.rounds, folder, "run")
        if arguments.state_mb:
            write(make_state(arguments.state_mb), arguments.rounds, folder, "made-up")


if __name__ == "__main__":
    main()
