"""Less memory for activations: compute them again in the backward pass, or keep them in the memory of the host."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nemo_like.core.model import Model

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,
    _aten.convolution.default,
}
_ATTENTIONS = {
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}
"""Attention kernels, and which of their arguments is the probability of dropout."""


def checkpoint_activations(model: Model, mode: Literal["none", "selective", "full"]) -> None:
    """Makes each block of a model forget what it can compute again.

    Args:
        model: Its ``blocks()`` are changed in place; names of parameters stay.
        mode: ``none`` changes nothing; ``full`` keeps the inputs of each block; ``selective`` keeps the results of
            matrix products and attention besides (Korthikanti et al. 2022, arXiv:2205.05198).

    Raises:
        ValueError: The model has no blocks, so nothing would be saved.
    """
    if mode == "none":
        return
    blocks = model.blocks()
    if not blocks:
        raise ValueError(
            f"activation_checkpointing={mode}: {type(model).__name__}.blocks() is empty, so there is nothing to "
            "compute again; put its repeated blocks into an nn.ModuleList, or take activation_checkpointing=none"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _choose)
    for block in blocks:
        if isinstance(block.forward, functools.partial) and block.forward.func is _forward:
            continue  # by an earlier call of the same trainer
        # forward, not __call__: what strategies hang on the call (gathering parameters) runs once.
        block.forward = functools.partial(_forward, block, block.forward, options)


def _forward(
    block: nn.Module, forward: Any, options: dict[str, Any], *arguments: Any, **keywords: Any
) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*arguments, **keywords)
    return checkpoint(functools.partial(forward, **keywords), *arguments, **options)


def _choose(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keeps what is expensive, unless it draws random numbers.

    The second run starts from the generator of the first; if it left out a draw, all draws after it would differ.
    """
    position = _ATTENTIONS.get(operation)
    if position is None:
        keep = operation in _PRODUCTS
    else:
        dropout = arguments[position] if len(arguments) > position else keywords.get("dropout_p", 0)
        keep = not dropout
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def offload_activations(device: torch.device) -> AbstractContextManager[Any]:
    """A context whose forward passes keep their activations in the memory of the host.

    Parameters stay where they are: they take memory anyway, and sharded ones are gathered again.

    Args:
        device: Where the forward pass runs; for a GPU the memory is pinned.
    """
    is_pinned = device.type == "cuda"

    def pack(tensor: Tensor) -> Tensor | _OnHost:
        if isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            return tensor
        return _OnHost(tensor, is_pinned=is_pinned)

    def unpack(packed: Tensor | _OnHost) -> Tensor:
        return packed.fetch() if isinstance(packed, _OnHost) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _OnHost:
    """A copy in the memory of the host, in the layout of the original, so that kernels do the same with it."""

    def __init__(self, tensor: Tensor, *, is_pinned: bool) -> None:
        self.device = tensor.device
        self.copy = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned)
        self.copy.copy_(tensor, non_blocking=is_pinned)

    def fetch(self) -> Tensor:
        """The tensor, back on its device."""
        return self.copy.to(self.device, non_blocking=self.copy.is_pinned())
