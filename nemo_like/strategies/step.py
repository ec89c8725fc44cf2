"""One optimizer step of one rank: every micro-batch forward and backward, gradients left scaled.

The loss of a step is the sum over all targets of all micro-batches and ranks, divided by how many there are; so it does
not matter how the step was cut. The count follows from the batches alone and is known before the first forward pass,
which lets the scale go into the loss instead of into the finished gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from nemo_like.core.datamodule import StepBatch
from nemo_like.core.model import Model
from nemo_like.core.seed import seed_step


def run_step(
    model: Model,
    batch: StepBatch,
    *,
    precision: Precision,
    compute_loss_sum: Callable[[Any], Tensor],
    without_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
    rank: int = 0,
    size: int = 1,
    group: dist.ProcessGroup | None = None,
    device: torch.device,
) -> Tensor:
    """Runs all micro-batches of a step and leaves the gradients of its mean loss.

    Args:
        model: Whose loss it is; its ``step_metrics`` are filled.
        batch: This rank's share of the step.
        precision: Lightning's plugin: autocast, loss scaling.
        compute_loss_sum: ``model.compute_loss_sum``, or a wrapper of it whose backward communicates.
        without_sync: Context in which a backward does not communicate; entered for all micro-batches but the last.
        rank: This process among the data-parallel ones.
        size: How many data-parallel processes average their gradients.
        group: Their process group; None is the default group.
        device: Where counts are summed.

    Returns:
        The mean loss over all targets of all ranks, without gradient; a scalar.
    """
    if model.seed is not None:
        seed_step(model.seed, model.trainer.global_step, rank)
    micro_batches = batch.micro_batches
    model.step_sums = {}
    num_targets, units = count_step(model, batch, size=size, group=group, device=device)
    # Averaging over ranks, which data parallelism does, must not divide a sum that is divided already.
    scale = size / num_targets
    total: Tensor | None = None
    for index, micro_batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with nullcontext() if is_last else without_sync():
            with precision.train_step_context():
                loss_sum = compute_loss_sum(micro_batch)
            precision.backward(precision.pre_backward(loss_sum * scale, model), model, None)
        part = loss_sum.detach().double()
        total = part if total is None else total + part
    assert total is not None, "a step has at least one micro-batch"
    return note_step(model, total, num_targets, units, size=size, group=group)


def note_step(
    model: Model,
    total: Tensor,
    num_targets: Tensor,
    units: Tensor | float,
    *,
    size: int,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Makes the mean loss of a step known.

    Args:
        model: Its ``step_metrics`` are filled, with the means of its ``step_sums`` besides.
        total: The sum of the loss over the targets of this rank; float64.
        num_targets: Over all ranks, as :func:`count_step` gives them.
        units: Likewise.
        size: How many data-parallel processes there are.
        group: Their process group.

    Returns:
        The mean loss over all targets of all ranks; a scalar.
    """
    model.nonfinite.share = total.clone() if size > 1 else total
    sums, model.step_sums = model.step_sums, {}
    if sums:
        total = torch.stack([total, *sums.values()])
    if size > 1:
        dist.all_reduce(total, group=group)
    if sums:
        for name, mean in zip(sums, (total[1:] / num_targets).float(), strict=True):
            model.step_metrics[f"train/{name}"] = mean
        total = total[0]
    mean = (total / num_targets).float()
    model.step_metrics["train/loss"] = mean
    model.step_metrics["train/units"] = units
    return mean


def count_step(
    model: Model,
    batch: StepBatch,
    *,
    size: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device,
) -> tuple[Tensor, Tensor | float]:
    """Counts the targets and the units (tokens, frames) of a step over all data-parallel ranks.

    Returns:
        The targets, float32, at least 1, so that a step in which nothing is a target has loss 0 and not nan; and
        the units.
    """
    targets = model.count_targets(batch.micro_batches[0])
    for micro_batch in batch.micro_batches[1:]:
        targets = targets + model.count_targets(micro_batch)
    units = sum(model.count_units(micro_batch) for micro_batch in batch.micro_batches)
    if size == 1:
        return targets.to(device).clamp(min=1).float(), units
    counts = torch.stack([targets.to(device), torch.tensor(units, device=device)])
    dist.all_reduce(counts, group=group)
    return counts[0].clamp(min=1).float(), counts[1]
