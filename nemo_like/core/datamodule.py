"""The loader contract: what a data module hands to a model, and how it resumes at an exact sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import lightning.pytorch as pl

from nemo_like.core.summary import Section


@dataclass
class StepBatch:
    """What one rank computes in one optimizer step."""

    micro_batches: list[Any]
    """One batch object of the domain each; equally many on every rank (blank ones fill up), at least one."""
    position: int
    """Samples that the run has consumed once this step is done, over all ranks and epochs."""
    sample_ids: list[int] = field(default_factory=list)
    """Ids of this rank's samples in this step, in order; blanks are not listed."""


class DataParallel(Protocol):
    """What a data module asks of the strategy of its trainer."""

    data_parallel_rank: int
    """Which share of each global batch this process reads: 0 to ``data_parallel_size - 1``."""
    data_parallel_size: int
    micro_batch_size: int
    """Samples that are computed at once."""


class DataModule(pl.LightningDataModule):
    """Base of all data modules.

    A training loader yields one :class:`StepBatch` per optimizer step and covers the whole run, starting at
    ``self.position``; epochs are a matter of the sample order, not of Lightning's loops. The order of samples is a
    function of (seed, epoch, position) and never of the number of ranks or workers.

    Args:
        global_batch_size: Samples per optimizer step over all ranks; the last batch of an epoch may be shorter.
    """

    def __init__(self, *, global_batch_size: int) -> None:
        super().__init__()
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size={global_batch_size}: must be at least 1")
        self.global_batch_size = global_batch_size
        self.position = 0

    @property
    def data_parallel(self) -> DataParallel:
        """The strategy of the attached trainer, seen as a source of rank, size and micro-batch."""
        if self.trainer is None:
            raise RuntimeError(
                "this data module has no trainer yet: pass it to Trainer.fit(model, datamodule=...)"
            )
        strategy: Any = self.trainer.strategy
        return strategy  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """The position alone: a resumed run goes on at the next sample, on any number of ranks."""
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the position of a checkpoint."""
        self.position = int(state_dict["position"])

    def artefacts(self) -> Mapping[str, bytes]:
        """Files that belong into every checkpoint because the weights mean nothing without them (a tokenizer)."""
        return {}

    def describe(self) -> list[Section]:
        """What was read, for the report of a run: composition, counts, what was skipped."""
        return []
