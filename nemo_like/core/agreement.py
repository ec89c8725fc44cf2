"""What all ranks of a run know at the same step: to stop, to save, that something failed.

A rank that acted on its own would leave the others in a collective. So whoever wants all ranks to do something raises a
flag, on any rank; once a step the flags are exchanged, and one step later every rank knows their union. The exchange is
not waited for in the step that starts it, and goes over the host, so a step pays for no communication.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


class Flag(enum.IntFlag):
    """What ranks agree on."""

    STOP = 1
    """Save and leave."""
    SAVE = 2
    """Save now."""
    FAILED = 4
    """Something that runs besides the steps has failed: an asynchronous save."""


# Of the flags, since the largest of two numbers is the union of single bits only.
_BITS = range(len(Flag))


class Agreement:
    """The union of the flags of all ranks, the same on all of them at the same call.

    Args:
        group: Its own process group, over the host (gloo); None is a run of one process, which agrees at once.

    Attributes:
        sources: Called before each exchange on this rank; they may raise flags.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.sources: list[Callable[[], None]] = []
        self._group = group
        self._agreed, self._cause = 0, 0
        self._largest = dist.AllreduceOptions()
        self._largest.reduceOp = dist.ReduceOp.MAX
        # Appended by any thread, emptied by the one that trains.
        self._raised: deque[tuple[Flag, int]] = deque()
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    @classmethod
    def among_ranks(cls, timeout: timedelta | None = None) -> Agreement:
        """One of all processes of the default process group; a collective call.

        Args:
            timeout: How long a rank waits for the others; None takes torch's default.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        return cls(group)

    def raise_flag(self, flag: Flag, *, cause: int = 0) -> None:
        """Asks all ranks for something; from any rank and any thread.

        Args:
            flag: What is asked for.
            cause: Why, as a number that means something to whoever acts on it.
        """
        self._raised.append((flag, cause))

    @property
    def agreed(self) -> Flag:
        """What all ranks know."""
        if self._group is None:
            self._take_in(*self._collect())
        return Flag(self._agreed)

    @property
    def cause(self) -> int:
        """The largest number that came with an agreed STOP, 0 without one."""
        return self._cause if Flag.STOP in self.agreed else 0

    def exchange(self) -> Flag:
        """Sends the flags of this rank and takes in what was sent at the last call; equally often on all ranks.

        Returns:
            What is agreed.
        """
        for look in self.sources:
            look()
        if self._group is not None:
            self._settle()
            flags, cause = self._collect()
            sent = torch.tensor([*((flags >> bit) & 1 for bit in _BITS), cause])
            # Not by dist.all_reduce, which takes as long again to look at its arguments.
            self._pending = (self._group.allreduce([sent], self._largest), sent)
        return self.agreed

    def clear(self, flag: Flag) -> None:
        """Forgets an agreed flag that was acted on; on all ranks, at the same call."""
        self._agreed &= ~int(flag)
        if Flag.STOP in flag:
            self._cause = 0

    def close(self) -> None:
        """Waits for what is under way and gives the group up; on all ranks."""
        self._settle()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def abandon(self) -> None:
        """Waits for nothing any more: this rank fails, and the others may be gone."""
        self._pending = self._group = None

    def _settle(self) -> None:
        if self._pending is None:
            return
        work, sent = self._pending
        self._pending = None
        work.wait()
        *raised, cause = sent.tolist()
        if any(raised):
            self._take_in(sum(it << bit for it, bit in zip(raised, _BITS, strict=True)), cause)

    def _collect(self) -> tuple[int, int]:
        flags = cause = 0
        while self._raised:
            flag, its_cause = self._raised.popleft()
            flags, cause = flags | int(flag), max(cause, its_cause)
        return flags, cause

    def _take_in(self, flags: int, cause: int) -> None:
        self._agreed |= flags
        self._cause = max(self._cause, cause)
