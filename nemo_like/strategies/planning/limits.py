"""What cannot be run, known before any process starts, each with the nearest values that can.

A line begins with the key that it is about, inside the strategy's part of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from nemo_like.strategies.planning.plan import Plan
from nemo_like.strategies.planning.work import Work, is_muon


def count_ranks(trainer: Any) -> int | None:
    """Processes of a run; None where the devices are still to be found."""
    return None if trainer.devices == "auto" else trainer.devices * trainer.num_nodes


def find_divisors(number: int) -> list[int]:
    """From 1 to the number itself."""
    return [it for it in range(1, number + 1) if number % it == 0]


def name_nearest(value: int, possible: Iterable[int]) -> str:
    """``the nearest possible is 4``, or with two neighbours ``the nearest possible are 2 and 4``."""
    ordered = sorted(set(possible))
    below = [it for it in ordered if it < value][-1:]
    above = [it for it in ordered if it > value][:1]
    near = [str(it) for it in below + above]
    if not near:
        return "nothing else is possible"
    return f"the nearest possible {'is' if len(near) == 1 else 'are'} {' and '.join(near)}"


def check_megatron_shape(plan: Plan, work: Work) -> Iterator[str]:
    """Whether the network can be cut like that."""
    shape, parts = work.shape, plan.tensor_parallel
    counts = {
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate_size,
    }
    bad = [f"{name}={count}" for name, count in counts.items() if count % parts]
    if bad:
        near = name_nearest(parts, find_divisors(math.gcd(*counts.values())))
        yield (
            f"tensor_parallel={parts}: must divide {_join(bad)} of the network, because each rank holds whole heads "
            f"and equally many channels; {near}"
        )
    chunks = plan.pipeline_parallel * (plan.virtual_pipeline or 1)
    if shape.num_layers % chunks:
        key, others = "pipeline_parallel", plan.virtual_pipeline or 1
        value = plan.pipeline_parallel
        if plan.virtual_pipeline and shape.num_layers % value == 0:
            key, others, value = "virtual_pipeline", value, plan.virtual_pipeline
        times = f"times {others}, " if others > 1 else ""
        possible = [it // others for it in find_divisors(shape.num_layers) if it % others == 0]
        yield (
            f"{key}={value}: {times}must divide num_layers={shape.num_layers} of the network; "
            f"{name_nearest(value, possible)}"
        )
    if plan.sequence_parallel and work.seq_len % parts:
        possible = [it * parts for it in (work.seq_len // parts, work.seq_len // parts + 1) if it]
        yield (
            f"sequence_parallel=true: cuts samples into tensor_parallel={parts} equal parts, which data.seq_len="
            f"{work.seq_len} cannot be cut into; {name_nearest(work.seq_len, possible)}"
        )


def check_megatron_ranks(plan: Plan, work: Work | None, ranks: int) -> Iterator[str]:
    """Whether so many ranks can be divided into whole replicas, and a step into micro-batches."""
    replica = plan.tensor_parallel * plan.pipeline_parallel
    if ranks % replica:
        key = "pipeline_parallel" if ranks % plan.tensor_parallel == 0 else "tensor_parallel"
        value = getattr(plan, key)
        other = replica // value
        possible = [it // other for it in find_divisors(ranks) if it % other == 0]
        near = f"{name_nearest(value, possible)}, or take" if possible else "take"
        yield (
            f"{key}={value}: tensor_parallel x pipeline_parallel = {replica} must divide the ranks, and "
            f"trainer.devices x trainer.num_nodes is {ranks}; {near} a multiple of {replica} ranks"
        )
        return
    if work is not None:
        yield from _check_micro_batches(plan, work)


def _check_micro_batches(plan: Plan, work: Work) -> Iterator[str]:
    shares, samples, size = plan.data_parallel, work.global_batch_size, plan.micro_batch_size
    if samples % shares:
        step = [samples // shares * shares, (samples // shares + 1) * shares]
        near = name_nearest(samples, [it for it in step if it])
        yield (
            f"micro_batch_size={size}: data.global_batch_size={samples} cannot be divided over {shares} data-parallel "
            f"shares of the ranks; of global_batch_size {near}"
        )
        return
    share = samples // shares
    if share % size:
        yield (
            f"micro_batch_size={size}: must divide the {share} samples that each of {shares} data-parallel shares has "
            f"in a step (data.global_batch_size={samples}); {name_nearest(size, find_divisors(share))}"
        )
        return
    stages, count = plan.pipeline_parallel, share // size
    if plan.virtual_pipeline and count % stages:
        possible = [it for it in find_divisors(share) if share // it % stages == 0]
        near = (
            f"micro_batch_size: {name_nearest(size, possible)}"
            if possible
            else "leave virtual_pipeline out"
        )
        yield (
            f"virtual_pipeline={plan.virtual_pipeline}: interleaves micro-batches in groups of pipeline_parallel="
            f"{stages}, and a step has {count} on each data-parallel share; {near}"
        )


def check_megatron(plan: Plan, work: Work | None, run: Any) -> Iterator[str]:
    """All of the above, and what Megatron cannot do."""
    if work is not None:
        yield from check_megatron_shape(plan, work)
    ranks = count_ranks(run.trainer)
    if ranks is not None:
        yield from check_megatron_ranks(plan, work, ranks)
    if run.trainer.precision == "fp16-mixed":
        yield (
            "trainer.precision=fp16-mixed: strategy=megatron scales no losses; take trainer.precision=bf16-mixed or "
            "fp32, or strategy=fsdp"
        )


def check_fsdp(plan: Plan, run: Any) -> Iterator[str]:
    """Whether the ranks can be divided into copies."""
    ranks = count_ranks(run.trainer)
    if ranks is not None and ranks % plan.replicate:
        yield (
            f"replicate={plan.replicate}: must divide the ranks, and trainer.devices x trainer.num_nodes is {ranks}; "
            f"{name_nearest(plan.replicate, find_divisors(ranks))}"
        )
    if plan.cpu_offload and run.trainer.accelerator == "cpu":
        yield (
            "cpu_offload=true: has no effect with trainer.accelerator=cpu, where all memory is the host's; "
            "set it to false"
        )


def check_deepspeed(run: Any) -> Iterator[str]:
    """Whether the optimizer can work on flat pieces."""
    if is_muon(run.optim):
        yield (
            "stage: ZeRO cuts parameters into flat pieces, and optim=muon needs whole matrices; "
            "take strategy=fsdp, strategy=megatron, or optim=adamw"
        )


def _join(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
