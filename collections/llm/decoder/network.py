"""The decoder network: token ids in, logits out."""
# Shapes: B = blocks, T = tokens, D = model width, V = vocabulary.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_like.core.errors import ConfigError
from nemo_like.nn.attention import AttentionCache, CacheStep, SelfAttention, attention_kernel
from nemo_like.nn.linear import Embedding, Linear
from nemo_like.nn.mask import build_mask, build_positions
from nemo_like.nn.mlp import SwiGLU
from nemo_like.nn.norm import RMSNorm
from nemo_like.nn.rope import RotaryPositions, compute_frequencies, scale_llama3

from .config import DecoderConfig


def build_frequencies(shape: DecoderConfig) -> Tensor:
    """The rotary frequencies of a shape, scaled as it says; (head_dim / 2,) float32."""
    frequencies = compute_frequencies(shape.head_size, theta=shape.rope_theta)
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    assert scaling.low_frequency_factor is not None, "check() requires it"
    assert scaling.high_frequency_factor is not None, "check() requires it"
    assert scaling.original_max_positions is not None, "check() requires it"
    return scale_llama3(
        frequencies,
        factor=scaling.factor,
        low_frequency_factor=scaling.low_frequency_factor,
        high_frequency_factor=scaling.high_frequency_factor,
        original_max_positions=scaling.original_max_positions,
    )


class DecoderLayer(nn.Module):
    """One block: attention, then feed-forward, each on the normalised stream and added back to it.

    Args:
        shape: The shape of the whole network.
    """

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        # Each layer adds two terms to the stream; so its variance stays that of one (GPT-2, section 2.3).
        output_init_std = shape.init_std / math.sqrt(2 * shape.num_layers)
        self.attention_norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.attention = SelfAttention(
            shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_size,
            init_std=shape.init_std,
            output_init_std=output_init_std,
            qkv_bias=shape.qkv_bias,
            output_bias=shape.output_bias,
            qk_norm_eps=shape.norm_eps if shape.qk_norm else None,
            dropout=shape.attention_dropout,
        )
        self.mlp_norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = SwiGLU(
            shape.hidden_size,
            shape.intermediate_size,
            init_std=shape.init_std,
            output_init_std=output_init_std,
        )
        self.dropout = shape.dropout

    def forward(
        self,
        x_BTD: Tensor,
        turns: tuple[Tensor, Tensor],
        mask_B1TT: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """Maps the residual stream.

        Args:
            x_BTD: Residual stream.
            turns: Rotary cosines and sines.
            mask_B1TT: bool, true where the row sees the column; None is plain causal.
            cache: The earlier tokens' keys and values in this layer.

        Returns:
            (B, T, D), the stream with both terms added.
        """
        mixed_BTD = self.attention(self.attention_norm(x_BTD), turns, mask_B1TT, cache)
        x_BTD = x_BTD + F.dropout(mixed_BTD, self.dropout, self.training)
        mapped_BTD = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + F.dropout(mapped_BTD, self.dropout, self.training)


class DecoderNetwork(nn.Module):
    """A decoder-only transformer: Llama, Mistral, Qwen2 and Qwen3 are shapes of it.

    Weights are drawn from a normal distribution of width ``init_std``; those of matrices that write to the
    residual stream are narrower by ``sqrt(2 * num_layers)``; norms are one, biases zero (Radford et al. 2019, GPT-2).
    The draws depend on ``torch.manual_seed`` alone.

    Args:
        shape: All numbers.

    Raises:
        ConfigError: ``shape`` has faults; all of them are listed.
    """

    def __init__(self, shape: DecoderConfig) -> None:
        faults = list(shape.check())
        if faults:
            raise ConfigError([f"network.{fault}" for fault in faults])
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(shape.vocab_size, shape.hidden_size, init_std=shape.init_std)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.output = (
            None
            if shape.tie_embeddings
            else Linear(shape.hidden_size, shape.vocab_size, init_std=shape.init_std)
        )
        self.positions = RotaryPositions(build_frequencies(shape))

    def reset_parameters(self) -> None:
        """Draws all weights anew, in the order of construction.

        After a construction on the meta device and ``to_empty(device=...)`` this gives the very weights that a
        construction on that device would have given.
        """
        for module in self.modules():
            if isinstance(module, Linear | Embedding | RMSNorm):
                module.reset_parameters()

    @property
    def output_weight_VD(self) -> Tensor:
        """The matrix that makes logits of hidden states."""
        return self.embedding.weight if self.output is None else self.output.weight

    def compute_hidden(
        self,
        tokens_BT: Tensor,
        *,
        segments_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        cache: CacheStep | None = None,
    ) -> Tensor:
        """Computes the hidden states behind the final norm, from which the loss makes logits chunk by chunk.

        Args:
            tokens_BT: int64, 0 to V - 1. Padding belongs to the right, where no real token sees it.
            segments_BT: int, the document of each token in a packed block: attention stays within a document and
                positions restart. None means one document per row and is faster.
            positions_BT: int, (B, T) or (1, T); None counts from 0 in each segment.
            cache: The place that :meth:`KeyValueCache.append` gave these tokens behind those that were read before;
                it decides positions and who sees whom, so neither segments nor positions may be given with it.

        Returns:
            (B, T, D).

        Raises:
            ValueError: Segments or positions together with a cache.
        """
        if cache is not None:
            if segments_BT is not None or positions_BT is not None:
                name = "segments_BT" if positions_BT is None else "positions_BT"
                raise ValueError(f"{name}: has no effect with a cache, which knows the positions")
            turns = self.positions(cache.positions_BT)
            x_BTD = self.embedding(tokens_BT)
            for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
                x_BTD = layer(x_BTD, turns, None, layer_cache)
            cached_BTD: Tensor = self.norm(x_BTD)
            return cached_BTD
        num_tokens = tokens_BT.size(1)
        if positions_BT is None and segments_BT is not None:
            positions_BT = build_positions(segments_BT)
        elif positions_BT is None:
            positions_BT = torch.arange(num_tokens, device=tokens_BT.device).unsqueeze(0)
        turns = self.positions(positions_BT)
        mask_B1TT = build_mask(
            num_tokens,
            segments_BT=segments_BT,
            window=self.shape.sliding_window,
            device=tokens_BT.device,
        )
        x_BTD = F.dropout(self.embedding(tokens_BT), self.shape.dropout, self.training)
        for layer in self.layers:
            x_BTD = layer(x_BTD, turns, mask_B1TT)
        hidden_BTD: Tensor = self.norm(x_BTD)
        return hidden_BTD

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        segments_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """Computes logits; the arguments are those of :meth:`compute_hidden`.

        Returns:
            (B, T, V), of the token that follows each token.
        """
        hidden_BTD = self.compute_hidden(
            tokens_BT, segments_BT=segments_BT, positions_BT=positions_BT
        )
        return F.linear(hidden_BTD, self.output_weight_VD)

    def attention_kernel(
        self,
        num_tokens: int,
        *,
        packed: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> str:
        """The attention kernel that PyTorch picks for this network (``flash``, ``cpu flash``, ...).

        Args:
            num_tokens: T.
            packed: Whether blocks hold several documents.
            device: Where it will run; None is where the weights are now.
            dtype: Type of queries and keys, under autocast that of autocast; None is that of the weights.
        """
        shape, weight = self.shape, self.embedding.weight
        options: dict[str, Any] = {
            "device": device or weight.device,
            "dtype": dtype or weight.dtype,
        }
        windowed = shape.sliding_window is not None and shape.sliding_window < num_tokens
        # The choice depends on there being a mask and on the size of heads, not on the number of tokens.
        size = 64
        query = torch.empty(1, shape.num_heads, size, shape.head_size, **options)
        key = torch.empty(1, shape.kv_heads, size, shape.head_size, **options)
        mask = query.new_ones(1, 1, size, size, dtype=torch.bool) if packed or windowed else None
        needs_grad = weight.requires_grad and torch.is_grad_enabled()
        return attention_kernel(
            query.requires_grad_(needs_grad),
            key.requires_grad_(needs_grad),
            mask_B1TT=mask,
            dropout=shape.attention_dropout if self.training else 0.0,
        )

    def describe_attention(
        self, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> str:
        """A line for the log: which kernel attention runs on; the arguments are those of :meth:`attention_kernel`."""
        kernels = {
            packed: self.attention_kernel(
                self.shape.max_positions, packed=packed, device=device, dtype=dtype
            )
            for packed in (False, True)
        }
        same = kernels[False] == kernels[True]
        return f"attention: {kernels[False]}" + (
            "" if same else f" (packed documents: {kernels[True]})"
        )
