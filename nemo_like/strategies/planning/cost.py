"""Time of a step beyond what the arithmetic needs, as far as a plan decides it.

The figures of a device below are those of a current GPU in a cluster (an H100 with NVLink inside a node and 400 Gb/s
between nodes), and of a process on a CPU. Only their ratios matter: they decide which plan is quicker, they do not say
how quick it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.strategies.planning.activation import count_layer
from nemo_like.strategies.planning.plan import Plan
from nemo_like.strategies.planning.weights import FP32, count_stage, count_weights
from nemo_like.strategies.planning.work import Work


@dataclass(frozen=True)
class Speed:
    """What a device does in a second."""

    flops: float
    """Multiplications and additions of matrix products in 16 bits; half of them in 32."""
    node: float
    """Bytes that it sends to devices of its node."""
    network: float
    """Bytes that it sends to other nodes."""
    host: float
    """Bytes between its memory and the host's."""
    small: int
    """Tokens of a micro-batch at which half of the time goes into starting kernels and filling them."""


SPEEDS = {
    "gpu": Speed(flops=4e14, node=3e11, network=4e10, host=2e10, small=512),
    "cpu": Speed(flops=1e11, node=2e9, network=1e9, host=1e10, small=32),
}
_SELECTIVE = 0.03  # share of the arithmetic that is computed again where products are kept


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a step on each device, and what it sends."""

    compute_s: float
    """Arithmetic, at the speed of large matrices."""
    small_s: float
    """Lost on small micro-batches and on samples that are only there to fill up."""
    recompute_s: float
    """Activations computed again."""
    wait_s: float
    """The ends of the pipeline, where a stage has nothing to do."""
    communication_s: float
    """Communication that nothing hides."""
    sent_bytes: int
    """By one device in a step."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.overhead_s

    @property
    def overhead_s(self) -> float:
        """What is not arithmetic of the step itself."""
        return self.small_s + self.recompute_s + self.wait_s + self.communication_s

    @property
    def ratio(self) -> float:
        """Time of a step, in units of its arithmetic."""
        return self.total_s / self.compute_s


def estimate_cost(plan: Plan, work: Work, *, devices_per_node: int) -> Cost:
    """Estimates time and communication of a step."""
    speed, shape = SPEEDS[work.platform], work.shape
    flops = speed.flops / (2 if work.compute_bytes == FP32 else 1)
    weights = count_weights(work)
    multiplied = weights.layers * weights.matrices + shape.vocab_size * shape.hidden_size
    attention = shape.num_layers * shape.num_heads * shape.head_size * work.seq_len
    per_token = 6 * (multiplied + attention)  # causal: half of the weights of attention
    ideal = per_token * work.global_batch_size * work.seq_len / plan.ranks / flops
    count = plan.count_micro_batches(work.global_batch_size)
    tokens = plan.micro_batch_size * work.seq_len
    compute = per_token * count * tokens * plan.data_parallel / plan.ranks / flops
    compute *= 1 + speed.small / tokens
    again = {"none": 0.0, "selective": _SELECTIVE, "full": 1 / 3}[plan.activation_checkpointing]
    stages, chunks = plan.pipeline_parallel, plan.virtual_pipeline or 1
    wait = compute * (1 + again) * (stages - 1) / (chunks * count)
    transfers = _list_transfers(plan, work, count, devices_per_node)
    exposed = 0.0
    for transfer in transfers:
        seconds = transfer.sent / (speed.node if transfer.in_node else speed.network)
        exposed += max(0.0, seconds - transfer.hidden_by * compute)
    exposed += _move_to_host(plan, work, compute, count) / speed.host
    return Cost(
        compute_s=ideal,
        small_s=compute - ideal,
        recompute_s=compute * again,
        wait_s=wait,
        communication_s=exposed,
        sent_bytes=round(sum(it.sent for it in transfers)),
    )


@dataclass(frozen=True)
class _Transfer:
    """Bytes that a device sends in a step, whether they stay in the node, and the share of the step that hides them."""

    sent: float
    in_node: bool
    hidden_by: float = 0.0


def _list_transfers(plan: Plan, work: Work, count: int, devices_per_node: int) -> list[_Transfer]:
    if plan.strategy == "megatron":
        return [
            *_between_layers(plan, work, count, devices_per_node),
            *_between_replicas(plan, work, count, devices_per_node),
        ]
    total = count_weights(work).total
    ranks = plan.ranks
    share = (ranks - 1) / ranks
    in_node = ranks <= devices_per_node
    last = 2 / 3 / count  # the backward pass of the last micro-batch
    if plan.strategy == "ddp":
        return [_Transfer(2 * share * FP32 * total, in_node, last)]
    if plan.strategy == "deepspeed":
        if plan.stage == 1:
            return [
                _Transfer(share * FP32 * total, in_node, last),
                _Transfer(share * FP32 * total, in_node),
            ]
        if plan.stage == 2:
            return [
                _Transfer(share * FP32 * total * count, in_node, 2 / 3),
                _Transfer(share * FP32 * total, in_node),
            ]
        return [_Transfer(3 * share * FP32 * total * count, in_node, 1.0)]
    shards = ranks // plan.replicate
    share, in_node = (shards - 1) / shards, shards <= devices_per_node
    gathers = 2 * count if plan.shard == "full" else 1
    sums = count if plan.accumulate == "sharded" else 1
    copies = (plan.replicate - 1) / plan.replicate
    return [
        _Transfer(share * total * (gathers * work.compute_bytes + sums * FP32), in_node, 1.0),
        _Transfer(2 * copies * FP32 * total / shards, ranks <= devices_per_node, last),
    ]


def _between_layers(plan: Plan, work: Work, count: int, devices_per_node: int) -> list[_Transfer]:
    """Tensor parallelism: two sums a block and pass. Pipeline: the stream to the next stage and its gradient back."""
    parts, stages = plan.tensor_parallel, plan.pipeline_parallel
    stream = plan.micro_batch_size * work.seq_len * work.shape.hidden_size
    sums = 6 if plan.activation_checkpointing == "full" else 4
    layers = work.shape.num_layers / stages
    tensor = sums * layers * 2 * (parts - 1) / parts * stream * work.compute_bytes * count
    chunks = plan.virtual_pipeline or 1
    hops = 2 * chunks * stream * FP32 * count if stages > 1 else 0
    return [
        _Transfer(tensor, parts <= devices_per_node),
        _Transfer(hops / (parts if plan.sequence_parallel else 1), plan.ranks <= devices_per_node),
    ]


def _between_replicas(plan: Plan, work: Work, count: int, devices_per_node: int) -> list[_Transfer]:
    """Gradients are summed behind the last backward pass; a sharded optimizer's weights are gathered after the step."""
    parts, replicas = plan.tensor_parallel, plan.data_parallel
    stage = count_stage(work, stage=0, stages=plan.pipeline_parallel, tensor_parallel=parts)
    share = (replicas - 1) / replicas
    in_node = parts * replicas <= devices_per_node
    gathered = share * FP32 * stage.total if plan.shard_optimizer else 0
    return [
        _Transfer(2 * share * FP32 * stage.total, in_node, 2 / 3 / count),
        _Transfer(gathered, in_node),
    ]


def _move_to_host(plan: Plan, work: Work, compute_s: float, count: int) -> float:
    """Bytes between device and host that nothing hides, with those that the optimizer moves on the host."""
    total = count_weights(work).total
    moved = 0.0
    if plan.cpu_offload or plan.offload_optimizer:
        # Gradients there, weights back; the optimizer on the host reads and writes five numbers for each.
        moved += (2 + 10) * FP32 * total / (plan.ranks // plan.replicate)
    if plan.cpu_offload or plan.offload_parameters:
        moved += 2 * count * FP32 * total / (plan.ranks // plan.replicate)
    if plan.activation_offload and work.platform == "gpu":
        kept = 2 * count * work.shape.num_layers * count_layer(work, plan).kept
        moved += max(0.0, kept - compute_s * SPEEDS["gpu"].host)
    return moved
