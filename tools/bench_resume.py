"""How long a run takes to its first batch when it resumes late in a large corpus, and what memory it holds.

    python tools/bench_resume.py

Ten million blocks of 128 tokens, a 2.6 GB shard with a million documents, are written as a sparse file. Each line is a
process of its own that opens the shard, seeks a place of the order and reads steps, without the time of its imports.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

from nemo_like.data.order import SampleOrder
from nemo_like.data.packing import BlockReader
from nemo_like.data.sampler import StepDataset, StepSampler, take_as_is
from nemo_like.data.token_shards import HEADER, MAGIC

SEQ_LEN = 128
NUM_BLOCKS = 10_000_000
NUM_DOCUMENTS = 1_000_000
GLOBAL_BATCH_SIZE = 64
NUM_STEPS = 200
LIMIT_S = 2.0


def write_sparse_shard(prefix: Path) -> None:
    """A whole shard whose tokens are zeros that take no room on the disk."""
    length = (NUM_BLOCKS * SEQ_LEN) // NUM_DOCUMENTS
    lengths = np.full(NUM_DOCUMENTS, length, dtype="<i4")
    lengths[-1] += NUM_BLOCKS * SEQ_LEN + 1 - length * NUM_DOCUMENTS
    places = np.concatenate([[0], np.cumsum(lengths[:-1], dtype="<i8")]) * 2
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, NUM_DOCUMENTS, NUM_DOCUMENTS + 1))
        file.write(lengths.tobytes() + places.astype("<i8").tobytes())
        file.write(np.arange(NUM_DOCUMENTS + 1, dtype="<i8").tobytes())
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(2 * (NUM_BLOCKS * SEQ_LEN + 1))


def read_private_mb() -> float:
    """Memory of this process that is no page of a file; those of the shard are the system's to take back."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def measure(prefix: Path, *, share: float, num_workers: int) -> dict[str, float]:
    """Opens the shard at a share of an epoch and reads steps."""
    from nemo_like.data.token_shards import TokenShard

    before_mb = read_private_mb()
    start = time.perf_counter()
    blocks = BlockReader([TokenShard(prefix)], seq_len=SEQ_LEN, prefix_id=0, eos_id=0)
    order = SampleOrder(
        names=["all"], num_blocks=blocks.num_blocks, draws=blocks.num_blocks, seed=0
    )
    sampler = StepSampler(
        order,
        global_batch_size=GLOBAL_BATCH_SIZE,
        micro_batch_size=8,
        position=int(share * order.epoch_size),
        num_steps=NUM_STEPS,
    )
    dataset = StepDataset(functools.partial(BlockReader.read, blocks), blank=take_as_is)
    loader = DataLoader(
        dataset, sampler=sampler, batch_size=None, collate_fn=take_as_is, num_workers=num_workers
    )
    steps = iter(loader)
    next(steps)
    first_s = time.perf_counter() - start
    number = 1 + sum(1 for _ in steps)
    rest_s = time.perf_counter() - start - first_s
    memory_mb = read_private_mb() - before_mb
    return {"first_s": first_s, "step_ms": 1000 * rest_s / (number - 1), "memory_mb": memory_mb}


def main() -> int:
    """Prints a line for each place; fails if the late start takes longer than two seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        prefix, share, num_workers = args.child
        print(json.dumps(measure(Path(prefix), share=float(share), num_workers=int(num_workers))))
        return 0
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "blocks"
        write_sparse_shard(prefix)
        size_gb = Path(f"{prefix}.bin").stat().st_size / 1e9
        print(
            f"{NUM_BLOCKS:,} blocks of {SEQ_LEN} tokens, {size_gb:.2f} GB, batch {GLOBAL_BATCH_SIZE}"
        )
        for num_workers in (0, 2):
            for share in (0.0, 0.5, 0.9):
                command = [
                    sys.executable,
                    __file__,
                    "--child",
                    str(prefix),
                    str(share),
                    str(num_workers),
                ]
                found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                slowest = max(slowest, found["first_s"])
                print(
                    f"{num_workers} workers, at {share:4.0%}: first batch {found['first_s']:.3f} s, "
                    f"then {found['step_ms']:.2f} ms a step, {found['memory_mb']:.0f} MB more memory"
                )
    print(f"slowest start {slowest:.3f} s, allowed {LIMIT_S} s")
    return int(slowest > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
