"""Muon for the matrices inside a network, AdamW for everything else, in one optimizer.

Muon moves a matrix by its momentum with all singular values brought near 1 (Keller Jordan et al. 2024, "Muon: An
optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon). In exact arithmetic the steps are
those of ``torch.optim.Muon``, which computes the iteration in BF16 everywhere; this one does so only where BF16 is
quick, computes matrices of one shape together where that is quicker, and keeps AdamW's parameters in the same
optimizer, so that a run has one state and one schedule.
"""

# Shapes: N = matrices that are computed together, R = rows, C = columns, R <= C.

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from nemo_like.optim.adamw import describe_parameters, has_fused_adamw
from nemo_like.optim.config import LrAdjustment, MuonConfig, refuse_faults
from nemo_like.optim.groups import group_parameters, match_names
from nemo_like.optim.newton_schulz import orthogonalize

logger = logging.getLogger(__name__)

# Elements that are stacked at most: small matrices fill a GPU together, large ones do alone, and a stack takes memory.
_MAX_STACKED = 2**26


def _adjust_lr(lr: float, adjust_lr_fn: LrAdjustment, rows: int, columns: int) -> float:
    """Learning rate of an orthogonal step for a matrix of this shape."""
    if (
        adjust_lr_fn == "match_rms_adamw"
    ):  # Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2
        return lr * 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / columns
    return lr * math.sqrt(max(1, ratio) if adjust_lr_fn == "original" else ratio)


def _choose_dtype(parameter: Tensor) -> torch.dtype:
    """BF16 where it is quick, otherwise at least FP32."""
    from nemo_like.core.precision import has_fast_bf16  # it imports Lightning, which takes seconds

    if parameter.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if has_fast_bf16(parameter.device.type) else torch.float32


def _batch_by_shape(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Cuts matrices into lists of one shape (up to transposition), device and dtype that are computed together."""
    by_shape: dict[tuple[Any, ...], list[Tensor]] = {}
    for parameter in parameters:
        key = (*sorted(parameter.shape), parameter.device, parameter.dtype)
        by_shape.setdefault(key, []).append(parameter)
    for same in by_shape.values():
        # A CPU computes one product after the other anyway; stacking only costs it copies and cache.
        size = 1 if same[0].device.type == "cpu" else max(1, _MAX_STACKED // same[0].numel())
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _gather(matrix: Tensor) -> Tensor:
    """A matrix that is cut over ranks, whole: only whole ones can be made orthogonal."""
    # Asked by the method, because importing the class would take longer than all of this module.
    whole: Tensor = matrix.full_tensor() if hasattr(matrix, "full_tensor") else matrix
    return whole


def _cut_like(parameter: Tensor, matrix: Tensor) -> Tensor:
    """This rank's slice of a whole matrix, if the parameter is cut over ranks; all ranks computed the same."""
    if not hasattr(parameter, "full_tensor"):
        return matrix
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(matrix.contiguous(), mesh, placements, src_data_rank=None)


class MuonOptimizer(torch.optim.Optimizer):
    """Muon and AdamW in one; each group says by ``algorithm`` which of the two it gets.

    Args:
        groups: Parameter groups with ``params``, ``algorithm``, ``lr``, ``weight_decay`` and

            - ``muon``: ``momentum``, ``nesterov``, ``ns_steps``, ``adjust_lr_fn``, for matrices only;
            - ``adamw``: ``betas``, ``eps``, ``fused``.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["algorithm"] == "muon" and parameter.ndim != 2:
                    raise ValueError(
                        f"a parameter of shape {tuple(parameter.shape)} is no matrix: put it into an adamw group"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves every parameter that has a gradient.

        Args:
            closure: Computes gradients and gives the loss; Lightning passes one.

        Returns:
            What ``closure`` gave.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["algorithm"] == "muon":
                for same in _batch_by_shape(parameters):
                    self._step_muon(same, group)
            elif parameters:
                self._step_adamw(parameters, group)
        return loss

    def _step_muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Moves matrices of one shape, up to transposition."""
        lr, momentum = group["lr"], group["momentum"]
        updates = []
        for parameter in parameters:
            gradient, state = parameter.grad, self.state[parameter]
            assert gradient is not None, "step() takes only parameters with a gradient"
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
            update = _gather(update)
            updates.append(update if update.size(0) <= update.size(1) else update.mT)
        updates_NRC = orthogonalize(
            torch.stack(updates), steps=group["ns_steps"], dtype=_choose_dtype(parameters[0])
        )
        for parameter, update in zip(parameters, updates_NRC, strict=True):
            rows, columns = parameter.shape
            adjusted_lr = _adjust_lr(lr, group["adjust_lr_fn"], rows, columns)
            parameter.mul_(1 - lr * group["weight_decay"])
            update = update if rows <= columns else update.mT
            parameter.add_(_cut_like(parameter, update), alpha=-adjusted_lr)

    def _step_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Moves parameters by torch's own AdamW, of which this keeps the state."""
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                # A counter beside the weights where the kernel reads it there, as torch's class does.
                device = parameter.device if group["fused"] else None
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"] or None,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class Muon:
    """Makes an optimizer of Muon and AdamW.

    Muon gets every matrix but embeddings (tied output weights among them), output heads, and what
    ``adamw_parameters`` names; AdamW gets those and all norms, biases and convolutions. Matrices and convolutions
    decay; norms, biases and embeddings do not.

    Args:
        lr: Peak learning rate of Muon.
        momentum: How much of the running mean of the gradient is kept each step.
        nesterov: Look ahead by one more step of momentum.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: How the step depends on the shape of a matrix, as in ``torch.optim.Muon``.
        weight_decay: Decoupled decay, times the learning rate of each algorithm, every step.
        adamw_lr: Peak learning rate of AdamW.
        betas: Of AdamW.
        eps: Of AdamW.
        adamw_parameters: Globs of names of further parameters for AdamW.
        ema_decay: Of the moving average of the weights (:mod:`nemo_like.optim.ema`); None keeps none.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(
        self,
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: LrAdjustment = "original",
        weight_decay: float = 0.1,
        adamw_lr: float = 3e-3,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
        adamw_parameters: Sequence[str] = (),
        ema_decay: float | None = None,
    ) -> None:
        config = MuonConfig(
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            weight_decay=weight_decay,
            adamw_lr=adamw_lr,
            betas=list(betas),
            eps=eps,
            adamw_parameters=list(adamw_parameters),
            ema_decay=ema_decay,
        )
        refuse_faults(config)
        self.ema_decay = ema_decay
        self.muon = {
            "algorithm": "muon",
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self.adamw = {
            "algorithm": "adamw",
            "lr": adamw_lr,
            "betas": (betas[0], betas[1]),
            "eps": eps,
        }
        self.weight_decay = weight_decay
        self.adamw_parameters = list(adamw_parameters)

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a module's trainable parameters.

        Args:
            module: Already on the device where it trains.

        Raises:
            ValueError: No parameter requires a gradient, none is a matrix for Muon, or a glob of
                ``adamw_parameters`` matches none of the matrices.
        """
        groups = group_parameters(module)
        excluded = match_names(groups.hidden_matrices, self.adamw_parameters)
        matrices = [p for name, p in groups.hidden_matrices.items() if name not in excluded]
        decayed = [
            *(p for name, p in groups.hidden_matrices.items() if name in excluded),
            *groups.other_decayed.values(),
        ]
        not_decayed = list(groups.not_decayed.values())
        if not matrices:
            raise ValueError(
                f"{type(module).__name__} has no matrix for Muon besides embeddings and output head: use AdamW"
            )
        is_fused = has_fused_adamw([*decayed, *not_decayed])
        logger.info(
            "Muon (%s): %s parameters; AdamW (%s): %s parameters decay, %s do not",
            str(_choose_dtype(matrices[0])).removeprefix("torch."),
            describe_parameters(matrices),
            "fused" if is_fused else "not fused",
            describe_parameters(decayed),
            describe_parameters(not_decayed),
        )
        adamw_group = {**self.adamw, "fused": is_fused}
        candidates: list[dict[str, Any]] = [
            {"params": matrices, **self.muon},
            {"params": decayed, "weight_decay": self.weight_decay, **adamw_group},
            {"params": not_decayed, "weight_decay": 0.0, **adamw_group},
        ]
        return MuonOptimizer([group for group in candidates if group["params"]])
