"""The decoder in its Megatron form: which of Megatron's parameters hold which rows of ours."""

# Shapes: B = samples, T = tokens.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.core.errors import ConfigError
from nemo_like.nn.mask import build_mask

from ..data import IGNORE_INDEX, TextBatch
from .config import DecoderConfig
from .network import build_frequencies
from .sharding import TENSOR_AXIS, find_split_dims

_PREFIX = "network."


@dataclass(frozen=True)
class DecoderSlice:
    """Where a parameter of the decoder lies on this rank (``nemo_like.strategies.megatron.context.Slice``)."""

    weight: nn.Parameter
    rows: list[tuple[int, int]]
    split_dim: int | None


@dataclass
class MegatronDecoder:
    """The part of a decoder that lies on this rank (``nemo_like.strategies.megatron.context.MegatronParts``).

    Args:
        shape: Of the whole network.
        context: How it is spread, from the strategy.

    Raises:
        ConfigError: The shape cannot be cut like that; all faults at once.
    """

    shape: DecoderConfig
    context: Any
    chunks: list[nn.Module] = field(init=False)
    slices: dict[str, DecoderSlice] = field(init=False, default_factory=dict)
    tied_copy: nn.Parameter | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        shape, context = self.shape, self.context
        faults = list(find_faults(shape, context))
        if faults:
            raise ConfigError(faults)
        parts = context.tensor_parallel
        self.rows_of_vocabulary = -(-shape.vocab_size // parts)
        self.chunks = context.build_gpt(
            vocab_size=self.rows_of_vocabulary * parts,
            max_positions=shape.max_positions,
            tied=shape.tie_embeddings,
            frequencies=build_frequencies(shape),
            output_bias=shape.output_bias,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            num_query_groups=shape.kv_heads,
            kv_channels=shape.head_size,
            ffn_hidden_size=shape.intermediate_size,
            layernorm_epsilon=shape.norm_eps,
            add_qkv_bias=shape.qkv_bias,
            qk_layernorm=shape.qk_norm,
            hidden_dropout=shape.dropout,
            attention_dropout=shape.attention_dropout,
        )
        for chunk in self.chunks:
            for name, weight, rows in self._find_places(chunk):
                split_dim = find_split_dims(name).get(TENSOR_AXIS)
                self.slices[_PREFIX + name] = DecoderSlice(weight, rows, split_dim)

    @property
    def tied_name(self) -> str | None:
        """The embedding, where the output matrix is the same."""
        return _PREFIX + "embedding.weight" if self.shape.tie_embeddings else None

    # Names and rows.

    def _find_places(self, chunk: Any) -> Iterator[tuple[str, nn.Parameter, list[tuple[int, int]]]]:
        """Canonical name, Megatron's parameter, rows of it, for each parameter of a chunk."""
        # The vocabulary is filled up so that every rank has as many rows; those are no part of the model.
        start = self.context.tensor_rank * self.rows_of_vocabulary
        num_words = max(0, min(self.rows_of_vocabulary, self.shape.vocab_size - start))
        if chunk.pre_process:
            words = chunk.embedding.word_embeddings.weight
            _clear(words, num_words)
            yield "embedding.weight", words, [(0, num_words)]
        for layer in chunk.decoder.layers:
            yield from self._find_layer_places(f"layers.{layer.layer_number - 1}.", layer)
        if chunk.post_process:
            norm = chunk.decoder.final_layernorm.weight
            yield "norm.weight", norm, [(0, norm.size(0))]
            if not self.shape.tie_embeddings:
                _clear(chunk.output_layer.weight, num_words)
                yield "output.weight", chunk.output_layer.weight, [(0, num_words)]
            elif not chunk.pre_process:
                self.tied_copy = chunk.output_layer.weight
            self._silence_padding(chunk, num_words)

    def _find_layer_places(
        self, prefix: str, layer: Any
    ) -> Iterator[tuple[str, nn.Parameter, list[tuple[int, int]]]]:
        attention, mlp = layer.self_attention, layer.mlp
        size = self.shape.head_size
        # In Megatron: the query heads of a group, their key, their value, then the next group.
        queries = self.shape.num_heads // self.shape.kv_heads * size
        groups = self.shape.kv_heads // self.context.tensor_parallel
        starts = [group * (queries + 2 * size) for group in range(groups)]
        for name, offset, length in (
            ("query", 0, queries),
            ("key", queries, size),
            ("value", queries + size, size),
        ):
            rows = [(start + offset, start + offset + length) for start in starts]
            for kind in ("weight", "bias") if self.shape.qkv_bias else ("weight",):
                yield f"{prefix}attention.{name}.{kind}", getattr(attention.linear_qkv, kind), rows
        # Gate first, up behind it.
        inner = self.shape.intermediate_size // self.context.tensor_parallel
        yield f"{prefix}mlp.gate.weight", mlp.linear_fc1.weight, [(0, inner)]
        yield f"{prefix}mlp.up.weight", mlp.linear_fc1.weight, [(inner, 2 * inner)]
        whole = {
            "attention.output.weight": attention.linear_proj.weight,
            "mlp.down.weight": mlp.linear_fc2.weight,
            "attention_norm.weight": _find_norm(layer.input_layernorm, attention.linear_qkv),
            "mlp_norm.weight": _find_norm(layer.pre_mlp_layernorm, mlp.linear_fc1),
        }
        if self.shape.output_bias:
            whole["attention.output.bias"] = attention.linear_proj.bias
        if self.shape.qk_norm:
            whole["attention.query_norm.weight"] = attention.q_layernorm.weight
            whole["attention.key_norm.weight"] = attention.k_layernorm.weight
        for name, weight in whole.items():
            yield prefix + name, weight, [(0, weight.size(0))]

    def _silence_padding(self, chunk: Any, num_words: int) -> None:
        """Keeps the rows that fill up the vocabulary out of the softmax."""
        if num_words == self.rows_of_vocabulary:
            return

        def hide(module: nn.Module, inputs: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
            logits, bias = outputs
            is_padding = torch.arange(logits.size(-1), device=logits.device) >= num_words
            return logits.masked_fill(is_padding, -torch.inf), bias

        chunk.output_layer.register_forward_hook(hide)

    # Micro-batches.

    def blank(self, micro_batch: TextBatch) -> TextBatch:
        """A sample without targets."""
        segments_BT = micro_batch.segments_BT
        return TextBatch(
            micro_batch.tokens_BT[:1],
            torch.full_like(micro_batch.targets_BT[:1], IGNORE_INDEX),
            None if segments_BT is None else segments_BT[:1],
        )

    def measure(self, micro_batch: TextBatch) -> tuple[int, int]:
        """Tokens of a sample, samples.

        Raises:
            ValueError: Sequence parallelism cannot cut so many tokens.
        """
        num_samples, num_tokens = micro_batch.tokens_BT.shape
        parts = self.context.tensor_parallel
        if self.context.sequence_parallel and num_tokens % parts:
            raise ValueError(
                f"samples of {num_tokens} tokens: strategy.sequence_parallel=true cuts them into {parts} equal parts; "
                f"set data.seq_len to a multiple of {parts}"
            )
        return num_tokens, num_samples

    def forward(self, chunk: nn.Module, micro_batch: TextBatch) -> Tensor:
        """Hidden states, or from the last chunk the loss of each token, (B, T)."""
        segments_BT = micro_batch.segments_BT
        num_tokens = micro_batch.tokens_BT.size(1)
        # Positions count through the documents of a sample instead of restarting with each: rotary attention sees
        # differences only, so up to rounding it is the same.
        mask_B1TT = build_mask(
            num_tokens,
            segments_BT=segments_BT,
            window=self.shape.sliding_window,
            device=micro_batch.tokens_BT.device,
        )
        output: Tensor = chunk(
            micro_batch.tokens_BT, None, mask_B1TT, labels=micro_batch.targets_BT.clamp(min=0)
        )
        return output

    def sum_loss(self, losses: Tensor, micro_batch: TextBatch) -> Tensor:
        """The sum over the tokens that are targets, in nats."""
        return losses.masked_fill(micro_batch.targets_BT == IGNORE_INDEX, 0).sum()


def find_faults(shape: DecoderConfig, context: Any) -> Iterator[str]:
    """Why a shape cannot be cut over so many ranks; one line per fault."""
    tensor, stages = context.tensor_parallel, context.pipeline_parallel
    for name, count in (
        ("num_heads", shape.num_heads),
        ("num_kv_heads", shape.kv_heads),
        ("intermediate_size", shape.intermediate_size),
    ):
        if count % tensor:
            options = [part for part in range(1, tensor) if count % part == 0]
            yield (
                f"strategy.tensor_parallel={tensor}: must divide model.network.{name}={count}; "
                f"the nearest smaller one is {options[-1]}"
            )
    chunks = stages * (context.virtual_pipeline or 1)
    if shape.num_layers % chunks:
        yield (
            f"strategy.pipeline_parallel={stages} x virtual_pipeline={context.virtual_pipeline or 1}: "
            f"{chunks} chunks must divide model.network.num_layers={shape.num_layers}"
        )


@torch.no_grad()
def _clear(weight: nn.Parameter, num_words: int) -> None:
    """Zeroes the rows that fill up the vocabulary: 0 times what memory happens to hold may be nan."""
    weight[num_words:] = 0


def _find_norm(norm: Any, linear: Any) -> nn.Parameter:
    """The weight of a norm, which Transformer Engine keeps in the linear layer behind it."""
    weight: nn.Parameter = (
        linear.layer_norm_weight if norm.__class__.__name__ == "IdentityOp" else norm.weight
    )
    return weight
