"""An exponential moving average of the weights, kept as one more state of the optimizer.

As a state it is saved, restored and cut over ranks like Adam's moments, under ``<parameter name>/ema``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from nemo_like.core.checkpoint import Checkpoint
from nemo_like.core.errors import CheckpointError

EMA = "ema"
"""Name of the state."""


def warm_up_decay(decay: float, step: int) -> float:
    """How much of the average a step keeps: little in the beginning, when the weights are soon out of date.

    (1 + step) / (10 + step), as in TensorFlow's ``ExponentialMovingAverage`` with ``num_updates``, until that exceeds
    ``decay``: the average then spans about a tenth of the steps so far.

    Args:
        decay: After the warm-up.
        step: Optimizer steps of the run before this one.
    """
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_ema(
    optimizer: Optimizer, parameters: Iterable[Tensor], *, decay: float, step: int
) -> None:
    """Moves the averages towards the weights, after a step of the optimizer; the first one starts at the weights.

    Args:
        optimizer: Keeps the averages.
        parameters: What it updates; one that it has no state for has never moved and needs no average.
        decay: Share of the average that stays, after the warm-up.
        step: Optimizer steps of the run before this one.
    """
    averages, weights = [], []
    for parameter in parameters:
        state = optimizer.state.get(parameter)
        if not state:
            continue
        if EMA in state:
            averages.append(state[EMA])
            weights.append(parameter)
        else:
            state[EMA] = parameter.detach().clone()
    if averages:
        torch._foreach_lerp_(averages, weights, 1 - warm_up_decay(decay, step))


@torch.no_grad()
def exchange_ema(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Puts the averages where the weights are and the weights where the averages are; twice is as before, bit for bit.

    Args:
        optimizer: Keeps the averages.
        parameters: What it updates.
    """
    for parameter in parameters:
        average = optimizer.state.get(parameter, {}).get(EMA)
        if average is not None:
            kept = parameter.detach().clone()
            parameter.detach().copy_(average)
            average.copy_(kept)


def forget_ema(optimizer: Optimizer) -> None:
    """Drops averages that a checkpoint brought into a run without them, where they would not move any more."""
    for state in optimizer.state.values():
        state.pop(EMA, None)


def read_weights(
    checkpoint: Checkpoint, names: Sequence[str], *, weights: Literal["model", "ema"]
) -> dict[str, Tensor]:
    """Reads some weights of a checkpoint, or their averages where they have one, whole, on the CPU.

    Args:
        checkpoint: Opened.
        names: Which.
        weights: ``model`` or ``ema``. What was never trained has no average and is read as it is.

    Raises:
        CheckpointError: There are no averages, or no weight of a name.
    """
    averaged = _find_averaged(checkpoint) & set(names) if weights == "ema" else set()
    read = checkpoint.read_tensors("model", [name for name in names if name not in averaged])
    if averaged:
        averages = checkpoint.read_tensors("optimizer", [f"{name}/{EMA}" for name in averaged])
        read |= {name.rpartition("/")[0]: tensor for name, tensor in averages.items()}
    return {name: read[name] for name in names}


def _find_averaged(checkpoint: Checkpoint) -> set[str]:
    """Names of the weights that have an average."""
    suffix = f"/{EMA}"
    names = checkpoint.tensor_names("optimizer")
    averaged = {name.removesuffix(suffix) for name in names if name.endswith(suffix)}
    if not averaged:
        raise CheckpointError(
            f"{checkpoint.folder}: keeps no average of the weights, because its run had no optim.ema_decay; "
            "take weights=model"
        )
    return averaged
