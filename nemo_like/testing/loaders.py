"""What a data module hands out, without a trainer: every rank's steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeVar

from nemo_like.core.datamodule import DataModule, StepBatch

Data = TypeVar("Data", bound=DataModule)


def attach(
    data: Data,
    *,
    rank: int = 0,
    size: int = 1,
    micro: int = 2,
    max_steps: int = 12,
    **trainer: Any,
) -> Data:
    """Gives a data module what it asks of its trainer.

    Args:
        data: Set up.
        rank: Which share of each global batch it reads.
        size: How many shares there are.
        micro: Samples computed at once.
        max_steps: Of the run.
        trainer: Further attributes: ``global_step``, ``limit_val_batches``.
    """
    strategy = SimpleNamespace(
        data_parallel_rank=rank, data_parallel_size=size, micro_batch_size=micro
    )
    settings = {"max_steps": max_steps, "global_step": 0, "limit_val_batches": 1.0} | trainer
    data.trainer = SimpleNamespace(strategy=strategy, **settings)  # type: ignore[assignment]
    return data


def read_steps(
    make: Callable[[], DataModule], *, size: int = 1, position: int = 0, done: int = 0, micro: int
) -> list[list[StepBatch]]:
    """Every rank's steps, step by step.

    Args:
        make: Gives the data module of a rank, set up.
        size: Ranks.
        position: Samples that were consumed before.
        done: Steps that were done before.
        micro: Samples computed at once.
    """
    ranks = []
    for rank in range(size):
        data = attach(make(), rank=rank, size=size, global_step=done, micro=micro)
        data.load_state_dict({"position": position})
        ranks.append(list(data.train_dataloader()))
    return [list(steps) for steps in zip(*ranks, strict=True)]


def list_ids(steps: list[list[StepBatch]]) -> list[list[int]]:
    """The samples of each step, over all ranks."""
    return [list(chain.from_iterable(rank.sample_ids for rank in step)) for step in steps]
