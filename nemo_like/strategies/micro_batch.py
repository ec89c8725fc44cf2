"""The largest micro-batch that fits, found by trying; and what to do when memory runs out in the middle of a run.

A rank tries alone, so this is for strategies whose passes need no other rank. It starts from all that the rank computes
in a step and takes half as much as long as memory runs out. Nothing of the trials stays: a run that settles at 4 is the
run that was given 4.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng

from nemo_like.core.datamodule import DataModule
from nemo_like.core.errors import ConfigError, DeviceMemoryError
from nemo_like.strategies.planning.choice import USABLE, list_halves
from nemo_like.strategies.planning.size import format_bytes
from nemo_like.tracking.machine import measure_available_bytes, measure_peak_bytes, reset_peak

if TYPE_CHECKING:
    from nemo_like.strategies.strategy import StepStrategy

logger = logging.getLogger(__name__)

MEMORY_FILE = "micro_batch.json"
"""In the run folder: what was found, and for which devices."""
_STEPS_READ = 4  # their longest micro-batch is tried
# What comes after the trials, bytes a trained number: Adam's two moments in FP32, the most that an optimizer of ours
# keeps; the moving average; on a CPU the copy of weights and moments that a save in the background writes from.
_STATE_BYTES, _AVERAGE_BYTES, _COPY_BYTES = 8, 4, 12
_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory has run out, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


@contextmanager
def explain_out_of_memory(strategy: StepStrategy) -> Iterator[None]:
    """Says what helps where memory runs out in the middle of a run.

    Raises:
        DeviceMemoryError: Memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, DeviceMemoryError) or not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(_advise(strategy, error)) from error


def _advise(strategy: StepStrategy, error: BaseException) -> str:
    size, ways = strategy.micro_batch_size, []
    if size > 1:
        ways.append(f"strategy.micro_batch_size={size // 2}")
        if strategy.tries_alone and not strategy.finds_micro_batch:
            ways[-1] += ", or =auto, which tries what fits"
    if strategy.activation_checkpointing != "full":
        ways.append("strategy.activation_checkpointing=full, which computes more and keeps less")
    ways.append("a strategy that cuts the model over devices, see `nemo-like plan`")
    step = strategy.module.trainer.global_step + 1
    return (
        f"rank {strategy.global_rank}: memory ran out in step {step} with strategy.micro_batch_size={size} "
        f"({_first_line(error)}); what a step learns does not depend on these: {'; '.join(ways)}"
    )


@dataclass(frozen=True)
class Trial:
    """What came of one size."""

    size: int
    fits: bool
    peak_bytes: int
    """Most memory in use during the trial: of the device, or of the process on a CPU."""


def find_micro_batch_size(strategy: StepStrategy, trainer: pl.Trainer) -> int:
    """Finds the largest micro-batch that fits on all ranks, by halves from a rank's share of a step; the same on all.

    A run that is resumed on the same devices takes what it had. One collective, at the end.

    Args:
        strategy: Is set up; its ``micro_batch_size`` is that of the trial while one runs, and put back.
        trainer: Has a :class:`DataModule`, ready to be read.

    Returns:
        Samples.

    Raises:
        ConfigError: The trainer has no ``DataModule``, whose micro-batches follow the size.
        DeviceMemoryError: Not even one sample fits.
    """
    data: Any = getattr(trainer, "datamodule", None)
    if not isinstance(data, DataModule):
        raise ConfigError(
            [
                f"strategy.micro_batch_size=auto: needs a nemo_like DataModule, whose batches follow the size, and the "
                f"trainer has {type(data).__name__}; set a number"
            ]
        )
    path = Path(trainer.default_root_dir) / MEMORY_FILE
    purpose = _describe(strategy, data)
    if trainer.ckpt_path is not None:
        known = strategy.broadcast(_recall(path, purpose) if strategy.global_rank == 0 else None)
        if known is not None:
            logger.info("micro_batch_size=%d, as it was found for these devices (%s)", known, path)
            return int(known)
    share = -(-data.global_batch_size // strategy.data_parallel_size)
    trials = _search(strategy, data, share)
    largest = trials[-1].size if trials[-1].fits else 0
    chosen = _take_smallest(largest, strategy)
    for trial in trials:
        logger.info(
            "micro_batch_size=%d: %s, %s at the peak",
            trial.size,
            "fits" if trial.fits else "memory ran out",
            format_bytes(trial.peak_bytes),
        )
    if chosen == 0:
        raise DeviceMemoryError(
            f"strategy.micro_batch_size=auto: not even one sample fits on {purpose['device']} (rank "
            f"{strategy.global_rank}: {'did not' if largest == 0 else 'did'} fit); take shorter samples, "
            "strategy.activation_checkpointing=full, or a strategy that cuts the model, see `nemo-like plan`"
        )
    logger.info(
        "micro_batch_size=%d is taken, %d micro-batches a step on each of %d ranks",
        chosen,
        -(-share // chosen),
        strategy.data_parallel_size,
    )
    if strategy.global_rank == 0 and path.parent.is_dir():
        _remember(path, chosen, purpose, trials)
    return chosen


def _search(strategy: StepStrategy, data: DataModule, share: int) -> list[Trial]:
    """Trials from the largest size to the first that fits."""
    trials: list[Trial] = []
    kept = strategy.micro_batch_size
    with _leave_no_trace(strategy, data):
        try:
            for size in list_halves(share):
                strategy.micro_batch_size = size
                trials.append(_try(strategy, data, size))
                # Only here has the error with all that it held on to gone.
                _free(strategy)
                if trials[-1].fits:
                    break
        finally:
            strategy.micro_batch_size = kept
    return trials


def _try(strategy: StepStrategy, data: DataModule, size: int) -> Trial:
    micro_batch = strategy.batch_to_device(_read_longest(strategy, data), strategy.root_device)
    reset_peak(strategy.root_device)
    fits = True
    try:
        with _hold_back(strategy):
            # Twice: the second one finds the gradients of the first there, as all but the first of a step do.
            for _ in range(2):
                with strategy.step_precision.train_step_context(), strategy.activation_context():
                    loss_sum = strategy.compute_loss_sum(micro_batch)
                loss_sum.backward()
                del loss_sum
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        logger.debug("micro_batch_size=%d: %s", size, _first_line(error))
        fits = False
    return Trial(size, fits, measure_peak_bytes(strategy.root_device))


def _read_longest(strategy: StepStrategy, data: DataModule) -> Any:
    """The largest micro-batch of the next steps of this rank."""
    loader = data.train_dataloader()
    steps = list(itertools.islice(iter(loader), _STEPS_READ))
    return max(
        (micro_batch for step in steps for micro_batch in step.micro_batches),
        key=strategy.module.count_units,
    )


@contextmanager
def _hold_back(strategy: StepStrategy) -> Iterator[None]:
    """Takes away what the trials may not use: room for the optimizer's state, and some to spare.

    On a GPU it is taken. On a CPU, where Linux promises more memory than there is and later ends the process that asks
    for it, the address space gets a limit, so that the allocation fails which is too much.
    """
    model, device = strategy.module, strategy.root_device
    trained = sum(it.numel() for it in model.parameters() if it.requires_grad)
    state = trained * _STATE_BYTES
    if getattr(model.optim, "ema_decay", None) is not None:
        state += trained * _AVERAGE_BYTES
    if device.type == "cuda":
        spare = int((1 - USABLE) * torch.cuda.get_device_properties(device).total_memory)
        ballast = torch.empty(state + spare, dtype=torch.uint8, device=device)
        yield
        del ballast
        return
    import resource

    import psutil

    state += trained * _COPY_BYTES
    limits = resource.getrlimit(resource.RLIMIT_AS)
    usable = int(USABLE * measure_available_bytes()) // strategy.num_processes
    limit = psutil.Process().memory_info().vms + max(usable - state, 0)
    if limits[0] != resource.RLIM_INFINITY:
        limit = min(limit, limits[0] - state)
    resource.setrlimit(resource.RLIMIT_AS, (max(limit, 0), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextmanager
def _leave_no_trace(strategy: StepStrategy, data: DataModule) -> Iterator[None]:
    """Puts back what trials change: random generators, buffers, gradients, figures, the place in the data."""
    model = strategy.module
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    metrics, position = dict(model.step_metrics), data.position
    with isolate_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
            model.step_metrics, data.position = metrics, position


def _free(strategy: StepStrategy) -> None:
    for parameter in strategy.module.parameters():
        parameter.grad = None
    gc.collect()
    if strategy.root_device.type == "cuda":
        torch.cuda.empty_cache()


def _take_smallest(size: int, strategy: StepStrategy) -> int:
    if strategy.world_size == 1:
        return size
    smallest = torch.tensor(size, device=strategy.root_device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return int(smallest)


def _describe(strategy: StepStrategy, data: DataModule) -> dict[str, Any]:
    """What a size was found for; it holds as long as all of this stays."""
    device, name = strategy.root_device, "cpu"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device)
        name, memory = there.name, there.total_memory
    return {
        "device": f"{name}, {format_bytes(memory)}",
        "ranks": strategy.world_size,
        "global_batch_size": data.global_batch_size,
        "precision": str(strategy.precision_plugin.precision),
        "activation_checkpointing": strategy.activation_checkpointing,
        "activation_offload": strategy.activation_offload,
    }


def _recall(path: Path, purpose: dict[str, Any]) -> int | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        before, size = found["found_for"], int(found["micro_batch_size"])
    except (ValueError, KeyError, TypeError):
        logger.warning("%s cannot be read; the micro-batch is sought again", path)
        return None
    changes = [key for key in purpose if before.get(key) != purpose[key]]
    if changes:
        said = ", ".join(f"{key}: {purpose[key]}, it was {before.get(key)}" for key in changes)
        logger.info("the micro-batch is sought again, because of another %s", said)
        return None
    return size if size >= 1 else None


def _remember(path: Path, size: int, purpose: dict[str, Any], trials: list[Trial]) -> None:
    tried = [vars(trial) for trial in trials]
    found = {"micro_batch_size": size, "found_for": purpose, "tried": tried}
    hidden = path.with_name(f".{path.name}.new")
    hidden.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    os.replace(hidden, path)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{lines[0]:.200}" if lines else type(error).__name__
