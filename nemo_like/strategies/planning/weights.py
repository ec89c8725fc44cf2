"""How many numbers are trained, and how many the optimizer keeps beside them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nemo_like.strategies.planning.work import Work

FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Numbers on one device, before anything is cut over data-parallel ranks."""

    layers: int
    """Blocks."""
    matrices: int
    """In the matrices of one block."""
    vectors: int
    """In the norms and biases of one block."""
    embedding: int
    """In the embedding; 0 on a pipeline stage without it."""
    head: int
    """In an output matrix of its own."""
    norm: int
    """In the final norm."""

    @property
    def layer(self) -> int:
        """In one block."""
        return self.matrices + self.vectors

    @property
    def ends(self) -> int:
        """Outside of the blocks."""
        return self.embedding + self.head + self.norm

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers * self.layer + self.ends


def count_weights(work: Work) -> Weights:
    """Of the whole network."""
    shape = work.shape
    vocabulary = shape.vocab_size * shape.hidden_size
    heads = 2 * shape.num_heads + 2 * shape.kv_heads
    matrices = shape.hidden_size * (heads * shape.head_size + 3 * shape.intermediate_size)
    head = 0 if shape.tie_embeddings else vocabulary
    blocks = shape.count_parameters() - vocabulary - head - shape.hidden_size
    return Weights(
        layers=shape.num_layers,
        matrices=matrices,
        vectors=blocks // shape.num_layers - matrices,
        embedding=vocabulary,
        head=head,
        norm=shape.hidden_size,
    )


def count_stage(work: Work, *, stage: int, stages: int, tensor_parallel: int) -> Weights:
    """Of one pipeline stage on one tensor-parallel rank; matrices are cut, norms are whole.

    A tied output matrix is a copy of the embedding on the last stage, unless there is one stage.
    """
    whole = count_weights(work)
    is_first, is_last = stage == 0, stage == stages - 1
    head = whole.head
    if work.shape.tie_embeddings and not is_first:
        head = whole.embedding
    return dataclasses.replace(
        whole,
        layers=-(-whole.layers // stages),
        matrices=whole.matrices // tensor_parallel,
        embedding=whole.embedding // tensor_parallel if is_first else 0,
        head=head // tensor_parallel if is_last else 0,
        norm=whole.norm if is_last else 0,
    )


def count_states(work: Work, weights: Weights) -> int:
    """Numbers that the optimizer keeps: two for each weight, but one for Muon's matrices; one more with an average."""
    hidden = weights.layers * weights.matrices if work.optimizer == "muon" else 0
    return (3 if work.keeps_average else 2) * weights.total - hidden


def count_step_bytes(work: Work) -> int:
    """Bytes that exist only while the optimizer steps: AdamW's kernel needs none."""
    if work.optimizer == "adamw":
        return 0
    shape = work.shape
    largest = shape.hidden_size * max(shape.intermediate_size, shape.num_heads * shape.head_size)
    stacked = largest if work.platform == "cpu" else max(largest, 2**26)
    # The update, its stack, and the matrix that is iterated.
    return 3 * FP32 * stacked
