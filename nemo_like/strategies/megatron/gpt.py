"""Megatron-Core's ``GPTModel`` for the layers of one pipeline stage."""

# Shapes: T = tokens, B = samples, H = query heads, K = key/value heads, C = channels of a head.

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_like.core.errors import ConfigError
from nemo_like.nn.norm import RMSNorm

if TYPE_CHECKING:
    from .context import MegatronContext


class MegatronNorm(RMSNorm):
    """Our normalisation with the constructor that Megatron-Core calls, fit for sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        # Each rank sees some of the tokens: the mark has the gradients summed over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x_D: Tensor) -> Tensor:
        """Normalises; under autocast into its type, in which the next product is computed anyway.

        Sequence-parallel ranks exchange this tensor, and expect its gradient in the same type.
        """
        y_D = super().forward(x_D)
        device = y_D.device.type
        return (
            y_D.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else y_D
        )


class MegatronAttention(nn.Module):
    """PyTorch's fused attention in the place of Megatron-Core's own, which stores all weights.

    It takes packed documents and sliding windows as a mask, true where a token is seen; None is plain causal.
    """

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__()
        self.dropout, self.is_forked = config.attention_dropout, config.sequence_parallel

    def forward(
        self,
        query_TBHC: Tensor,
        key_TBKC: Tensor,
        value_TBKC: Tensor,
        mask_B1TT: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Attends; gives (T, B, H * C)."""
        dropout = self.dropout if self.training else 0.0
        if dropout and not self.is_forked:
            from megatron.core.tensor_parallel import get_cuda_rng_tracker

            # Each tensor-parallel rank has other heads, so it must draw other numbers.
            with get_cuda_rng_tracker().fork():
                return self._attend(query_TBHC, key_TBKC, value_TBKC, mask_B1TT, dropout)
        return self._attend(query_TBHC, key_TBKC, value_TBKC, mask_B1TT, dropout)

    def _attend(
        self,
        query_TBHC: Tensor,
        key_TBKC: Tensor,
        value_TBKC: Tensor,
        mask_B1TT: Tensor | None,
        dropout: float,
    ) -> Tensor:
        mixed_BHTC = F.scaled_dot_product_attention(
            query_TBHC.permute(1, 2, 0, 3),
            key_TBKC.permute(1, 2, 0, 3),
            value_TBKC.permute(1, 2, 0, 3),
            attn_mask=mask_B1TT,
            dropout_p=dropout,
            is_causal=mask_B1TT is None,
            enable_gqa=query_TBHC.size(2) != key_TBKC.size(2),
        )
        return mixed_BHTC.permute(2, 0, 1, 3).flatten(2)


def _choose_residual(training: bool, fused: bool) -> Any:
    """How a block is added to the residual stream; called by Megatron-Core."""

    def add(
        block_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        # Megatron-Core's own would round the stream to the type of the block; in mixed precision it stays in FP32.
        block, bias = block_and_bias
        return residual + F.dropout(block if bias is None else block + bias, dropout, training)

    return add


def build_gpt(
    context: MegatronContext,
    *,
    vocab_size: int,
    max_positions: int,
    tied: bool,
    frequencies: Tensor,
    output_bias: bool = False,
    **transformer: Any,
) -> list[nn.Module]:
    """Builds the chunks of this stage; their weights hold nothing yet.

    Transformer Engine's layers are taken on a GPU when it is installed, Megatron-Core's local ones otherwise.

    Args:
        context: How the layers are spread.
        vocab_size: A multiple of the tensor-parallel size.
        max_positions: Longest sequence.
        tied: Whether the embedding is the output matrix, too.
        frequencies: Rotary frequencies.
        output_bias: A bias on the output projection of attention.
        transformer: Of ``TransformerConfig``: the shape.

    Raises:
        ConfigError: FP8 is asked for where Transformer Engine is not.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    if context.fp8 and not _has_engine(context.device):
        raise ConfigError(
            [
                "trainer.precision=fp8-mixed: with strategy=megatron needs a GPU and Transformer Engine "
                "(pip install transformer_engine[pytorch]); use bf16-mixed, or another strategy"
            ]
        )
    config = _build_config(context, transformer)
    layer = _build_layer_spec(config, context.device, output_bias=output_bias)
    virtual = context.virtual_pipeline
    chunks: list[nn.Module] = []
    for stage in range(virtual or 1):
        vp_stage = None if virtual is None else stage
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        num_layers = get_num_layers_to_build(config, vp_stage)
        chunk = GPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=MegatronNorm),
            vocab_size=vocab_size,
            max_sequence_length=max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
            vp_stage=vp_stage,
        )
        # Ours, because Megatron-Core knows fewer ways of stretching them and only whole bases.
        chunk.rotary_pos_emb.inv_freq = frequencies.to(context.device)
        chunks.append(chunk.to(context.device))
    return chunks


def _build_config(context: MegatronContext, transformer: dict[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    on_gpu = context.device.type == "cuda"
    recompute: dict[str, Any] = {}
    if context.activation_checkpointing == "full":
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif context.activation_checkpointing == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    # Scaled by the largest element of each tensor as it comes, as elsewhere: there is no state to save.
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"} if context.fp8 else {}
    return TransformerConfig(
        **transformer,
        **recompute,
        **fp8,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        tensor_model_parallel_size=context.tensor_parallel,
        pipeline_model_parallel_size=context.pipeline_parallel,
        virtual_pipeline_model_parallel_size=context.virtual_pipeline,
        sequence_parallel=context.sequence_parallel,
        # The residual stream, which is what stages hand on, is in FP32 in mixed precision, too.
        pipeline_dtype=torch.float32,
        # With two stages the next one is the previous one, too: only this exchange keeps the two directions apart.
        overlap_p2p_comm=context.virtual_pipeline is not None,
        batch_p2p_comm=context.virtual_pipeline is None,
        # The loss comes as a sum and is scaled by our count of targets: neither schedule nor reduction divides.
        calculate_per_token_loss=True,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        # The default is another spelling of this, of which it warns itself.
        cuda_graph_scope=[],
    )


def _has_engine(device: torch.device) -> bool:
    """Whether Transformer Engine's layers can be taken."""
    return device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def _build_layer_spec(config: Any, device: torch.device, *, output_bias: bool) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    if _has_engine(device):
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm
        )
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
        spec.submodules.input_layernorm = MegatronNorm
        spec.submodules.pre_mlp_layernorm = MegatronNorm
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = _choose_residual
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = MegatronAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = MegatronNorm
    if output_bias:
        attention.linear_proj = _with_bias(attention.linear_proj)
    return spec


def _with_bias(projection: type[nn.Module]) -> type[nn.Module]:
    """A projection that has a bias whatever the configuration says, which knows one switch for all layers."""

    class BiasedProjection(projection):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any, bias: bool, **options: Any) -> None:
            super().__init__(*arguments, bias=True, **options)

    return BiasedProjection
