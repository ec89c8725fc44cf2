"""Time a step and peak memory a rank of every plan on this machine, next to the single process.

    python tools/bench_strategies.py [--steps 12] [--rounds 3] [--plans ddp2 fsdp2 ...]

Each rank has one thread; with more ranks than cores the times say how much a plan costs, not how fast it is on the
hardware it is made for. Memory is what the process holds at most while it trains, above what it held after its imports.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

import nemo_like.strategies
from nemo_like.collections.llm.testing import rehearse
from nemo_like.optim import AdamW
from nemo_like.testing.world import run_world

# Ranks, strategy, options.
PLANS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "single": (1, "DDPStrategy", {}),
    "single, selective": (1, "DDPStrategy", {"activation_checkpointing": "selective"}),
    "single, full": (1, "DDPStrategy", {"activation_checkpointing": "full"}),
    "DDP 2": (2, "DDPStrategy", {}),
    "FSDP 2": (2, "FSDPStrategy", {}),
    "FSDP 2, gradients": (2, "FSDPStrategy", {"shard": "gradients"}),
    "FSDP 4": (4, "FSDPStrategy", {}),
    "FSDP 2 x 2": (4, "FSDPStrategy", {"replicate": 2}),
    "ZeRO-1 2": (2, "DeepSpeedStrategy", {"stage": 1}),
    "ZeRO-2 2": (2, "DeepSpeedStrategy", {"stage": 2}),
    "ZeRO-3 2": (2, "DeepSpeedStrategy", {"stage": 3}),
    "TP 2": (2, "MegatronStrategy", {"tensor_parallel": 2}),
    "TP 2, sequence": (2, "MegatronStrategy", {"tensor_parallel": 2, "sequence_parallel": True}),
    "PP 2": (2, "MegatronStrategy", {"pipeline_parallel": 2}),
    "PP 2, interleaved": (2, "MegatronStrategy", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "TP 2 x PP 2": (4, "MegatronStrategy", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "TP 2 x DP 2": (4, "MegatronStrategy", {"tensor_parallel": 2}),
}
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 704,
    "max_positions": 256,
}
"""8.4 million parameters; a step is 8 samples of 256 tokens."""


class Clock(pl.Callback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Notes it."""
        self.ends.append(time.perf_counter())


def run_plan(name: str, steps: int) -> dict[str, float]:
    """Trains a plan on this rank: median seconds a step, and peak memory in MiB."""
    logging.disable(logging.WARNING)
    ranks, strategy, options = PLANS[name]
    plan = getattr(nemo_like.strategies, strategy)(**{"micro_batch_size": 2, **options})
    before = _read_status("VmRSS")
    # Sets the high-water mark of resident memory to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    clock = Clock()
    run = rehearse(
        plan,
        devices=ranks,
        steps=steps,
        network=SHAPE,
        optim=AdamW(lr=1e-3),
        packed=False,
        num_samples=64,
        callbacks=[clock],
        limit_val_batches=0,
    )
    took = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)]
    return {
        "step_s": statistics.median(took[1:]),
        "peak_mib": (_read_status("VmHWM") - before) / 1024,
        "loss": run["steps"][-1]["train/loss"],
    }


def _read_status(key: str) -> int:
    """A figure of this process in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}")


def main() -> None:
    """Runs the plans in turn, in rounds, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.plans}
    for _ in range(arguments.rounds):
        for name in arguments.plans:
            ranks = run_world(PLANS[name][0], run_plan, name, arguments.steps, timeout_s=600)
            found[name].append(
                {key: max(rank[key] for rank in ranks) for key in ("step_s", "peak_mib", "loss")}
            )
    print("| plan | ranks | s a step | x the first | peak MiB a rank | loss |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    first = statistics.median(run["step_s"] for run in found[arguments.plans[0]])
    for name, runs in found.items():
        step_s, peak, loss = (
            statistics.median(run[key] for run in runs) for key in ("step_s", "peak_mib", "loss")
        )
        print(
            f"| {name} | {PLANS[name][0]} | {step_s:.2f} | {step_s / first:.2f} | {peak:.0f} | {loss:.4f} |"
        )


if __name__ == "__main__":
    main()
