"""AdamW that keeps its two running means in eight bits, through the kernel of bitsandbytes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like.core.errors import ConfigError
from nemo_like.core.extras import require
from nemo_like.optim.adamw import describe_parameters
from nemo_like.optim.config import AdamW8bitConfig, refuse_faults
from nemo_like.optim.groups import group_parameters

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


class AdamW8bit:
    """Makes an AdamW optimizer whose state takes two bytes a parameter instead of eight.

    Decay groups are those of :class:`nemo_like.optim.AdamW`.

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
            AdamW8bitConfig(
                lr=lr, betas=list(betas), eps=eps, weight_decay=weight_decay, ema_decay=ema_decay
            )
        )
        self.lr, self.eps, self.weight_decay, self.ema_decay = lr, eps, weight_decay, ema_decay
        self.betas = (betas[0], betas[1])

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
        groups = group_parameters(module)
        decayed = [*groups.hidden_matrices.values(), *groups.other_decayed.values()]
        not_decayed = list(groups.not_decayed.values())
        if any(isinstance(it, DTensor) for it in (*decayed, *not_decayed)):
            raise ConfigError([f"optim=AdamW8bit: {AdamW8bitConfig.NOT_CUT}"])
        logger.info(
            "8-bit AdamW: %s parameters decay, %s do not",
            describe_parameters(decayed),
            describe_parameters(not_decayed),
        )
        return EightBitAdamW(
            [
                {"params": parameters, "weight_decay": weight_decay}
                for parameters, weight_decay in ((decayed, self.weight_decay), (not_decayed, 0.0))
                if parameters
            ],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
        )
