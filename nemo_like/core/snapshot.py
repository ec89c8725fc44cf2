"""What one rank writes of a state, held in the memory of the host as the bytes of its safetensors file.

Who writes what is planned by torch.distributed.checkpoint, once: it knows slices (DTensor), sub-meshes and copies, and
spreads what several ranks hold over them. After that a snapshot is a copy into memory that is there already, and
training may go on while the bytes are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Piece:
    """A tensor, or a slice of one, that this rank writes."""

    name: str
    offsets: tuple[int, ...]
    """Where the slice begins in the whole tensor."""
    shape: tuple[int, ...]
    """Of the slice."""


def describe_layout(tensors: Mapping[str, Tensor]) -> list[tuple[Any, ...]]:
    """What a plan depends on: equal descriptions, equal plans."""
    return [
        (name, it.dtype, tuple(_local(it).shape), str(it.placements))
        if isinstance(it, DTensor)
        else (name, it.dtype, tuple(it.shape))
        for name, it in tensors.items()
    ]


def plan_pieces(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> list[Piece]:
    """Divides the writing among the ranks; every rank of the group calls it.

    Args:
        tensors: What this rank holds; alike on all ranks, or DTensors.
        group: The ranks; None is this process alone.

    Returns:
        What this rank writes.

    Raises:
        ValueError: The tensors do not fit together, as slices that overlap; on every rank.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner

    is_first = group is None or dist.get_rank(group) == 0
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    local: Any
    try:
        planner.set_up_planner(dict(tensors), None, is_first)
        local = planner.create_local_plan()
    except Exception as error:  # the other ranks wait for an answer
        local = f"{type(error).__name__}: {error}"
    plans: Any = [local]
    if group is not None:
        plans = [None] * dist.get_world_size(group) if is_first else None
        dist.gather_object(local, plans, group=group, group_dst=0)
    answers = _merge(planner, plans) if is_first else None
    received: list[Any] = [None]
    if group is not None:
        dist.scatter_object_list(received, answers, group=group, group_src=0)
    else:
        assert answers is not None
        received = answers
    mine = received[0]
    if isinstance(mine, str):
        raise ValueError(mine)
    chunks = [(it.index.fqn, it.tensor_data.chunk) for it in mine.items]
    return [Piece(name, tuple(chunk.offsets), tuple(chunk.sizes)) for name, chunk in chunks]


def _merge(planner: Any, plans: list[Any]) -> list[Any]:
    """Each rank's part of the common plan, or on each rank why there is none."""
    faults = [plan for plan in plans if isinstance(plan, str)]
    if faults:
        return faults[:1] * len(plans)
    try:
        return list(planner.create_global_plan(plans)[0])
    except ValueError as error:
        return [str(error)] * len(plans)


class Snapshot:
    """One safetensors file, before it is written.

    Args:
        pieces: What it holds.
        tensors: Where from, for shapes and types.

    Raises:
        ValueError: A tensor is not cut as the plan says, or twice.
        TypeError: A type that the format lacks.
    """

    def __init__(self, pieces: list[Piece], tensors: Mapping[str, Tensor]) -> None:
        parts = {it.name: _local(tensors[it.name]) for it in pieces}
        for it in pieces:
            if parts[it.name].shape != it.shape:
                raise ValueError(
                    f"{it.name}: this rank holds {tuple(parts[it.name].shape)}, its slice is {it.shape}"
                )
        if len(parts) < len(pieces):
            names = [it.name for it in pieces]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"{twice}: a rank holds two slices of one tensor, one can be written")
        offsets = {it.name: it.offsets for it in pieces}
        # The widest first: then every tensor is aligned.
        self.names = sorted(parts, key=lambda name: (-parts[name].itemsize, name))
        num_bytes = sum(part.nbytes for part in parts.values())
        is_on_gpu = any(part.is_cuda for part in parts.values())
        self.content = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_on_gpu)
        """(bytes,) uint8; what stands behind the header."""
        header: dict[str, Any] = {
            "__metadata__": {
                "DCP_SHARDING_INFO": json.dumps(
                    {name: {"saved_offsets": offsets[name]} for name in self.names}
                ),
                "DCP_VERSION": "1.0",
                "format": "pt",
            }
        }
        self._views = []
        start = 0
        for name in self.names:
            part = parts[name]
            if part.dtype not in _DTYPE_NAMES:
                raise TypeError(f"{name}: {part.dtype} has no place in a safetensors file")
            stop = start + part.nbytes
            header[name] = {
                "dtype": _DTYPE_NAMES[part.dtype],
                "shape": list(part.shape),
                "data_offsets": [start, stop],
            }
            self._views.append(self.content[start:stop].view(part.dtype).view(part.shape))
            start = stop
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.content.numel()

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the values of now."""
        sources = [_local(tensors[name]) for name in self.names]
        if sources:
            torch._foreach_copy_(self._views, sources, non_blocking=True)
            if any(it.is_cuda for it in sources):
                torch.cuda.current_stream().synchronize()


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
