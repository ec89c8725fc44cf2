"""All plans worth a look, which of them fit, and which one to take."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from nemo_like.strategies.planning.cost import Cost, estimate_cost
from nemo_like.strategies.planning.limits import (
    check_megatron_ranks,
    check_megatron_shape,
    find_divisors,
)
from nemo_like.strategies.planning.memory import Memory, estimate
from nemo_like.strategies.planning.plan import Plan, Strategy
from nemo_like.strategies.planning.work import Work

USABLE = 0.9
"""Share of a device's memory that a plan may take: the rest is for contexts, communication libraries and gaps."""
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp", "deepspeed", "megatron")
"""From the simplest to the one with most to decide."""
HOST_RATIO = 3
"""How much memory of the host there is taken to be for each device, in units of the device's."""
_TIE = 1.02  # times that are nearer to each other than the estimate is good


@dataclass(frozen=True)
class Devices:
    """What a run runs on."""

    count: int
    per_node: int
    memory: int
    """Bytes of each."""

    @property
    def usable(self) -> int:
        """Bytes that a plan may take."""
        return int(self.memory * USABLE)

    @property
    def host(self) -> int:
        """Bytes of the host that it may take besides."""
        return self.memory * HOST_RATIO


@dataclass(frozen=True)
class Row:
    """A plan with its figures."""

    plan: Plan
    memory: Memory
    cost: Cost
    fits: bool


@dataclass(frozen=True)
class Choice:
    """The best plan of each family, and the best of all."""

    rows: list[Row]
    """Those that fit, the quickest first; then those that do not, the smallest first."""
    chosen: Row | None
    """None where none fits."""

    @property
    def runner_up(self) -> Row | None:
        """The quickest that was not chosen."""
        return next((it for it in self.rows if it.fits and it is not self.chosen), None)


def choose(
    work: Work, devices: Devices, *, strategies: Collection[Strategy] = STRATEGIES
) -> Choice:
    """Chooses the plan that fits and is estimated to be the quickest.

    Of plans whose times are within 2 % of the best, the simplest strategy is taken; then the one that computes nothing
    again, then the one that cuts the network into the fewest parts, then the largest micro-batch.

    Args:
        work: What a step is.
        devices: What there is.
        strategies: Which ones may be chosen.
    """
    families: dict[object, Row] = {}
    for family in _list_families(work, devices, strategies):
        rows = [row_of(it, work, devices) for it in _list_variants(family, work)]
        if rows:
            fitting = [it for it in rows if it.fits]
            families[family.family] = (
                _take(fitting) if fitting else min(rows, key=lambda it: it.memory.total)
            )
    fitting = sorted((it for it in families.values() if it.fits), key=lambda it: it.cost.total_s)
    others = sorted((it for it in families.values() if not it.fits), key=lambda it: it.memory.total)
    return Choice([*fitting, *others], _take(fitting) if fitting else None)


def fit_micro_batch(plan: Plan, work: Work, devices: Devices) -> Plan:
    """The plan with the largest micro-batch that fits by estimate, of those that ``micro_batch_size=auto`` tries."""
    share = -(-work.global_batch_size // plan.data_parallel)
    for size in list_halves(share):
        plan = replace(plan, micro_batch_size=size)
        if row_of(plan, work, devices).fits:
            break
    return plan


def list_halves(share: int) -> Iterator[int]:
    """A share of samples in one, in two, in four equal parts, ..., down to 1; each size once."""
    size, power = 0, 0
    while size != 1:
        last, size = size, -(-share // 2**power)
        power += 1
        if size != last:
            yield size


def row_of(plan: Plan, work: Work, devices: Devices) -> Row:
    """A plan with its figures."""
    memory = estimate(plan, work)
    cost = estimate_cost(plan, work, devices_per_node=devices.per_node)
    fits = memory.total <= devices.usable and memory.host <= devices.host
    return Row(plan, memory, cost, fits)


def _take(rows: list[Row]) -> Row:
    best = min(it.cost.total_s for it in rows)
    near = [it for it in rows if it.cost.total_s <= best * _TIE]
    return min(near, key=_rank)


def _rank(row: Row) -> tuple[float, ...]:
    plan = row.plan
    return (
        STRATEGIES.index(plan.strategy),
        ("none", "selective", "full").index(plan.activation_checkpointing),
        plan.tensor_parallel * plan.pipeline_parallel * (plan.virtual_pipeline or 1),
        -plan.micro_batch_size,
        row.cost.total_s,
        row.memory.total,
    )


def _list_families(
    work: Work, devices: Devices, strategies: Collection[Strategy]
) -> Iterator[Plan]:
    ranks, on_gpu = devices.count, work.platform == "gpu"
    if "ddp" in strategies:
        yield Plan(strategy="ddp", ranks=ranks)
    if "fsdp" in strategies:
        plan = Plan(strategy="fsdp", ranks=ranks)
        nodes = ranks // devices.per_node if ranks % devices.per_node == 0 else 1
        if ranks > 1:
            for replicate in sorted({1, nodes} - {ranks}):
                yield replace(plan, replicate=replicate)
                yield replace(plan, replicate=replicate, shard="gradients")
        if on_gpu:
            yield replace(plan, cpu_offload=True)
    if "deepspeed" in strategies and work.optimizer != "muon":
        plan = Plan(strategy="deepspeed", ranks=ranks)
        if ranks > 1:
            yield replace(plan, stage=1)
            yield replace(plan, stage=2)
            yield replace(plan, stage=3)
        if on_gpu:
            yield replace(plan, stage=2, offload_optimizer=True)
            yield replace(plan, stage=3, offload_optimizer=True, offload_parameters=True)
    if "megatron" in strategies and work.precision != "fp16-mixed" and ranks > 1:
        yield from _list_megatron(work, devices)


def _list_megatron(work: Work, devices: Devices) -> Iterator[Plan]:
    """Tensor parallelism within a node, any number of stages, with and without interleaving."""
    shape, ranks = work.shape, devices.count
    parts = find_divisors(math.gcd(shape.num_heads, shape.kv_heads, shape.intermediate_size))
    for tensor in [it for it in parts if it <= devices.per_node and ranks % it == 0]:
        for pipeline in [it for it in find_divisors(shape.num_layers) if ranks // tensor % it == 0]:
            for virtual in (None, 2, 4) if pipeline > 1 else (None,):
                plan = Plan(
                    strategy="megatron",
                    ranks=ranks,
                    tensor_parallel=tensor,
                    pipeline_parallel=pipeline,
                    virtual_pipeline=virtual,
                    sequence_parallel=tensor > 1 and work.seq_len % tensor == 0,
                )
                if not any(check_megatron_shape(plan, work)):
                    yield plan


def _list_variants(family: Plan, work: Work) -> Iterator[Plan]:
    """Micro-batches and what is kept of activations."""
    share = -(-work.global_batch_size // family.data_parallel)
    for size in find_divisors(share):
        for mode in ("none", "selective", "full"):
            plan = replace(family, micro_batch_size=size, activation_checkpointing=mode)
            if family.strategy == "megatron" and any(
                check_megatron_ranks(plan, work, family.ranks)
            ):
                continue
            yield plan
