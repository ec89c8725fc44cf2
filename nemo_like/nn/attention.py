"""Causal self-attention with grouped heads, through PyTorch's scaled_dot_product_attention."""
# Shapes: B = sequences, T = tokens, D = model width, H = query heads, K = key/value heads, C = channels of a head.

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from nemo_like.nn.linear import Linear
from nemo_like.nn.norm import RMSNorm
from nemo_like.nn.rope import rotate


def attention_kernel(
    query_BHTC: Tensor,
    key_BKTC: Tensor,
    *,
    mask_B1TT: Tensor | None = None,
    dropout: float = 0.0,
) -> str:
    """The kernel that PyTorch picks for such an attention; asked, not guessed.

    Args:
        query_BHTC: Only shape, type, device and whether it requires a gradient matter, not the values.
        key_BKTC: Likewise; the values' tensor is taken to be of the same kind.
        mask_B1TT: Mask, or None for plain causal attention.
        dropout: Probability of dropping an attention weight.

    Returns:
        ``flash``, ``efficient``, ``cudnn``, ``math`` (the slow one, which stores T x T weights), or
        ``overrideable`` (a device's own), preceded by ``cpu`` on a CPU.
    """
    # torch.backends.cuda.can_use_*_attention answer for CUDA only; this one is what the attention call itself asks.
    choice = torch._fused_sdp_choice(
        query_BHTC,
        key_BKTC,
        key_BKTC,
        mask_B1TT,
        dropout,
        mask_B1TT is None,
        enable_gqa=query_BHTC.size(1) != key_BKTC.size(1),
    )
    name = SDPBackend(choice).name.lower().removesuffix("_attention")
    return f"cpu {name}" if query_BHTC.device.type == "cpu" else name


class AttentionCache(Protocol):
    """Keys and values of earlier tokens in one layer; generation brings an implementation."""

    def attend(self, query_BHTC: Tensor, key_BKTC: Tensor, value_BKTC: Tensor) -> Tensor:
        """Keeps the new keys and values and attends to all that the new tokens see; (B, H, T, C)."""
        ...


class CacheStep(Protocol):
    """New tokens of some rows of a cache: where they stand, and the cache of each layer."""

    @property
    def positions_BT(self) -> Tensor:
        """int64, (B, T), or (1, T) where all rows share them."""
        ...

    @property
    def layers(self) -> Sequence[AttentionCache]:
        """One a layer, in order."""
        ...


class SelfAttention(nn.Module):
    """Multi-head, grouped-query or multi-query attention of a sequence to its own past.

    Args:
        dim: D.
        num_heads: H.
        num_kv_heads: K; each serves H / K query heads (Ainslie et al. 2023, arXiv:2305.13245).
        head_dim: C.
        init_std: Standard deviation of the weights of query, key and value.
        output_init_std: The same for the output projection, which writes to the residual stream.
        qkv_bias: Biases on query, key and value.
        output_bias: A bias on the output projection.
        qk_norm_eps: Normalise each head's queries and keys before they are turned, with this epsilon; None does not.
        dropout: Probability of dropping an attention weight in training.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        init_std: float,
        output_init_std: float,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.head_dim, self.dropout = head_dim, dropout
        self.is_grouped = num_kv_heads != num_heads
        self.query = Linear(dim, num_heads * head_dim, bias=qkv_bias, init_std=init_std)
        self.key = Linear(dim, num_kv_heads * head_dim, bias=qkv_bias, init_std=init_std)
        self.value = Linear(dim, num_kv_heads * head_dim, bias=qkv_bias, init_std=init_std)
        self.output = Linear(num_heads * head_dim, dim, bias=output_bias, init_std=output_init_std)
        self.query_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)
        self.key_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)

    def forward(
        self,
        x_BTD: Tensor,
        turns: tuple[Tensor, Tensor],
        mask_B1TT: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """Attends.

        Args:
            x_BTD: Normalised residual stream.
            turns: Rotary cosines and sines of the positions.
            mask_B1TT: bool, true where a token (rows) sees a token (columns); every row sees itself. None means
                plain causal, which is faster.
            cache: What came before these tokens, which decides who sees whom instead of ``mask_B1TT``.

        Returns:
            (B, T, D).
        """
        # -1, not the number of heads: a tensor-parallel rank holds only some of them.
        query_BTHC = self.query(x_BTD).unflatten(-1, (-1, self.head_dim))
        key_BTKC = self.key(x_BTD).unflatten(-1, (-1, self.head_dim))
        value_BTKC = self.value(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.query_norm is not None and self.key_norm is not None:
            query_BTHC, key_BTKC = self.query_norm(query_BTHC), self.key_norm(key_BTKC)
        query_BTHC, key_BTKC = rotate(query_BTHC, turns), rotate(key_BTKC, turns)
        query_BHTC, key_BKTC = query_BTHC.transpose(1, 2), key_BTKC.transpose(1, 2)
        value_BKTC = value_BTKC.transpose(1, 2)
        if cache is not None:
            mixed_BHTC = cache.attend(query_BHTC, key_BKTC, value_BKTC)
        else:
            mixed_BHTC = F.scaled_dot_product_attention(
                query_BHTC,
                key_BKTC,
                value_BKTC,
                attn_mask=mask_B1TT,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=mask_B1TT is None,
                enable_gqa=self.is_grouped,
            )
        output_BTD: Tensor = self.output(mixed_BHTC.transpose(1, 2).flatten(2))
        return output_BTD
