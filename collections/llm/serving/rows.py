"""Which request has which row of the cache."""

from __future__ import annotations

from ..generation.cache import KeyValueCache
from .handle import Handle

_WORTH_COPYING = 16
"""Tokens that a prompt must have in common with another row to be copied from there instead of computed."""


class Rows:
    """Running requests in the first rows, and behind them the newcomer whose prompt is being read.

    So the rows of a step are always a range, of which the cache gives views.

    Args:
        cache: Its rows are managed here and nowhere else.

    Attributes:
        running: Handle of each row from the first on.
        newcomer: The one in the row behind them.
    """

    def __init__(self, cache: KeyValueCache) -> None:
        self.cache = cache
        self.running: list[Handle] = []
        self.newcomer: Handle | None = None

    @property
    def occupied(self) -> list[Handle]:
        """All requests that have a row, in the order of rows."""
        return self.running if self.newcomer is None else [*self.running, self.newcomer]

    @property
    def has_room(self) -> bool:
        """Whether another newcomer can come."""
        return self.newcomer is None and len(self.running) < self.cache.num_rows

    def place(self, handle: Handle) -> None:
        """Gives a newcomer its row, with the beginning of its prompt if another row has the same."""
        self.newcomer = handle
        row, shared = self._find_shared(handle.request.prompt)
        if shared >= _WORTH_COPYING:
            self.cache.copy([row], [len(self.running)])
            self.cache.rollback([len(self.running)], [shared])

    def settle(self) -> None:
        """The newcomer's prompt is read: it runs."""
        assert self.newcomer is not None, "only after place()"
        self.running.append(self.newcomer)
        self.newcomer = None

    def vacate(self, handle: Handle) -> None:
        """Takes a request out of its row; rows behind it move up."""
        occupied = self.occupied
        row, last = occupied.index(handle), len(occupied) - 1
        if handle is self.newcomer:
            self.newcomer = None
        else:
            # The last running one fills the gap, and the newcomer follows.
            end = len(self.running) - 1
            self.running[row] = self.running[end]
            self.running.pop()
            moves = [(end, row)] if self.newcomer is None else [(end, row), (last, end)]
            self.cache.copy([source for source, _ in moves], [target for _, target in moves])
        self.cache.free(last)

    def _find_shared(self, prompt: list[int]) -> tuple[int, int]:
        """The row that begins most like a prompt, and how many tokens they share; never the whole prompt."""
        best, longest = 0, 0
        for row, handle in enumerate(self.running):
            length = self.cache.lengths[row]
            read = handle.request.prompt
            if length > self.cache.cache_size or read[:_WORTH_COPYING] != prompt[:_WORTH_COPYING]:
                continue
            read = [*read, *handle.request.tokens][:length]
            pairs = zip(prompt[:-1], read, strict=False)
            shared = next((at for at, (new, old) in enumerate(pairs) if new != old), None)
            if shared is None:
                shared = min(len(prompt) - 1, len(read))
            if shared > longest:
                best, longest = row, shared
        return best, longest
