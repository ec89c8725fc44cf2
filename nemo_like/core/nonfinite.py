"""Steps whose loss or gradient is not finite: they change nothing, and are counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_COUNTS = ("total", "in_a_row", "first", "last")


@dataclass
class NonfiniteSteps:
    """How many steps of a run changed nothing; the same on all ranks, and part of each checkpoint."""

    total: int = 0
    """Over the whole run."""
    in_a_row: int = 0
    """Up to the last step, without one between them that changed something."""
    first: int = 0
    """The first of those in a row; steps are counted from 1."""
    last: int = 0
    """The last one."""
    share: Tensor | None = field(default=None, repr=False)
    """What this rank added to the sum of the loss of the last step, to tell which rank read bad data."""

    def note(self, step: int) -> None:
        """A step changed nothing.

        Args:
            step: Counted from 1.
        """
        self.total += 1
        self.in_a_row += 1
        self.last = step
        if self.in_a_row == 1:
            self.first = step

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {name: getattr(self, name) for name in _COUNTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the counts of a checkpoint."""
        for name in _COUNTS:
            setattr(self, name, int(state.get(name, 0)))


def describe_ids(ids: list[int], *, most: int = 16) -> str:
    """Sample ids for a log line: the first of them, and how many more there are."""
    shown = ", ".join(map(str, ids[:most]))
    return f"{shown} and {len(ids) - most:,} more" if len(ids) > most else shown or "none"


def read_together(*scalars: Tensor) -> list[float]:
    """The values of scalars; a GPU is waited for once."""
    if all(scalar.device.type == "cpu" for scalar in scalars):
        return [scalar.item() for scalar in scalars]
    devices = [scalar.device for scalar in scalars if scalar.device.type != "cpu"]
    values: list[float] = torch.stack([it.to(devices[0]) for it in scalars]).tolist()
    return values
