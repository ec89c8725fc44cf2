"""What the forward pass of a block keeps for its backward pass.

Counted from `nn/attention.py`, `nn/mlp.py`, `nn/norm.py` and the decoder's network, tensor by tensor, as autograd saves
them; `tools/bench_plan_memory.py` holds the sums against the allocator's account.
"""
# N = tokens of a micro-batch, D = width, A = channels of all query heads, K = channels of all key heads,
# F = inner width, H = query heads, T = tokens of a sample, B = samples of a micro-batch.

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.strategies.planning.plan import Plan
from nemo_like.strategies.planning.weights import FP32
from nemo_like.strategies.planning.work import Work


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one block and one micro-batch on one device."""

    kept: int
    """From the forward to the backward pass."""
    whole: int
    """What the backward pass of the block works on: ``kept``, and what it computes again."""
    working: int
    """Gradients of activations that exist at once within the backward pass, beyond what it has freed by then."""
    weights: int
    """Copies of the weights in 16 bits."""


def count_layer(work: Work, plan: Plan) -> LayerBytes:
    """Counts a block, of our own network or of Megatron-Core's."""
    if plan.strategy == "megatron":
        return _count_megatron(work, plan)
    shape, e = work.shape, work.compute_bytes
    samples, length = plan.micro_batch_size, work.seq_len
    tokens = samples * length
    width, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads
    queries, keys = heads * shape.head_size, shape.kv_heads * shape.head_size
    stream = tokens * width * FP32  # the residual stream stays in fp32 under autocast
    # A norm keeps its input and, where no kernel does all at once, the normalised input as well.
    norms = 2 * (2 if work.platform == "cpu" else 1) * stream + 2 * tokens * FP32
    # Matrix products keep their input. Autocast casts it anew for each of query, key, value, gate and up.
    inputs = 2 * tokens * width * e if e == FP32 else 5 * tokens * width * e
    attention = _count_attention(work, samples)
    mlp = 4 * tokens * inner * e
    dropout = 0
    if shape.dropout:
        dropout = 2 * tokens * width * (e if work.platform == "cpu" else 1)
    whole = norms + inputs + attention + mlp + dropout
    matrices = width * (2 * queries + 2 * keys + 3 * inner)
    # FSDP casts what it gathers; under ZeRO-3 a copy lives as long as a product.
    is_cut = plan.strategy == "fsdp" or (plan.strategy == "deepspeed" and plan.stage == 3)
    is_cast = e != FP32 and not is_cut
    kept = whole
    if plan.activation_checkpointing == "full":
        kept = stream
    elif plan.activation_checkpointing == "selective":
        results = tokens * (2 * width + 2 * queries + 2 * keys + 2 * inner) * e
        kept = stream + results + tokens * heads * FP32
    return LayerBytes(
        kept=kept,
        whole=whole,
        working=stream + 2 * tokens * inner * e,
        weights=2 * matrices if is_cast else 0,
    )


def _count_attention(work: Work, samples: int) -> int:
    """Queries, keys, values, the result, the sums of exponentials; and the mask as numbers."""
    shape, e, length = work.shape, work.compute_bytes, work.seq_len
    tokens, heads = samples * length, shape.num_heads
    queries, keys = heads * shape.head_size, shape.kv_heads * shape.head_size
    weights = samples * heads * length * length
    count = tokens * (2 * queries + 2 * keys) * e + tokens * heads * FP32
    if (
        shape.attention_dropout
    ):  # the kernel that stores the weights, in fp32: scores, dropped ones, mask of dropping
        count = tokens * queries * (3 * FP32 + e) + 3 * weights * FP32
    elif work.has_mask:
        count += samples * length * length * e
    if shape.qk_norm:
        fused = work.platform == "gpu"
        count += tokens * (queries + keys) * (e if fused else 2 * FP32)
        count += tokens * (heads + shape.kv_heads) * FP32
    return count


def _count_megatron(work: Work, plan: Plan) -> LayerBytes:
    """Counts a block of Megatron-Core's with our norm and attention."""
    shape, e = work.shape, work.compute_bytes
    parts = plan.tensor_parallel
    samples, length = plan.micro_batch_size, work.seq_len
    tokens = samples * length
    # The residual stream and what is made of it are whole on each rank, unless they are cut along the sequence.
    whole_tokens = tokens // parts if plan.sequence_parallel else tokens
    queries = shape.num_heads * shape.head_size // parts
    keys = shape.kv_heads * shape.head_size // parts
    heads, inner = shape.num_heads // parts, shape.intermediate_size // parts
    stream = whole_tokens * shape.hidden_size * FP32
    norms = 2 * (2 if work.platform == "cpu" else 1) * stream + 2 * whole_tokens * FP32
    # Local layers keep their input as it came, in fp32; Transformer Engine's keep it in 16 bits, and so their weight.
    has_engine = work.platform == "gpu" and e != FP32
    inputs = 2 * whole_tokens * shape.hidden_size * (e if has_engine else FP32)
    # The values are a view that keeps queries, keys and values as they were before they are turned.
    turned = tokens * (queries + keys) * e
    mixed = tokens * (queries + 2 * keys) * e
    result = tokens * queries * e + tokens * heads * FP32
    if work.has_mask:
        result += samples * length * length * e
    attention = turned + mixed + result + tokens * queries * e
    if shape.qk_norm:
        attention += tokens * (queries + keys) * (e if work.platform == "gpu" else 2 * FP32)
    # The fused kernel of GPUs keeps its input alone; without it Megatron-Core copies both halves.
    mlp = (5 if work.platform == "cpu" else 3) * tokens * inner * e
    whole = norms + inputs + attention + mlp
    kept = {"none": whole, "selective": whole - result, "full": stream}
    matrices = shape.hidden_size * (2 * queries + 2 * keys + 3 * inner)
    return LayerBytes(
        kept=kept[plan.activation_checkpointing],
        whole=whole,
        working=stream + 2 * tokens * inner * e,
        weights=2 * matrices if has_engine else 0,
    )


def count_inputs(work: Work, plan: Plan) -> int:
    """Bytes that all blocks share: token ids and targets, the turns of the positions, the mask."""
    samples, length = plan.micro_batch_size, work.seq_len
    tokens = samples * length
    turns = 2 * (tokens if work.packed else length) * work.shape.head_size * FP32
    mask = samples * length * length if work.has_mask else 0
    return 3 * 8 * tokens + turns + mask
