"""From positions to optimizer steps: which samples a rank computes, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.utils.data import Dataset, Sampler

from nemo_like.core.datamodule import StepBatch
from nemo_like.core.seed import derive_seed, seed_step
from nemo_like.data.order import SampleOrder

Batch = TypeVar("Batch")
_READING = 1  # what the seed is derived for
_LOOK_AHEAD = 8192  # positions whose samples are computed at once


@dataclass(slots=True)
class StepPlan:
    """What one rank reads for one optimizer step."""

    micro_batches: list[list[int]]
    """Sample ids."""
    num_blank: int
    """Micro-batches at the end that only keep the ranks in step; their samples do not count."""
    position: int
    """Samples consumed once the step is done, over all ranks."""


class StepSampler(Sampler[StepPlan]):
    """Yields the plan of every optimizer step of a run, from a position on.

    A global batch is a stretch of the order that ends with its epoch, so the last one of an epoch
    may be short. Each rank takes a contiguous share of it, one sample more or less, and every rank
    gets equally many micro-batches.

    Args:
        order: Position to sample.
        global_batch_size: Samples a step over all ranks.
        micro_batch_size: Samples computed at once.
        rank: This rank, 0 to ``size - 1``, among those that read different samples.
        size: How many ranks read different samples.
        position: Samples that were consumed before.
        num_steps: Steps to yield.
        total_steps: Steps of the whole run, those before ``position`` included; the length that
            Lightning sees.
    """

    def __init__(
        self,
        order: SampleOrder,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        size: int = 1,
        position: int = 0,
        num_steps: int,
        total_steps: int | None = None,
    ) -> None:
        for name, value in (
            ("global_batch_size", global_batch_size),
            ("micro_batch_size", micro_batch_size),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank}: must lie between 0 and size - 1 = {size - 1}")
        self.order = order
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.rank, self.size = rank, size
        self.position = position
        self.num_steps = num_steps
        self.total_steps = num_steps if total_steps is None else total_steps

    def __len__(self) -> int:
        return self.total_steps

    def __iter__(self) -> Iterator[StepPlan]:
        start = self.position
        known: list[int] = []
        known_from = start
        for _ in range(self.num_steps):
            epoch_end = (start // self.order.epoch_size + 1) * self.order.epoch_size
            stop = min(start + self.global_batch_size, epoch_end)
            if stop > known_from + len(known):
                known = self.order.sample_ids(
                    start, start + max(_LOOK_AHEAD, self.global_batch_size)
                ).tolist()
                known_from = start
            yield self._plan(known[start - known_from : stop - known_from], stop)
            start = stop

    def _plan(self, global_batch: list[int], stop: int) -> StepPlan:
        number, micro = len(global_batch), self.micro_batch_size
        mine = global_batch[self.rank * number // self.size : (self.rank + 1) * number // self.size]
        micro_batches = [mine[first : first + micro] for first in range(0, len(mine), micro)]
        largest_share = -(-number // self.size)
        num_blank = -(-largest_share // micro) - len(micro_batches)
        # One sample is enough to keep in step, and any will do.
        micro_batches += [global_batch[:1]] * num_blank
        return StepPlan(micro_batches, num_blank, stop)


class StepDataset(Dataset[StepBatch], Generic[Batch]):
    """Reads what a plan names.

    What ``read`` draws from the generators of Python, NumPy and torch is a function of (seed, position, rank): the same
    in any number of workers, and after a restart.

    Args:
        read: Sample ids to a batch.
        blank: A batch to the same without a single target.
        seed: Of the run; None leaves the generators alone.
        rank: This rank among those that read different samples.
    """

    def __init__(
        self,
        read: Callable[[list[int]], Batch],
        *,
        blank: Callable[[Batch], Batch],
        seed: int | None = None,
        rank: int = 0,
    ) -> None:
        self.read, self.blank = read, blank
        # Not the seed of the training step at that number, which would draw the same.
        self.seed = None if seed is None else derive_seed(seed, _READING)
        self.rank = rank

    def __getitem__(self, plan: StepPlan) -> StepBatch:
        if self.seed is not None:
            seed_step(self.seed, plan.position, self.rank)
        num_real = len(plan.micro_batches) - plan.num_blank
        batches = [self.read(ids) for ids in plan.micro_batches]
        batches[num_real:] = [self.blank(batch) for batch in batches[num_real:]]
        sample_ids = [sample for ids in plan.micro_batches[:num_real] for sample in ids]
        return StepBatch(micro_batches=batches, position=plan.position, sample_ids=sample_ids)


@dataclass(slots=True)
class EvalPlan:
    """What one rank reads for one evaluation batch."""

    sample_ids: list[int]
    is_blank: bool


class EvalSampler(Sampler[EvalPlan]):
    """Cuts samples into batches whose composition does not hang on the number of ranks.

    Batch i goes to rank i modulo ``size``. Ranks that would have one batch less get a blank one, so
    all ranks have equally many.

    Args:
        sample_ids: All samples, each evaluated once.
        batch_size: Samples a batch; the last may be short.
        rank: This rank, 0 to ``size - 1``.
        size: How many ranks share the work.
    """

    def __init__(
        self, sample_ids: list[int], *, batch_size: int, rank: int = 0, size: int = 1
    ) -> None:
        self.sample_ids, self.batch_size, self.rank, self.size = sample_ids, batch_size, rank, size

    def __len__(self) -> int:
        num_batches = -(-len(self.sample_ids) // self.batch_size)
        return -(-num_batches // self.size)

    def __iter__(self) -> Iterator[EvalPlan]:
        for turn in range(len(self)):
            first = (turn * self.size + self.rank) * self.batch_size
            ids = self.sample_ids[first : first + self.batch_size]
            yield EvalPlan(ids or self.sample_ids[:1], is_blank=not ids)


class EvalDataset(Dataset[Batch]):
    """Reads what an :class:`EvalPlan` names; the arguments are those of :class:`StepDataset`."""

    def __init__(
        self, read: Callable[[list[int]], Batch], *, blank: Callable[[Batch], Batch]
    ) -> None:
        self.read, self.blank = read, blank

    def __getitem__(self, plan: EvalPlan) -> Batch:
        batch = self.read(plan.sample_ids)
        return self.blank(batch) if plan.is_blank else batch


def find_position(step: int, *, epoch_size: int, global_batch_size: int) -> int:
    """How many samples a run has consumed after a number of steps that it began with none."""
    epochs, steps = divmod(step, -(-epoch_size // global_batch_size))
    return epochs * epoch_size + steps * global_batch_size


def take_as_is(item: Any) -> Any:
    """The collate function of loaders whose dataset makes whole batches."""
    return item
