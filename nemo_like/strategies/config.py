"""Configuration of the strategies: what fits the hardware, never what changes the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class DDPStrategyConfig:
    """A whole copy of the model on every rank."""

    micro_batch_size: int = 1
    """Samples that are computed at once on one rank; lower it when memory runs out, the result stays the same."""
    find_unused_parameters: bool = False
    """Look for parameters without a gradient in every step; only for networks that leave some out."""
    start_method: Literal["popen", "spawn", "fork"] = "popen"
    """How the processes of one node are started: the command again, or children of this process (notebooks: fork)."""
    process_group_backend: Literal["nccl", "gloo"] | None = None
    """None chooses by the device: NCCL on GPUs, gloo on CPUs."""

    def check(self) -> Iterator[str]:
        """Faults of the values."""
        if self.micro_batch_size < 1:
            yield f"micro_batch_size={self.micro_batch_size}: must be at least 1"
