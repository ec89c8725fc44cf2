from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from nemo_like.core.datamodule import StepBatch
from nemo_like.data.order import SampleOrder
from nemo_like.data.sampler import (
    EvalDataset,
    EvalSampler,
    StepDataset,
    StepPlan,
    StepSampler,
    take_as_is,
)

EPOCH = 61
ORDER = SampleOrder(names=["a", "b"], num_blocks=[40, 21], draws=[40, 21], seed=4)


def make_sampler(**changes: Any) -> StepSampler:
    settings = {"global_batch_size": 8, "micro_batch_size": 3, "num_steps": 20} | changes
    return StepSampler(ORDER, **settings)


def real_ids(plan: StepPlan) -> list[int]:
    num_real = len(plan.micro_batches) - plan.num_blank
    return [sample for ids in plan.micro_batches[:num_real] for sample in ids]


def flatten(lists: Iterable[list[int]]) -> list[int]:
    return [item for part in lists for item in part]


def read_steps(size: int, **changes: Any) -> list[list[int]]:
    """Ids of each global batch, rank by rank."""
    per_rank = [list(make_sampler(rank=rank, size=size, **changes)) for rank in range(size)]
    for plans in zip(*per_rank, strict=True):
        assert len({plan.position for plan in plans}) == 1
        assert len({len(plan.micro_batches) for plan in plans}) == 1
    return [flatten(map(real_ids, plans)) for plans in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("size", [2, 3, 5, 16])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 100])
def test_global_batches_do_not_hang_on_the_number_of_ranks(
    size: int, micro_batch_size: int
) -> None:
    alone = read_steps(1)
    assert read_steps(size, micro_batch_size=micro_batch_size) == alone


def test_each_sample_comes_once_an_epoch_and_the_last_batch_is_short() -> None:
    steps = read_steps(1)
    assert [len(step) for step in steps[:9]] == [8] * 7 + [5, 8]
    for epoch in (steps[:8], steps[8:16]):
        assert sorted(flatten(epoch)) == list(range(EPOCH))


def test_positions_count_samples_over_epochs() -> None:
    positions = [plan.position for plan in make_sampler()]
    assert positions[:9] == [8, 16, 24, 32, 40, 48, 56, 61, 69]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("step", range(20))
def test_a_resumed_run_reads_the_tail_of_the_uninterrupted_one(step: int, size: int) -> None:
    plans = list(make_sampler())
    position = plans[step - 1].position if step else 0
    tail = read_steps(size, position=position, num_steps=20 - step)
    assert tail == read_steps(1)[step:]


def test_another_batch_size_goes_on_at_the_same_sample() -> None:
    before = read_steps(1, num_steps=3)  # 24 samples
    after = read_steps(2, position=24, global_batch_size=10, num_steps=5)
    assert [len(step) for step in after] == [10, 10, 10, 7, 10]
    assert sorted(flatten(before + after[:4])) == list(range(EPOCH))


def test_a_batch_larger_than_an_epoch_ends_with_it() -> None:
    steps = read_steps(3, global_batch_size=100, num_steps=2)
    assert [sorted(step) for step in steps] == [list(range(EPOCH))] * 2


def test_ranks_share_evenly_and_keep_in_step_with_blanks() -> None:
    plans = [
        next(iter(make_sampler(rank=rank, size=3, global_batch_size=7, micro_batch_size=2)))
        for rank in range(3)
    ]
    assert [[len(ids) for ids in plan.micro_batches] for plan in plans] == [[2, 1], [2, 1], [2, 1]]
    assert [plan.num_blank for plan in plans] == [1, 1, 0]


def test_a_rank_without_samples_computes_a_blank() -> None:
    first, second = (
        next(iter(make_sampler(rank=rank, size=2, global_batch_size=1))) for rank in range(2)
    )
    assert (first.num_blank, second.num_blank) == (1, 0)
    assert first.micro_batches == second.micro_batches


def test_the_length_is_that_of_the_whole_run() -> None:
    assert len(make_sampler(num_steps=5, total_steps=20)) == 20
    assert len(make_sampler(num_steps=5)) == 5


def test_long_runs_look_further_ahead_without_a_seam() -> None:
    order = SampleOrder(names=["a"], num_blocks=[30_000], draws=[30_000], seed=0)
    sampler = StepSampler(order, global_batch_size=7, micro_batch_size=7, num_steps=4286)
    read = [sample for plan in sampler for sample in real_ids(plan)]
    assert read == order.sample_ids(0, 30_000).tolist()


def test_a_step_holds_what_its_plan_names() -> None:
    dataset = StepDataset(lambda ids: [10 * sample for sample in ids], blank=lambda batch: None)
    step = dataset[StepPlan([[1, 2], [3], [1]], num_blank=1, position=44)]
    assert step.micro_batches == [[10, 20], [30], None]
    assert step.sample_ids == [1, 2, 3]
    assert step.position == 44


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0: must be at least 1"),
        ({"micro_batch_size": -1}, "micro_batch_size=-1: must be at least 1"),
        ({"rank": 2, "size": 2}, "rank=2: must lie between 0 and size - 1 = 1"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_sampler(**changes)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_evaluation_batches_do_not_hang_on_the_number_of_ranks(size: int) -> None:
    samples = list(range(100, 117))
    samplers = [EvalSampler(samples, batch_size=4, rank=rank, size=size) for rank in range(size)]
    plans = [list(sampler) for sampler in samplers]
    assert {len(rank) for rank in plans} == {len(samplers[0])} == {-(-5 // size)}
    real = [
        plan.sample_ids for turn in zip(*plans, strict=True) for plan in turn if not plan.is_blank
    ]
    assert real == [samples[first : first + 4] for first in range(0, 17, 4)]


def test_a_blank_evaluation_batch_is_blanked() -> None:
    dataset = EvalDataset(lambda ids: ids, blank=lambda batch: ["blank", *batch])
    plans = list(EvalSampler([1, 2, 3], batch_size=2, rank=2, size=3))
    assert [dataset[plan] for plan in plans] == [["blank", 1]]


def _read_and_draw(ids: list[int]) -> list[float]:
    return [len(ids), random.random(), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_reader_draws_depends_on_position_and_rank_alone(num_workers: int) -> None:
    def draw(*, position: int, rank: int, num_workers: int) -> list[StepBatch]:
        sampler = StepSampler(
            ORDER, global_batch_size=8, micro_batch_size=2, rank=rank, size=2,
            position=position, num_steps=3,
        )  # fmt: skip
        dataset = StepDataset(_read_and_draw, blank=lambda batch: batch, seed=5, rank=rank)
        return list(
            DataLoader(
                dataset, sampler=sampler, batch_size=None, collate_fn=take_as_is,
                num_workers=num_workers,
            )
        )  # fmt: skip

    whole = draw(position=0, rank=0, num_workers=0)
    torch.manual_seed(1)
    (rest,) = [draw(position=16, rank=0, num_workers=num_workers)[:1]]
    assert rest[0] == whole[2]
    assert whole[1] != whole[2]
    assert draw(position=0, rank=1, num_workers=0)[0].micro_batches != whole[0].micro_batches
