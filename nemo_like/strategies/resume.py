"""How a strategy saves and restores a run through the checkpoint folder of ``core.checkpoint``.

Lightning asks its strategy to save and load; what it hands over is split into tensors (weights, optimizer state, by
canonical names) and plain values. Lightning's own loop counters are not restored: a training loader covers the rest of
the run from an exact position, so all that Lightning has to know is the number of steps done.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import nemo_like
from nemo_like.core.checkpoint import Checkpoint, open_checkpoint, to_plain
from nemo_like.core.checkpoint_writer import CheckpointWriter, SaveOptions
from nemo_like.core.errors import CheckpointError
from nemo_like.core.model import Model

logger = logging.getLogger(__name__)

# Keys of Lightning's checkpoint dict that are stored as tensors, derived from the step, or not needed.
_DERIVED = {
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    "loops",
    "epoch",
    "global_step",
    "files",
}
_CHECKPOINT = "nemo_like_checkpoint"


def collect_optimizer_tensors(optimizer: Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """The state of an optimizer under ``<canonical parameter name>/<state name>``.

    Raises:
        CheckpointError: A state that is no tensor, which could only be pickled.
    """
    tensors = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"optimizer state {name}/{key} is {type(value).__name__}, only tensors can be saved: "
                    f"let {type(optimizer).__name__} keep it as a tensor"
                )
            tensors[f"{name}/{key}"] = value
    return tensors


def restore_optimizer(
    optimizer: Optimizer,
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    elsewhere: Collection[str] = (),
) -> None:
    """Fills the state of an optimizer; hyper-parameters stay those of the configuration.

    Args:
        optimizer: Over the parameters of ``module``.
        module: Its names are those of the checkpoint.
        checkpoint: Opened.
        elsewhere: Parameters that lie on other processes only, as pipeline stages.
    """
    parameters = dict(module.named_parameters())
    tensors: dict[str, Tensor] = {}
    others = []
    for full_name in checkpoint.tensor_names("optimizer"):
        name, _, key = full_name.rpartition("/")
        if name in elsewhere:
            others.append(full_name)
            continue
        parameter = parameters.get(name)
        # Adam's step counter is a scalar; other states have the shape and type of their parameter, unless the
        # optimizer says otherwise.
        like = torch.zeros(()) if key == "step" else parameter
        if parameter is not None and hasattr(optimizer, "empty_state"):
            like = optimizer.empty_state(parameter).get(key, parameter)
        if like is not None:
            tensors[full_name] = torch.zeros_like(like, requires_grad=False)
    if not tensors:
        return
    checkpoint.load_tensors("optimizer", tensors, elsewhere=others)
    index_of = {
        parameter: index
        for index, parameter in enumerate(
            p for group in optimizer.param_groups for p in group["params"]
        )
    }
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("/")
        state.setdefault(index_of[parameters[name]], {})[key] = tensor
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def save_run(
    checkpoint: Mapping[str, Any],
    folder: Path,
    *,
    writer: CheckpointWriter,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    options: SaveOptions | None = None,
) -> None:
    """Saves what Lightning collected as a checkpoint folder; every rank calls it.

    Args:
        checkpoint: Lightning's dict.
        folder: Where to.
        writer: Of the run.
        model: This rank's part of the weights by canonical name.
        optimizer: This rank's part of the optimizer state.
        options: Whether to wait until it is written, and what comes after.
    """
    state = {
        "step": int(checkpoint["global_step"]),
        "nemo_like_version": nemo_like.__version__,
        **{key: to_plain(value) for key, value in checkpoint.items() if key not in _DERIVED},
    }
    writer.save(
        folder,
        model=model,
        optimizer=optimizer,
        state=state,
        files=checkpoint.get("files", {}),
        options=options,
    )


def load_run(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """Opens a checkpoint folder as the dict that Lightning passes around while it restores; every rank calls it.

    Args:
        folder: The checkpoint.
        verify: Compare the hashes of its files; rank zero does so for all.

    Raises:
        CheckpointError: It is not what was saved; on all ranks.
    """
    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    fault: list[str | None] = [None]
    checkpoint: Checkpoint | None = None
    if not has_others or dist.get_rank() == 0:
        try:
            checkpoint = open_checkpoint(folder, verify=verify)
        except CheckpointError as error:
            fault[0] = str(error)
            if not has_others:
                raise
    if has_others:
        dist.broadcast_object_list(fault, 0)
    if fault[0] is not None:
        raise CheckpointError(fault[0])
    checkpoint = checkpoint or open_checkpoint(folder, verify=False)
    return {
        "pytorch-lightning_version": pl.__version__,
        "callbacks": {},
        **checkpoint.state,
        "lr_schedulers": [],
        "optimizer_states": [],
        _CHECKPOINT: checkpoint,
    }


def checkpoint_of(loaded: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint that :func:`load_run` opened."""
    checkpoint: Checkpoint = loaded[_CHECKPOINT]
    return checkpoint


def restore_progress(checkpoint: Checkpoint, module: Model) -> None:
    """Sets step counters and learning rates; nothing of the data, which is a position."""
    trainer = module.trainer
    step = checkpoint.step
    epoch_loop = trainer.fit_loop.epoch_loop
    optimizer_step = epoch_loop.manual_optimization.optim_step_progress.total
    optimizer_step.ready = optimizer_step.completed = step
    batches = epoch_loop.batch_progress
    batches.load_state_dict(
        {
            "total": dict.fromkeys(("ready", "started", "processed", "completed"), step),
            "current": dict.fromkeys(("ready", "started", "processed", "completed"), 0),
            "is_last_batch": False,
        }
    )
    for config in trainer.strategy.lr_scheduler_configs:
        scheduler = config.scheduler
        if not isinstance(scheduler, LambdaLR):
            raise CheckpointError(
                f"{type(scheduler).__name__}: only schedules that are a function of the step can be resumed"
            )
        scheduler.last_epoch = step
        rates = [
            base * factor(step)
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
    logger.info("resumed at step %d from %s", step, checkpoint.folder)
