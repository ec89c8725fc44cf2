"""The ranks of a run as a grid with named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_like.core.errors import ConfigError


def build_mesh(device_type: str, axes: Mapping[str, int]) -> DeviceMesh:
    """Lays all ranks out along named axes; called on every rank, with a process group set up.

    Args:
        device_type: ``cpu`` or ``cuda``.
        axes: Name -> size, slowest first: neighbouring ranks differ along the last one. An axis of size 1 is an axis
            like any other, and a world of one rank a mesh like any other.

    Raises:
        ValueError: The sizes do not multiply to the number of ranks.
    """
    world_size, product = dist.get_world_size(), math.prod(axes.values())
    if product != world_size:
        grid = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(f"{grid} is {product} ranks, there are {world_size}")
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def split_ranks(world_size: int, *, replicate: int) -> dict[str, int]:
    """The axes of hybrid sharding: copies of the model, and the ranks that share one.

    Args:
        world_size: Number of ranks.
        replicate: Number of copies.

    Raises:
        ConfigError: ``replicate`` does not divide the ranks; names the nearest numbers that do.
    """
    if world_size % replicate:
        divisors = [it for it in range(1, world_size + 1) if world_size % it == 0]
        below = [it for it in divisors if it < replicate][-1:]
        above = [it for it in divisors if it > replicate][:1]
        raise ConfigError(
            [
                f"replicate={replicate}: must divide the {world_size} ranks into equal copies; "
                f"nearest: {', '.join(map(str, below + above))}"
            ]
        )
    return {"replicate": replicate, "shard": world_size // replicate}
