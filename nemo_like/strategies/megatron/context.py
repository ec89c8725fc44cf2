"""What a strategy and a model say to each other when the model takes its Megatron form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class Slice(Protocol):
    """Where a canonical parameter lies in Megatron's."""

    weight: nn.Parameter
    """Megatron's parameter on this rank."""
    rows: Sequence[tuple[int, int]]
    """First and last + 1 row of each piece that, one behind the other, are this rank's part of the canonical one."""
    split_dim: int | None
    """Dimension that tensor parallelism cuts; None is whole on each rank."""


class MegatronParts(Protocol):
    """A model in its Megatron form, as far as it lies on this pipeline stage."""

    chunks: Sequence[nn.Module]
    """``GPTModel`` or the like; one a virtual stage, first layers first."""
    slices: Mapping[str, Slice]
    """Canonical name, as in ``model.named_parameters()`` -> its place."""
    tied_copy: nn.Parameter | None
    """The last stage's copy of a parameter of the first, for tied embeddings on more than one stage."""
    tied_name: str | None
    """Canonical name of that parameter."""

    def blank(self, micro_batch: Any) -> Any:
        """A small micro-batch without targets, to fill up a step."""
        ...

    def measure(self, micro_batch: Any) -> tuple[int, int]:
        """Tokens of a sample, samples."""
        ...

    def forward(self, chunk: nn.Module, micro_batch: Any) -> Tensor:
        """What a chunk hands on: hidden states, or the loss of each token from the last one."""
        ...

    def sum_loss(self, losses: Tensor, micro_batch: Any) -> Tensor:
        """The sum over the targets of what the last chunk gave; a scalar."""
        ...


@runtime_checkable
class MegatronModel(Protocol):
    """A model that can take a Megatron form."""

    def build_megatron(self, context: MegatronContext) -> MegatronParts:
        """The part of the model that lies on this rank; its weights are filled afterwards."""
        ...


@dataclass(frozen=True, kw_only=True)
class MegatronContext:
    """How the layers are spread, and where this rank stands."""

    tensor_parallel: int
    tensor_rank: int
    pipeline_parallel: int
    pipeline_rank: int
    virtual_pipeline: int | None
    sequence_parallel: bool
    activation_checkpointing: Literal["none", "selective", "full"]
    fp8: bool
    """Matrix products of the layers in FP8, which needs Transformer Engine."""
    device: torch.device

    def build_gpt(self, **options: Any) -> list[nn.Module]:
        """The chunks of a decoder on this stage; the options are those of :func:`.gpt.build_gpt`."""
        from .gpt import build_gpt

        return build_gpt(self, **options)
