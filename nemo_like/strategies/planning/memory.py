"""Bytes on each device at the peak of a step, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass, fields

from nemo_like.strategies.planning.activation import count_inputs, count_layer
from nemo_like.strategies.planning.plan import Plan
from nemo_like.strategies.planning.spread import Spread, spread_weights
from nemo_like.strategies.planning.weights import FP32
from nemo_like.strategies.planning.work import Work

# As in collections/llm/losses.py: logits of one chunk, and the fewest tokens of one.
_CHUNK_LOGITS = {"cpu": 2**22, "gpu": 2**28}
_MIN_CHUNK_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, the fullest one, at the fullest moment of a step."""

    parameters: int
    """Weights, as they lie between two steps."""
    gradients: int
    """Of the weights."""
    optimizer: int
    """State of the optimizer, and copies of the weights that it alone uses."""
    activations: int
    """What the forward pass keeps for the backward pass, and what that works on."""
    logits: int
    """Logits, and what the loss needs beside them."""
    buffers: int
    """Gathered weights, 16-bit copies, communication, the optimizer's workspace."""
    host: int = 0
    """Bytes a device on its host, where something is kept there."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """By name."""
        return {it.name: getattr(self, it.name) for it in fields(self) if it.name != "host"}

    @property
    def largest(self) -> str:
        """The part that takes most."""
        parts = self.parts()
        return max(parts, key=lambda name: parts[name])


def estimate(plan: Plan, work: Work) -> Memory:
    """Predicts the peak of a step on the fullest device."""
    moments = [
        moment
        for stage in range(plan.pipeline_parallel)
        if stage in (0, 1, plan.pipeline_parallel - 1)  # those between are like the second
        for moment in _list_moments(plan, work, spread_weights(plan, work, stage))
    ]
    return max(moments, key=lambda it: it.total)


def _list_moments(plan: Plan, work: Work, spread: Spread) -> list[Memory]:
    """The moments of which one is the fullest: the loss, both ends of the backward pass, the optimizer's step."""
    layer = count_layer(work, plan)
    weights = spread.weights
    kept = spread.blocks_in_flight * layer.kept
    inputs = count_inputs(work, plan)
    loss, norm = _count_loss(work, plan) if spread.has_loss else (0, 0)
    again = layer.whole - layer.kept + layer.working
    recomputes = plan.activation_checkpointing != "none"
    # Autocast keeps its copies till the forward pass ends, Megatron's layers only for what they will not compute again.
    is_dropped = plan.strategy == "megatron" and plan.activation_checkpointing == "full"
    copies = (1 if is_dropped else spread.blocks_in_flight) * layer.weights
    is_offloaded = plan.activation_offload and work.platform == "gpu"
    on_device, host = (layer.kept, kept) if is_offloaded else (kept, 0)
    at_end = layer.kept if is_offloaded else kept - (weights.layers - 1) * layer.kept

    def moment(gradients: int, activations: int = 0, logits: int = 0, buffers: int = 0) -> Memory:
        return Memory(
            parameters=spread.parameters,
            optimizer=spread.optimizer,
            gradients=gradients,
            activations=activations,
            logits=logits,
            buffers=buffers,
            host=spread.host + host,
        )

    head = spread.head_gradient if spread.has_loss else 0
    # A tied matrix waits for its second gradient, that of the embedding, before the sum is added to the first.
    waits = head if work.shape.tie_embeddings and spread.before else 0
    both = spread.embedding_gradient
    if not (spread.before or work.shape.tie_embeddings):
        both = 0
    return [
        moment(
            spread.before + head,
            on_device + norm + inputs,
            loss,
            copies + spread.gathered_at_loss,
        ),
        moment(
            max(spread.before, head) + waits,
            on_device + again + inputs,
            0,
            (layer.weights if recomputes else copies) + spread.gathered,
        ),
        moment(
            spread.gradients + waits + both,
            at_end + again + inputs,
            0,
            layer.weights + spread.gathered_at_end,
        ),
        moment(spread.gradients, buffers=spread.ends_at_end),
        moment(spread.at_step_gradients, buffers=spread.at_step),
    ]


def _count_loss(work: Work, plan: Plan) -> tuple[int, int]:
    """Bytes while the loss is computed, besides the head's gradient; and those that the final norm keeps."""
    shape, e = work.shape, work.compute_bytes
    tokens = plan.micro_batch_size * work.seq_len
    stream = tokens * shape.hidden_size * FP32
    norm = stream * (2 if work.platform == "cpu" else 1)
    chunk = max(_MIN_CHUNK_TOKENS, _CHUNK_LOGITS[work.platform] // shape.vocab_size)
    if plan.strategy == "megatron":
        # All logits at once, cut over the vocabulary; softmax and gradient take their place.
        vocabulary = -(-shape.vocab_size // plan.tensor_parallel)
        return tokens * vocabulary * (FP32 + (e if e != FP32 else 0)) + stream, norm
    rows = min(chunk, tokens)
    logits = rows * shape.vocab_size * FP32
    # Of a chunk: its hidden states and their gradient; of all: the gradient of the hidden states.
    hidden = 2 * rows * shape.hidden_size * FP32 + stream
    casts = 0
    if e != FP32:
        # The chunk's logits, the output matrix, and the chunk's part of its gradient, in 16 bits.
        casts = (rows + 2 * shape.hidden_size) * shape.vocab_size * e
    return logits + hidden + casts, norm
