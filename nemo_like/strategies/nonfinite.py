"""What a strategy does with a step whose loss or gradient is not finite: nothing, and it says so."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from nemo_like.core.datamodule import StepBatch
from nemo_like.core.model import Model
from nemo_like.core.nonfinite import describe_ids

logger = logging.getLogger(__name__)

LOWEST_SCALE = 1.0
"""Of FP16's loss scale: below it, gradients that do not fit would not fit unscaled either."""

_MOST_RANKS = 8
_QUIET_AFTER = 10
"""Steps in a row that are each reported; then it is every hundredth."""


def judge_step(
    model: Model, loss: float, norm: float, *, scale: Callable[[], float] | None = None
) -> tuple[bool, bool]:
    """Says whether a step may change anything, and makes its figures known; all ranks see the same.

    Args:
        model: Its ``step_metrics`` are filled and its steps that are left out are counted.
        loss: The mean over all targets of all ranks.
        norm: Of the gradient before clipping, over all ranks.
        scale: Gives FP16's loss scale. Gradients that do not fit because of it are its ordinary business: such a step
            changes nothing either, but is not counted.

    Returns:
        Whether loss and gradient are finite, and whether the step is one to count as left out.
    """
    is_finite = math.isfinite(loss + norm)
    is_overflow = not is_finite and math.isfinite(loss) and scale is not None
    is_left_out = not is_finite and not (
        is_overflow and scale is not None and scale() > LOWEST_SCALE
    )
    steps, metrics = model.nonfinite, model.step_metrics
    if is_left_out:
        steps.note(model.trainer.global_step + 1)
    elif is_finite:
        steps.in_a_row = 0
    if not is_finite:
        # Where it is the first step of a run, torch takes the schedule for one that is called too early.
        warnings.filterwarnings(
            "ignore", message=r"Detected call of `lr_scheduler.step\(\)` before"
        )
    metrics["train/loss"], metrics["train/grad_norm"] = loss, norm
    if steps.total:
        metrics["train/skipped"] = float(steps.total)
    return is_finite, is_left_out


def update_scale(scaler: torch.amp.GradScaler, *, is_finite: bool, is_left_out: bool) -> None:
    """Ends a step of FP16's loss scaler.

    Args:
        scaler: It has unscaled the gradients.
        is_finite: As :func:`judge_step` says.
        is_left_out: Likewise; the scale has no part in such a step and stays.
    """
    if is_finite:
        scaler.update()
        return
    scale = scaler.get_scale()
    # A scale that is given takes the place of what unscaling found, which under sharding may differ between ranks.
    if is_left_out:
        scaler.update(scale)
        return
    scaler.update(max(LOWEST_SCALE, scale * scaler.get_backoff_factor()))
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 0})


def report_left_out(model: Model, batch: StepBatch, *, rank: int) -> None:
    """Says which step changed nothing and what it read; called on all ranks.

    Args:
        model: Its figures are those of the step.
        batch: This rank's share of the step.
        rank: This process among the data-parallel ones.
    """
    steps = model.nonfinite
    if steps.in_a_row > _QUIET_AFTER and steps.in_a_row % 100:
        return
    share = steps.share
    is_suspect = share is not None and not math.isfinite(float(share))
    mine = (rank, is_suspect, describe_ids(batch.sample_ids))
    everyone = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    # Ranks that share a model read the same.
    suspects = {it[0]: it[2] for it in everyone if it[1]} or {it[0]: it[2] for it in everyone}
    read = "; ".join(f"rank {it}: {suspects[it]}" for it in sorted(suspects)[:_MOST_RANKS])
    logger.warning(
        "step %d changed nothing (%d so far): loss %g, gradient norm %g, data position %d, samples of %s",
        steps.last,
        steps.total,
        float(model.step_metrics["train/loss"]),
        float(model.step_metrics["train/grad_norm"]),
        batch.position,
        read,
    )
