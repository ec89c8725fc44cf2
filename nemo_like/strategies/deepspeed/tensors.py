"""ZeRO's flat pieces as slices of named parameters, and back.

ZeRO lays the parameters of a group end to end and gives each rank a stretch of the line, so what a rank holds of a
parameter is any run of its elements. A checkpoint holds slices of rows (DTensors). Between the two each parameter is
put together on its own and let go again: a rank never holds more than its share and one whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from nemo_like.core.checkpoint import Checkpoint


@dataclass(frozen=True)
class Place:
    """Where this rank keeps its part of a parameter."""

    flat: Tensor
    """What the optimizer updates: this rank's stretch of a group."""
    offset: int
    """First element of the part in ``flat``."""
    start: int
    """First element of the part in the flattened parameter."""
    count: int
    """Elements of the part; 0 where the parameter lies on other ranks."""


@dataclass(frozen=True)
class Layout:
    """How ZeRO cut the trainable parameters, as seen from this rank."""

    flats: list[Tensor]
    """Every stretch that the optimizer updates here."""
    places: dict[str, Place]
    """By canonical parameter name; every parameter, on every rank."""


def read_layout(engine: Any, module: nn.Module) -> Layout:
    """Asks DeepSpeed where it put what; of all our code only this knows its data structures.

    Args:
        engine: Around ``module``.
        module: Without the wrapper, so that its names are canonical.
    """
    zero = engine.optimizer
    trainable = {name: it for name, it in module.named_parameters() if it.requires_grad}
    if engine.zero_optimization_stage() == 3:
        flats = list(zero.fp32_partitioned_groups_flat)
        places = {}
        for name, parameter in trainable.items():
            group, offset, padded = zero.grad_position[zero.get_param_id(parameter)]
            start = dist.get_rank() * padded
            places[name] = Place(flats[group], offset, start, _held(parameter, start, padded))
        return Layout(flats, places)
    flats = list(zero.single_partition_of_fp32_groups)
    places = {}
    for name, parameter in trainable.items():
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            places[name] = Place(flats[0], 0, 0, 0)
        else:
            here, there = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
            flat = flats[mapping.param_group_index]
            places[name] = Place(flat, here.start, there.start, here.numel)
    return Layout(flats, places)


@contextmanager
def leave_out(engine: Any) -> Iterator[None]:
    """Has the engine treat a step as one whose gradients are not finite: forget them and change nothing."""
    zero = engine.optimizer
    # What the engine judges a step by: one figure for all parameters, or one for each group of them.
    is_third = engine.zero_optimization_stage() == 3
    name = "_get_norm_groups" if is_third else "scaled_global_norm"
    setattr(zero, name, lambda: [torch.inf] if is_third else torch.inf)
    try:
        yield
    finally:
        delattr(zero, name)


def is_partitioned(parameter: Tensor) -> bool:
    """Whether a parameter is cut over the ranks (stage 3)."""
    return hasattr(parameter, "ds_tensor")


def _size_of(parameter: Tensor) -> torch.Size:
    """The whole shape; a partitioned parameter looks empty between two passes."""
    return torch.Size(parameter.ds_shape) if is_partitioned(parameter) else parameter.shape  # type: ignore[attr-defined]


def _held(parameter: Tensor, start: int, padded: int) -> int:
    """Elements of a part without the zeros that fill up those of the last ranks."""
    return max(0, min(padded, _size_of(parameter).numel() - start))


def _join(part: Tensor, start: int, size: torch.Size, device: torch.device) -> Tensor:
    """A whole parameter from the parts of all ranks, on all ranks."""
    whole = torch.zeros(size.numel(), device=device, dtype=part.dtype)
    whole[start : start + part.numel()].copy_(part)
    dist.all_reduce(whole)
    return whole.view(size)


def _cut_rows(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows; all of it where there are too few rows for all ranks."""
    rows = whole.chunk(mesh.size()) if whole.ndim else ()
    if len(rows) < mesh.size():
        return whole.clone()
    local = rows[mesh.get_local_rank()].clone()
    shape, stride = whole.shape, torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def join_weights(module: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a partitioned module whole, one after the other, on every rank.

    Args:
        module: Without ZeRO's wrapper.
        device: Where the ranks talk.
    """
    for name, tensor in module.state_dict(keep_vars=True).items():
        if is_partitioned(tensor):
            part = tensor.ds_tensor.detach().view(-1)
            start = dist.get_rank() * part.numel()
            held = part[: _held(tensor, start, part.numel())]
            yield name, _join(held, start, _size_of(tensor), device)
        else:
            yield name, tensor.detach()


def collect_weights(module: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    """The weights of a partitioned module, cut by rows.

    Args:
        module: Without ZeRO's wrapper.
        mesh: All ranks in a row.
    """
    device = torch.device(mesh.device_type)
    return {name: _cut_rows(whole, mesh) for name, whole in join_weights(module, device)}


def collect_states(
    layout: Layout, optimizer: Optimizer, module: nn.Module, mesh: DeviceMesh
) -> dict[str, Tensor]:
    """The optimizer state under ``<canonical parameter name>/<state name>``, cut by rows.

    Args:
        layout: Of ``module``.
        optimizer: The one that ZeRO runs over the stretches.
        module: Without the wrapper.
        mesh: All ranks in a row.
    """
    device = torch.device(mesh.device_type)
    parameters = dict(module.named_parameters())
    states = optimizer.state.get(layout.flats[0], {})
    tensors: dict[str, Tensor] = {}
    for name, place in layout.places.items():
        for key, value in states.items():
            if value is None:
                continue
            if value.ndim == 0:
                tensors[f"{name}/{key}"] = value.clone()
                continue
            part = optimizer.state[place.flat][key].narrow(0, place.offset, place.count)
            whole = _join(part, place.start, _size_of(parameters[name]), device)
            tensors[f"{name}/{key}"] = _cut_rows(whole, mesh)
    return tensors


def restore_states(
    layout: Layout,
    optimizer: Optimizer,
    module: nn.Module,
    mesh: DeviceMesh,
    checkpoint: Checkpoint,
) -> None:
    """Fills the optimizer state from a checkpoint of any plan; hyper-parameters stay those of the configuration.

    Args:
        layout: Of ``module``.
        optimizer: The one that ZeRO runs over the stretches.
        module: Without the wrapper.
        mesh: All ranks in a row.
        checkpoint: Opened.
    """
    parameters = dict(module.named_parameters())
    tensors: dict[str, Tensor] = {}
    for full_name in checkpoint.tensor_names("optimizer"):
        name, _, key = full_name.rpartition("/")
        if name in layout.places:
            size = torch.Size() if key == "step" else _size_of(parameters[name])
            # Takes no memory until rows of it are copied.
            blank = torch.zeros((), device=mesh.device_type).expand(size)
            tensors[full_name] = _cut_rows(blank, mesh)
    if not tensors:
        return
    checkpoint.load_tensors("optimizer", tensors)
    steps = [tensor for full_name, tensor in tensors.items() if full_name.endswith("/step")]
    keys = sorted({full_name.rpartition("/")[2] for full_name in tensors} - {"step"})
    for flat in layout.flats:
        state: dict[str, Tensor] = {key: torch.zeros_like(flat) for key in keys}
        if steps:
            state["step"] = torch.stack(steps).max().to(flat.device)
        optimizer.state[flat] = state
    while tensors:
        full_name, tensor = tensors.popitem()
        name, _, key = full_name.rpartition("/")
        if key != "step":
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            place = layout.places[name]
            part = whole.flatten()[place.start : place.start + place.count]
            optimizer.state[place.flat][key].narrow(0, place.offset, place.count).copy_(part)
