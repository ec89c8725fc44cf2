"""AdamW that keeps its two running means in eight bits, through the kernel of bitsandbytes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like.core.errors import ConfigError
from nemo_like.core.extras import require
from nemo_like.optim.adamw import AdamW, describe_parameters, split_by_decay
from nemo_like.optim.config import AdamW8bitConfig

logger = logging.getLogger(__name__)

_BLOCK = 256
SMALLEST = 4096
"""Parameters of fewer numbers (norms, biases) keep their means in fp32: the bytes are few, and they are sensitive."""


class EightBitAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with block-wise 8-bit states (Dettmers et al. 2022, arXiv:2110.02861).

    All state is plain tensors: ``step``; ``exp_avg`` and ``exp_avg_sq``, codes in uint8 with one scale for each 256 of
    them in ``exp_avg_scale`` and ``exp_avg_sq_scale``, or fp32 without scales for small parameters.

    Args:
        groups: Parameters, with ``weight_decay`` each.
        lr: Learning rate.
        betas: How much of the running mean of the gradient, and of its square, is kept each step.
        eps: Added to the root of the running mean square.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        require("bitsandbytes")
        self._functional: Any = require("bitsandbytes.functional")
        self._maps: dict[torch.device, tuple[Tensor, Tensor]] = {}
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def empty_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        if parameter.numel() < SMALLEST:
            return {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
            }
        device, blocks = parameter.device, -(-parameter.numel() // _BLOCK)
        # Zero is code 127 of the signed map and 0 of the other; with a scale of zero any code stands for it.
        return {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter, dtype=torch.uint8),
            "exp_avg_scale": torch.zeros(blocks, device=device),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.uint8),
            "exp_avg_sq_scale": torch.zeros(blocks, device=device),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "step" not in state:
                        state.update(self.empty_state(parameter))
                    state["step"] += 1
                    update = self._update_8bit if "exp_avg_scale" in state else _update_32bit
                    update(parameter, parameter.grad, state, group)
        return loss

    def _update_8bit(
        self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Any
    ) -> None:
        device = parameter.device
        if device not in self._maps:
            signed = self._functional.create_dynamic_map(signed=True).to(device)
            self._maps[device] = (
                signed,
                self._functional.create_dynamic_map(signed=False).to(device),
            )
        signed, unsigned = self._maps[device]
        self._functional.optimizer_update_8bit_blockwise(
            "adam",
            gradient.contiguous(),
            parameter,
            state["exp_avg"],
            state["exp_avg_sq"],
            *group["betas"],
            0.0,
            0.0,
            group["eps"],
            int(state["step"]),
            group["lr"],
            signed,
            unsigned,
            state["exp_avg_scale"],
            state["exp_avg_sq_scale"],
            group["weight_decay"],
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes states as they are; torch's own would turn codes into floating point."""
        parameters = [it for group in self.param_groups for it in group["params"]]
        for index, state in state_dict["state"].items():
            device = parameters[index].device
            self.state[parameters[index]] = {
                key: it if key == "step" else it.to(device) for key, it in state.items()
            }
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})


def _update_32bit(
    parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Any
) -> None:
    (beta_1, beta_2), step = group["betas"], int(state["step"])
    state["exp_avg"].lerp_(gradient.float(), 1 - beta_1)
    state["exp_avg_sq"].lerp_(gradient.float().square(), 1 - beta_2)
    root = (state["exp_avg_sq"] / (1 - beta_2**step)).sqrt_().add_(group["eps"])
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta_1**step))


class AdamW8bit(AdamW):
    """Makes an AdamW optimizer whose state takes two bytes a parameter instead of eight.

    Arguments and decay groups are those of :class:`nemo_like.optim.AdamW`.
    """

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a module's trainable parameters.

        Args:
            module: Already on the device where it trains.

        Raises:
            ConfigError: Its parameters are cut over ranks: a block of codes shares one scale, so slices of another
                number of ranks could not be made of these.
            MissingExtraError: bitsandbytes is not installed.
            ValueError: No parameter requires a gradient.
        """
        decayed, not_decayed = split_by_decay(module)
        if any(isinstance(it, DTensor) for it in (*decayed, *not_decayed)):
            raise ConfigError([f"optim=AdamW8bit: {AdamW8bitConfig.NOT_CUT}"])
        logger.info(
            "8-bit AdamW: %s parameters decay, %s do not",
            describe_parameters(decayed),
            describe_parameters(not_decayed),
        )
        return EightBitAdamW(
            self.make_groups(decayed, not_decayed),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
        )
