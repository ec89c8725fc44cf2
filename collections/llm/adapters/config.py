"""Configuration of adapters: what is trained beside a frozen base, and how the base is stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

ALL_LINEAR = "all-linear"
_REFUSED_STRATEGIES = {
    "MegatronStrategy": "splits matrices that adapters know whole; set strategy=ddp or strategy=fsdp",
    "DeepSpeedStrategy": "is not supported with adapters; strategy=fsdp cuts the base over the ranks, too",
}


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters on the linear layers of the blocks (LoRA, rsLoRA, DoRA; QLoRA with ``quantize``)."""

    rank: int = 16
    """Inner size of an adapter."""
    alpha: float = 32.0
    """Adapters are scaled by ``alpha / rank``."""
    dropout: float = 0.0
    """Probability of dropping an input of an adapter, in training."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Layers that get an adapter: names (``query``, or ``q_proj`` as transformers calls it), globs over full names
    (``layers.1?.mlp.*``), or ``all-linear``: every matrix of the blocks."""
    rslora: bool = False
    """Scale by ``alpha / sqrt(rank)`` instead, so that a higher rank does not learn more slowly."""
    dora: bool = False
    """Train the length of each row apart from its direction."""
    quantize: Literal["nf4", "int8"] | None = None
    """How the frozen matrices of the blocks are stored: 4-bit NormalFloat with double quantisation (QLoRA), 8 bits, or
    null: as fp32. Embedding and norms stay fp32."""
    init_from: str | None = None
    """A folder of an adapter (peft's, or a checkpoint of an adapter run) to start from; null starts with the base."""

    @property
    def scaling(self) -> float:
        """The factor on an adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def check(self) -> Iterator[str]:
        """Yields one line per fault."""
        if self.rank < 1:
            yield f"rank={self.rank}: must be at least 1"
        if not 0 < self.alpha < math.inf:
            yield f"alpha={self.alpha}: must be a finite number above 0"
        if not 0 <= self.dropout < 1:
            yield f"dropout={self.dropout}: must be at least 0 and below 1"
        if not self.target_modules:
            yield "target_modules=[]: names no layer; [all-linear] takes every matrix of the blocks"

    def check_run(self, run: Any) -> Iterator[str]:
        """What does not fit the rest of a run.

        Args:
            run: The ``RunConfig``.
        """
        strategy = str(run.strategy["_target_"]).rpartition(".")[2]
        if strategy in _REFUSED_STRATEGIES:
            yield f"strategy._target_={strategy}: {_REFUSED_STRATEGIES[strategy]}"
        if run.trainer.precision == "fp8-mixed":
            yield "trainer.precision=fp8-mixed: is for matrices that are trained; adapters take bf16-mixed"
