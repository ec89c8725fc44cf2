"""Bringing what each rank has measured to all of them."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

Item = TypeVar("Item")


def gather_from_ranks(item: Item, *, world_size: int) -> list[Item]:
    """What every rank hands in, by rank, on every rank; all of them must call it.

    Args:
        item: Plain lists, dicts and numbers.
        world_size: How many ranks share the work; 1 needs no process group.

    Raises:
        RuntimeError: The process group has another size, or there is none.
    """
    if world_size == 1:
        return [item]
    there_are = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if there_are != world_size:
        raise RuntimeError(
            f"world_size={world_size}: the work is shared by as many ranks, but the process group has {there_are}"
        )
    items: list[Item] = [item] * world_size
    dist.all_gather_object(items, item)
    return items
