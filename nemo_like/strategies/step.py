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
    targets = torch.stack([model.count_targets(micro_batch) for micro_batch in micro_batches]).sum()
    units = sum(model.count_units(micro_batch) for micro_batch in micro_batches)
    counts = torch.stack([targets.to(device), torch.tensor(units, device=device)])
    if size > 1:
        dist.all_reduce(counts, group=group)
    # A step in which nothing is a target has loss 0 and gradient 0, not nan.
    num_targets = counts[0].clamp(min=1)
    # Averaging over ranks, which data parallelism does, must not divide a sum that is divided already.
    scale = size / num_targets.double()
    total = torch.zeros((), device=device, dtype=torch.float64)
    for index, micro_batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with nullcontext() if is_last else without_sync():
            with precision.train_step_context():
                loss_sum = compute_loss_sum(micro_batch)
            loss = precision.pre_backward((loss_sum * scale).to(loss_sum.dtype), model)
            precision.backward(loss, model, None)
        total += loss_sum.detach()
    if size > 1:
        dist.all_reduce(total, group=group)
    mean = (total / num_targets).float()
    model.step_metrics["train/loss"] = mean
    # Every rank pads to the same shapes, so counting here needs no further communication.
    model.step_metrics["train/units"] = counts[1]
    return mean
