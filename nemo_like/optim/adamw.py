"""AdamW with weight decay on matrices only, through the quickest kernel that the device has."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nemo_like.core.units import format_count
from nemo_like.optim.config import AdamWConfig, refuse_faults
from nemo_like.optim.groups import group_parameters

logger = logging.getLogger(__name__)


# Where torch 2.14 has the kernel; its own list is private.
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def has_fused_adamw(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether torch can update all of these parameters by its fused kernel, the quickest one."""
    return all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters)


def describe_parameters(parameters: Sequence[nn.Parameter]) -> str:
    """How many numbers there are, for a log line."""
    return format_count(sum(parameter.numel() for parameter in parameters))


def split_by_decay(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters of a module that decay, and those that do not.

    Raises:
        ValueError: No parameter requires a gradient.
    """
    groups = group_parameters(module)
    decayed = [*groups.hidden_matrices.values(), *groups.other_decayed.values()]
    return decayed, list(groups.not_decayed.values())


class AdamW:
    """Makes an AdamW optimizer (Loshchilov and Hutter 2019) with decay groups.

    Matrices and convolutions decay; norms, biases and embeddings (tied output weights among them) do not.

    Args:
        lr: Peak learning rate.
        betas: How much of the running mean of the gradient, and of its square, is kept each step.
        eps: Added to the root of the running mean square.
        weight_decay: Decoupled decay, times the learning rate each step.
        ema_decay: Of the moving average of the weights (:mod:`nemo_like.optim.ema`); None keeps none.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(
        self,
        *,
        lr: float,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        ema_decay: float | None = None,
    ) -> None:
        refuse_faults(
            AdamWConfig(
                lr=lr, betas=list(betas), eps=eps, weight_decay=weight_decay, ema_decay=ema_decay
            )
        )
        self.ema_decay = ema_decay
        self.lr, self.eps, self.weight_decay = lr, eps, weight_decay
        self.betas = (betas[0], betas[1])

    def make_groups(
        self, decayed: list[nn.Parameter], not_decayed: list[nn.Parameter]
    ) -> list[dict[str, Any]]:
        """Groups as torch's optimizers take them; none is empty."""
        both = ((decayed, self.weight_decay), (not_decayed, 0.0))
        return [{"params": found, "weight_decay": decay} for found, decay in both if found]

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a module's trainable parameters.

        Args:
            module: Already on the device where it trains.

        Raises:
            ValueError: No parameter requires a gradient.
        """
        decayed, not_decayed = split_by_decay(module)
        is_fused = has_fused_adamw([*decayed, *not_decayed])
        logger.info(
            "AdamW (%s): %s parameters decay, %s do not",
            "fused" if is_fused else "not fused",
            describe_parameters(decayed),
            describe_parameters(not_decayed),
        )
        optimizer = torch.optim.AdamW(
            self.make_groups(decayed, not_decayed),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            fused=is_fused
            or None,  # None, not False, lets torch take the kernel over lists of tensors where it is quick
        )
        # The fused kernel could undo FP16's loss scale itself; Lightning then leaves gradients scaled until the step,
        # and clipping would measure them scaled.
        optimizer._step_supports_amp_scaling = False
        return optimizer
