"""Megatron-Core on a machine without a GPU: the rehearsal of a run, over gloo.

Megatron-Core asks for CUDA in some hundred places, but only as the device of a tensor and as the owner of a random
generator. Inside :func:`cuda_on_cpu` both are answered by the CPU. The context is entered around each call into
Megatron-Core, only where no GPU is, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import logging
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaIsCpu(TorchFunctionMode):
    """Turns every request for a CUDA tensor into one for a CPU tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args = tuple("cpu" if _is_cuda(argument) else argument for argument in args)
        return func(*args, **kwargs)


def _do_nothing(*arguments: Any, **options: Any) -> None:
    """Of what a CPU need not do: it has no queue to wait for."""


def _cpu_device() -> torch.device:
    return torch.device("cpu")


def _get_state(*arguments: Any, **options: Any) -> Tensor:
    return torch.get_rng_state()


def _set_state(state: Tensor, *arguments: Any, **options: Any) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


_RANDOM = "megatron.core.tensor_parallel.random"
_REPLACEMENTS: tuple[tuple[str, str, Any], ...] = (
    # Named as the device of most tensors that Megatron-Core makes itself.
    ("torch.cuda", "current_device", _cpu_device),
    # Called after each exchange between pipeline stages.
    ("torch.cuda", "synchronize", _do_nothing),
    # Dropout inside tensor-parallel regions has a generator of its own, kept as a state of CUDA's.
    ("torch.cuda", "get_rng_state", _get_state),
    ("torch.cuda", "manual_seed", _seed),
    (_RANDOM, "_get_cuda_rng_state", _get_state),
    (_RANDOM, "_set_cuda_rng_state", _set_state),
    # Set so that nobody is told to tune the queues of a GPU.
    (
        "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
        "warned",
        True,
    ),
)


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """A context in which what Megatron-Core asks of CUDA is done by the CPU."""
    random_logger = logging.getLogger(_RANDOM)
    level = random_logger.level
    owners = [pkgutil.resolve_name(owner) for owner, _, _ in _REPLACEMENTS]
    names = [name for _, name, _ in _REPLACEMENTS]
    originals = [getattr(owner, name) for owner, name in zip(owners, names, strict=True)]
    try:
        for owner, (_, name, replacement) in zip(owners, _REPLACEMENTS, strict=True):
            setattr(owner, name, replacement)
        # It warns when the CPU's generator moves during dropout; here it is the one that has to.
        random_logger.setLevel(logging.ERROR)
        with _CudaIsCpu():
            yield
    finally:
        random_logger.setLevel(level)
        for owner, name, original in zip(owners, names, originals, strict=True):
            setattr(owner, name, original)
