"""What of weights, gradients and optimizer state lies on a device, for each strategy."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.strategies.planning.plan import Plan
from nemo_like.strategies.planning.weights import (
    FP32,
    Weights,
    count_stage,
    count_states,
    count_step_bytes,
)
from nemo_like.strategies.planning.work import Work

# Of DeepSpeed: elements reduced at once (as strategies/deepspeed sets it), and of gathered weights that it keeps.
_BUCKET = 50_000_000
_LIVE = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Bytes on one device that do not depend on the number of tokens."""

    weights: Weights
    """What the device computes with, counted whole."""
    blocks_in_flight: int
    """Blocks whose activations are kept at once, counted for each micro-batch."""
    parameters: int
    """Weights between two steps."""
    optimizer: int
    """State, and copies of weights that the optimizer alone uses."""
    before: int
    """Gradients that exist before the last backward pass begins: those of earlier micro-batches, or buffers."""
    gradients: int
    """Gradients at its end."""
    at_step_gradients: int
    """Gradients while the optimizer steps."""
    head_gradient: int
    """The output matrix's gradient when the loss has just made it."""
    embedding_gradient: int
    """The embedding's gradient before it is added or sent away."""
    gathered_at_loss: int = 0
    """Whole weights of a sharded model when the loss is computed."""
    gathered: int = 0
    """Whole weights and gradients of a sharded model when the backward pass begins, and communication buffers."""
    gathered_at_end: int = 0
    """The same when it ends."""
    ends_at_end: int = 0
    """Whole weights and gradients outside of the blocks when those are sent away, after the last block."""
    at_step: int = 0
    """What exists only while the optimizer steps."""
    host: int = 0
    """On the host, for each device."""
    has_loss: bool = True
    """Whether the device computes the loss."""


def spread_weights(plan: Plan, work: Work, stage: int = 0) -> Spread:
    """What lies on a device of a pipeline stage (0 where there is no pipeline)."""
    spread = {"ddp": _ddp, "fsdp": _fsdp, "deepspeed": _deepspeed}.get(plan.strategy)
    if spread is None:
        return _megatron(plan, work, stage)
    return spread(plan, work, count_stage(work, stage=0, stages=1, tensor_parallel=1))


def _accumulates(plan: Plan, work: Work) -> bool:
    return plan.count_micro_batches(work.global_batch_size) > 1


def _ddp(plan: Plan, work: Work, weights: Weights) -> Spread:
    gradients = FP32 * weights.total
    # With several ranks gradients live in buckets, which stay. Earlier micro-batches add theirs up beside them.
    accumulates = _accumulates(plan, work)
    copies = (plan.ranks > 1) + accumulates
    return Spread(
        weights=weights,
        blocks_in_flight=weights.layers,
        parameters=FP32 * weights.total,
        optimizer=FP32 * count_states(work, weights),
        before=copies * gradients,
        gradients=max(1, copies) * gradients,
        at_step_gradients=gradients,
        head_gradient=FP32 * (weights.head or weights.embedding),
        embedding_gradient=FP32 * weights.embedding,
        at_step=count_step_bytes(work),
    )


def _fsdp(plan: Plan, work: Work, weights: Weights) -> Spread:
    shards = plan.ranks // plan.replicate
    e = work.compute_bytes
    shard = FP32 * -(-weights.total // shards)
    states = FP32 * count_states(work, weights) // shards
    # The outermost group (embedding, final norm, head) stays whole. A block is whole twice while it arrives, as it was
    # sent and as it is used, and so is its gradient when it leaves; `gradients` keeps all blocks till then.
    at_end = e * (weights.ends + 2 * weights.layer) + FP32 * weights.layer
    blocks = weights.layers if plan.shard == "gradients" else 2
    gathered = e * (weights.ends + (blocks + 1) * weights.layer) + FP32 * weights.layer
    # Gradients of earlier micro-batches.
    kept = FP32 * weights.total if plan.accumulate == "whole" else shard
    accumulated = kept if _accumulates(plan, work) else 0
    device = 0 if plan.cpu_offload else 1
    return Spread(
        weights=weights,
        blocks_in_flight=weights.layers,
        parameters=device * shard,
        optimizer=device * states,
        before=accumulated,
        gradients=max(accumulated, device * shard),
        at_step_gradients=device * shard,
        head_gradient=e * (weights.head or weights.embedding),
        embedding_gradient=e * weights.embedding,
        gathered_at_loss=e * (weights.ends + (blocks - 1) * weights.layer),
        gathered=gathered,
        gathered_at_end=at_end,
        ends_at_end=(2 * e + FP32) * weights.ends - device * FP32 * weights.ends // shards,
        at_step=device * count_step_bytes(work),
        host=2 * shard + states if plan.cpu_offload else 0,
    )


def _deepspeed(plan: Plan, work: Work, weights: Weights) -> Spread:
    share = FP32 * -(-weights.total // plan.ranks)
    whole = FP32 * weights.total
    bucket = FP32 * min(_BUCKET, weights.total)
    is_cut = plan.stage == 3
    # The optimizer steps on flat fp32 copies of its share, whatever type the weights have.
    optimizer = share + FP32 * count_states(work, weights) // plan.ranks
    parameters = share if is_cut else whole
    gradients = whole if plan.stage == 1 else share
    accumulated = share if _accumulates(plan, work) else 0
    gathered, at_end = 0, bucket  # stage 1 reduces in the bucket, 2 in a copy of it, 3 in another
    if plan.stage == 2:
        at_end = 2 * bucket
    if is_cut:
        gathered = bucket + FP32 * min(_LIVE, weights.total)
        at_end = 3 * bucket + FP32 * weights.ends
        accumulated = share  # one flat buffer, which stays
    if plan.stage == 1:
        gradients += accumulated
    host = 0
    if plan.offload_optimizer:
        host, optimizer = optimizer + share, 0
        accumulated, gradients = 0, whole if plan.stage == 1 else 0
    if plan.offload_parameters:
        host, parameters = host + parameters, 0
    return Spread(
        weights=weights,
        blocks_in_flight=weights.layers,
        parameters=parameters,
        optimizer=optimizer,
        before=accumulated,
        gradients=gradients if plan.stage != 2 else accumulated,
        at_step_gradients=share if not plan.offload_optimizer else 0,
        head_gradient=FP32 * (weights.head or weights.embedding),
        embedding_gradient=FP32 * weights.embedding if plan.stage == 1 else 0,
        gathered_at_loss=gathered,
        gathered=gathered,
        gathered_at_end=at_end,
        host=host,
    )


def _megatron(plan: Plan, work: Work, stage: int) -> Spread:
    stages, shape = plan.pipeline_parallel, work.shape
    weights = count_stage(work, stage=stage, stages=stages, tensor_parallel=plan.tensor_parallel)
    own = FP32 * weights.total  # gradients lie in one buffer, which stays
    shards = plan.data_parallel if plan.shard_optimizer else 1
    # Of what Megatron-Core keeps in one interleaved matrix, the optimizer has a copy, and one of its gradient.
    copied = 0
    if shape.kv_heads > plan.tensor_parallel:
        heads = (shape.num_heads + 2 * shape.kv_heads) // plan.tensor_parallel
        copied = FP32 * weights.layers * shape.hidden_size * heads * shape.head_size // shards
    return Spread(
        weights=weights,
        blocks_in_flight=_count_in_flight(plan, work, weights.layers, stage),
        parameters=own,
        optimizer=FP32 * count_states(work, weights) // shards + copied,
        before=own + copied,
        gradients=own + copied,
        at_step_gradients=own + copied,
        head_gradient=FP32 * (weights.head or weights.embedding),
        embedding_gradient=FP32 * weights.embedding,
        has_loss=stage == stages - 1,
        at_step=count_step_bytes(work),
    )


def _count_in_flight(plan: Plan, work: Work, layers: int, stage: int) -> int:
    """Blocks times micro-batches that a stage has begun and not finished.

    With 1F1B as many micro-batches as there are stages from it on; interleaved, chunks are begun in the order of
    Narayanan et al. 2021 (arXiv:2104.04473, section 2.2), which holds more of them.
    """
    stages, chunks = plan.pipeline_parallel, plan.virtual_pipeline or 1
    begun = stages - stage
    if chunks > 1:
        begun = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    return min(begun, chunks * plan.count_micro_batches(work.global_batch_size)) * layers // chunks
