"""What the agreement among ranks costs an optimizer step: two ranks, with the exchange and without, in turn.

    python tools/bench_agreement.py [--steps 400] [--block 10] [--run toy|quickstart]

``toy`` is a step of about 5 ms, ``quickstart`` the model of ``+conf=llm/quickstart`` on random tokens. Printed are the
medians of a step, the difference between them, and the time that rank zero spends inside ``exchange()``: the first
has the noise of the machine, the second is what the step waits for.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch

from nemo_like.core.agreement import Agreement, Flag
from nemo_like.core.datamodule import DataModule, StepBatch
from nemo_like.strategies import DDPStrategy
from nemo_like.testing.fit import QUIET, FusedAdamW
from nemo_like.testing.toy import ToyDataModule, ToyModel
from nemo_like.testing.world import run_world

WARM_UP = 10


class Clock(pl.Callback):
    """Switches the exchange off and on again every block of steps, and times the steps of both."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.steps: dict[bool, list[float]] = {True: [], False: []}
        self.inside: list[float] = []
        self.since = 0.0

    def on_train_start(self, trainer: pl.Trainer, *_: object) -> None:
        """Puts a stop-watch around the exchange."""
        agreement: Agreement = trainer.strategy.agreement  # type: ignore[attr-defined]
        real = agreement.exchange

        def exchange() -> Flag:
            if not self.is_on(trainer.global_step):
                return Flag(0)
            since = time.perf_counter()
            agreed = real()
            self.inside.append(time.perf_counter() - since)
            return agreed

        agreement.exchange = exchange  # type: ignore[method-assign]

    def is_on(self, step: int) -> bool:
        """Whether this step is one with the exchange; the same on all ranks."""
        return step // self.block % 2 == 0

    def on_train_batch_start(self, *_: object) -> None:
        """Starts."""
        self.since = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Stops."""
        if trainer.global_step > WARM_UP:
            took = time.perf_counter() - self.since
            self.steps[self.is_on(trainer.global_step)].append(took)


class OneBatch(DataModule):
    """The same batch in every step, so that reading data is no part of the figure."""

    def __init__(self, batch: Any) -> None:
        super().__init__(global_batch_size=2)
        self.batch = batch

    def train_dataloader(self) -> Any:
        """Steps without end."""
        return iter(lambda: StepBatch(micro_batches=[self.batch], position=0), None)


def make(name: str) -> tuple[Any, Any]:
    """Model and a micro-batch of it."""
    if name == "toy":
        data = ToyDataModule(num_samples=8, channels=384)
        return ToyModel(channels=384, width=1024), data.make_batch(list(range(8)))
    from nemo_like.collections.llm.data import TextBatch
    from nemo_like.collections.llm.decoder import DecoderModel
    from nemo_like.core.compose import compose

    config = compose("pretrain", ["+conf=llm/quickstart"]).config
    network = config.model["network"]
    # Half of a global batch, which is what one of two ranks computes.
    samples = config.data["global_batch_size"] // 2
    tokens_BT = torch.randint(network.vocab_size, (samples, config.data["seq_len"]))
    return DecoderModel(network=network), TextBatch(tokens_BT, tokens_BT)


def measure(name: str, steps: int, block: int) -> tuple[dict[bool, list[float]], list[float]]:
    """Seconds of each step with and without, and inside of each exchange; on one rank."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, batch = make(name)
    model.optim = FusedAdamW()
    clock = Clock(block)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(micro_batch_size=1),
        max_steps=steps + WARM_UP,
        max_epochs=-1,
        callbacks=[clock],
        **QUIET,
    )
    trainer.fit(model, datamodule=OneBatch(batch))
    return clock.steps, clock.inside[WARM_UP:]


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--block", type=int, default=10, help="steps between on and off")
    parser.add_argument("--run", choices=["toy", "quickstart"], default="toy")
    arguments = parser.parse_args()
    steps, inside = run_world(
        2,
        measure,
        arguments.run,
        arguments.steps,
        arguments.block,
        timeout_s=3600,
        process_group=False,
    )[0]
    with_ms, without_ms = (statistics.median(steps[it]) * 1e3 for it in (True, False))
    cost_ms = statistics.median(inside) * 1e3
    print(f"{arguments.run}: {with_ms:.2f} ms a step with the exchange, {without_ms:.2f} without")
    print(f"ratio {with_ms / without_ms:.4f}, difference {with_ms - without_ms:+.3f} ms")
    print(f"inside exchange(): {cost_ms:.3f} ms, {100 * cost_ms / with_ms:.2f} % of a step")


if __name__ == "__main__":
    main()
