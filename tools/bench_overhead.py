"""What the framework itself costs an optimizer step: a 2 ms toy model, ours with everything on against a bare loop.

    python tools/bench_overhead.py [--steps 250] [--rounds 12]

Ours: Lightning's Trainer with our strategy, exact resume seeding, clipping, metrics to JSON lines and TensorBoard every
ten steps, progress bar, checkpoint callback. The bare loop does the same arithmetic and nothing else. Both take
the same batches in turn; printed are medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch

from nemo_like.callbacks import (
    Checkpointing,
    LossSpikes,
    MetricsWriter,
    NonfiniteGuard,
    ProgressBar,
)
from nemo_like.core.console import setup_logging
from nemo_like.strategies import DDPStrategy
from nemo_like.testing.fit import FusedAdamW
from nemo_like.testing.toy import ToyDataModule, ToyModel
from nemo_like.tracking.logger import JsonlLogger
from nemo_like.tracking.tensorboard import TensorBoardLogger

# A step takes about 2 ms on one core.
CHANNELS, WIDTH = 384, 512


class Clock(pl.Callback):
    """Times the steps after a warm-up."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.since, self.total_s = warm_up, 0.0, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Starts after the warm-up, stops after the last step."""
        if trainer.global_step == self.warm_up:
            self.since = time.perf_counter()
        elif trainer.global_step == trainer.max_steps:
            self.total_s = time.perf_counter() - self.since


class OneBatch(ToyDataModule):
    """The same batch in every step, so that reading data is no part of the figure."""

    def make_batch(self, ids: list[int]) -> object:  # type: ignore[override]
        """Gives the batch made first."""
        if not hasattr(self, "_batch"):
            self._batch = super().make_batch(list(range(8)))
        return self._batch


def time_ours(steps: int, warm_up: int) -> float:
    """Milliseconds a step under the framework."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data, clock = (
            ToyModel(channels=CHANNELS, width=WIDTH),
            OneBatch(num_samples=8, channels=CHANNELS),
            Clock(warm_up),
        )
        model.optim, model.seed, model.schedule = FusedAdamW(), 3, lambda step: 1 / (1 + step)
        model.gradient_clip_norm = 1.0
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=DDPStrategy(micro_batch_size=8),
            max_steps=steps + warm_up,
            max_epochs=-1,
            log_every_n_steps=10,
            callbacks=[
                MetricsWriter(),
                ProgressBar(),
                LossSpikes(),
                NonfiniteGuard(),
                Checkpointing(folder=folder / "checkpoints"),
                clock,
            ],
            logger=[JsonlLogger(folder=folder), TensorBoardLogger(folder=folder)],
            default_root_dir=folder,
            check_val_every_n_epoch=None,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, datamodule=data)
    return clock.total_s / steps * 1e3


def time_bare(steps: int, warm_up: int) -> float:
    """Milliseconds a step in a loop of ten lines."""
    model = ToyModel(channels=CHANNELS, width=WIDTH)
    batch = ToyDataModule(num_samples=8, channels=CHANNELS).make_batch(list(range(8)))
    optimizer = FusedAdamW().build(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(steps + warm_up):
        if step == warm_up:
            since = time.perf_counter()
        optimizer.zero_grad()
        loss = model.compute_loss_sum(batch) / model.count_targets(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return (time.perf_counter() - since) / steps * 1e3


def main() -> None:
    """Runs both in turn and prints medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--warm-up", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    setup_logging()
    warnings.simplefilter("ignore")
    ours, bare = [], []
    for _ in range(arguments.rounds):
        ours.append(time_ours(arguments.steps, arguments.warm_up))
        bare.append(time_bare(arguments.steps, arguments.warm_up))
    # The smallest is what the work takes; the median also has what else the machine did.
    for name, times in (("ours", ours), ("bare", bare)):
        print(f"{name}  {statistics.median(times):.2f} ms a step, smallest {min(times):.2f}")
    difference = statistics.median(a - b for a, b in zip(ours, bare, strict=True))
    print(
        f"framework: {difference:.2f} ms a step, between the smallest {min(ours) - min(bare):.2f}"
    )


if __name__ == "__main__":
    main()
