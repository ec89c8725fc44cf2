"""The shape of a decoder: every number that decides what the network computes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nemo_like.core.config import Component


@dataclass(kw_only=True)
class RopeScalingConfig:
    """How rotary positions are stretched beyond the context that a model was first trained on."""

    kind: Literal["linear", "llama3"]
    """``linear`` divides every frequency by ``factor``; ``llama3`` slows the low ones only (Llama 3.1)."""
    factor: float
    """How many times the context grew, at least 1."""
    low_frequency_factor: float | None = None
    """``llama3`` only: turns within the old context below which a frequency is slowed in full; Llama 3.1 has 1."""
    high_frequency_factor: float | None = None
    """``llama3`` only: turns within the old context above which a frequency is kept; Llama 3.1 has 4."""
    original_max_positions: int | None = None
    """``llama3`` only: the old context in tokens; Llama 3.1 has 8192."""

    def check(self) -> Iterator[str]:
        """Yields one line per fault."""
        if not 1 <= self.factor < math.inf:
            yield f"factor={self.factor}: must be a finite number, at least 1"
        extra = {
            "low_frequency_factor": self.low_frequency_factor,
            "high_frequency_factor": self.high_frequency_factor,
            "original_max_positions": self.original_max_positions,
        }
        for name, value in extra.items():
            if self.kind == "llama3" and value is None:
                yield f"{name}=null: kind=llama3 needs a number here"
            if self.kind == "llama3" and value is not None and value <= 0:
                yield f"{name}={value}: must be above 0"
            if self.kind == "linear" and value is not None:
                yield f"{name}={value}: has no effect with kind=linear; leave it out"
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if self.kind == "llama3" and low is not None and high is not None and low >= high:
            yield f"low_frequency_factor={low}: must be below high_frequency_factor={high}"


@dataclass(kw_only=True)
class DecoderConfig:
    """A decoder-only transformer of the Llama kind: RMSNorm, rotary positions, SwiGLU."""

    vocab_size: int
    """Rows of the embedding; at least the number of tokens that the tokenizer knows."""
    hidden_size: int
    """Width of the residual stream."""
    num_layers: int
    """Blocks of attention and feed-forward."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads, a divisor of ``num_heads`` (1 is multi-query); null is ``num_heads``."""
    head_dim: int | None = None
    """Channels of a head, even; null is ``hidden_size // num_heads``."""
    intermediate_size: int
    """Inner width of the feed-forward blocks."""
    max_positions: int
    """Longest sequence in tokens that the model is meant for."""
    norm_eps: float = 1e-5
    """Added to the mean square in every normalisation."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingConfig | None = None
    """How the rotary frequencies are stretched; null leaves them."""
    sliding_window: int | None = None
    """Tokens that a token sees at most, itself included, in every layer (Mistral 7B v0.1: 4096); null is all."""
    qk_norm: bool = False
    """Normalise each head's queries and keys (Qwen3)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    output_bias: bool = False
    """A bias on the output projection of attention."""
    tie_embeddings: bool = True
    """Use the embedding as the output matrix, too."""
    dropout: float = 0.0
    """Probability of dropping a channel of what each block adds to the residual stream; in training only."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight; in training only. Above 0 the slow attention kernel may be used."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; matrices that write to the residual stream get
    ``init_std / sqrt(2 * num_layers)`` (Radford et al. 2019, GPT-2)."""

    @property
    def kv_heads(self) -> int:
        """``num_kv_heads``, resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """``head_dim``, resolved."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    def count_parameters(self) -> int:
        """Numbers that are trained; a tied matrix counts once."""
        width, heads, kv_heads = self.hidden_size, self.num_heads, self.kv_heads
        attention = 2 * width * self.head_size * (heads + kv_heads)
        attention += self.qkv_bias * self.head_size * (heads + 2 * kv_heads)
        attention += self.output_bias * width + self.qk_norm * 2 * self.head_size
        layer = attention + 3 * width * self.intermediate_size + 2 * width
        matrices = 1 if self.tie_embeddings else 2
        return matrices * self.vocab_size * width + self.num_layers * layer + width

    def check(self) -> Iterator[str]:
        """Yields one line per fault."""
        counts = ["vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"]
        counts += ["head_dim", "intermediate_size", "max_positions", "sliding_window"]
        bad = [name for name in counts if (value := getattr(self, name)) is not None and value < 1]
        yield from (f"{name}={getattr(self, name)}: must be at least 1" for name in bad)
        for name in ("norm_eps", "rope_theta", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                yield f"{name}={getattr(self, name)}: must be a finite number above 0"
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)}: must be at least 0 and below 1"
        if self.rope_scaling is not None:
            yield from (f"rope_scaling.{fault}" for fault in self.rope_scaling.check())
        if bad:
            return
        if self.num_heads % self.kv_heads:
            yield f"num_kv_heads={self.kv_heads}: must divide num_heads={self.num_heads}"
        if self.head_dim is None and self.hidden_size % self.num_heads:
            yield (
                f"num_heads={self.num_heads}: must divide hidden_size={self.hidden_size}, "
                "or set head_dim"
            )
        elif self.head_size % 2:
            yield f"head_dim={self.head_size}: must be even, rotary positions turn channels in pairs"


@dataclass(kw_only=True)
class DecoderModelConfig:
    """A language model on a decoder network."""

    network: DecoderConfig | None = None
    """The shape of the network; null takes that of ``init_from``."""
    init_from: str | None = None
    """A Hugging Face folder, a checkpoint or a run folder whose weights the training starts from; null draws them."""
    adapter: Component | None = None
    """What is trained beside the frozen weights of ``init_from``, such as ``nemo_like.collections.llm.adapters.Lora``;
    null trains all weights."""
    objective: Component | None = None
    """What is learnt instead of the next token, such as ``nemo_like.collections.llm.preference.Dpo``; null is the next
    token."""
    neftune_alpha: float | None = None
    """Noise on the embeddings in training (NEFTune): uniform, as wide as ``alpha / sqrt(tokens * width)``; 5 is usual,
    null adds none."""
    sample_prompt: str = ""
    """What the sample at the end of a run continues; empty starts at the beginning of a document."""
    sample_tokens: int = 0
    """Length of that sample in tokens; 0 leaves it out."""

    def check(self) -> Iterator[str]:
        """Yields one line per fault."""
        if self.network is None and self.init_from is None:
            yield "network: is required: the shape of the network, or init_from=FOLDER to take it from there"
        if self.adapter is not None and self.init_from is None:
            yield "init_from: is required with an adapter: the folder of its base"
        if self.neftune_alpha is not None and not 0 < self.neftune_alpha < math.inf:
            yield f"neftune_alpha={self.neftune_alpha}: must be a finite number above 0, or null for no noise"
        if self.sample_tokens < 0:
            yield f"sample_tokens={self.sample_tokens}: must be at least 0"
