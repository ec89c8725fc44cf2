"""Requests that wait for a row: who goes first."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from .handle import Handle


class WaitingQueue:
    """Waiting requests in the order of their priority, which grows while they wait.

    All grow alike, so the order of two never changes and is known on arrival: a step of priority is worth
    ``ageing_s`` seconds. A request is therefore overtaken only by those that come less than ``ageing_s`` times the
    difference in priority after it, and nobody waits forever.

    Args:
        ageing_s: Seconds that a step of priority is worth.
    """

    def __init__(self, *, ageing_s: float) -> None:
        self.ageing_s = ageing_s
        self._heap: list[tuple[float, int, Handle]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, handle: Handle) -> None:
        """Adds one; of two alike the earlier stays first."""
        key = handle.arrived_s - handle.priority * self.ageing_s
        heapq.heappush(self._heap, (key, self._count, handle))
        self._count += 1

    def pop(self) -> Handle:
        """Takes the first."""
        return heapq.heappop(self._heap)[-1]

    def take_where(self, is_wanted: Callable[[Handle], bool]) -> list[Handle]:
        """Takes all of which something is true, in order."""
        taken = [entry for entry in self._heap if is_wanted(entry[-1])]
        if taken:
            self._heap = [entry for entry in self._heap if not is_wanted(entry[-1])]
            heapq.heapify(self._heap)
        return [handle for *_, handle in sorted(taken)]
