"""Batches of tokens and the loaders that bring them, whatever the samples are made of."""

# Shapes: B = samples, T = tokens of a sample.

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nemo_like.core.datamodule import DataModule, StepBatch
from nemo_like.core.errors import ConfigError
from nemo_like.core.notice import outlast_notice
from nemo_like.data.order import SampleOrder, derive_key, permute
from nemo_like.data.packing import IGNORE_INDEX
from nemo_like.data.sampler import (
    EvalDataset,
    EvalSampler,
    StepDataset,
    StepSampler,
    find_position,
    take_as_is,
)
from nemo_like.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class TextBatch:
    """Samples of text that are computed at once."""

    tokens_BT: Tensor
    """int64 inputs."""
    targets_BT: Tensor
    """int64, the token that comes next; ``IGNORE_INDEX`` (-100) where there is no target."""
    segments_BT: Tensor | None = None
    """int32, number of the document inside its sample; attention stays inside a document, and
    positions restart with it. None when every sample lies in one document."""


class BatchReader(Protocol):
    """Samples, numbered through."""

    def __len__(self) -> int: ...

    def read(self, sample_ids: Sequence[int]) -> TextBatch:
        """Those of these numbers."""
        ...


@dataclass
class Prepared:
    """What a data module has once its files are read."""

    tokenizer: Tokenizer
    """What makes tokens of text and text of tokens."""
    order: SampleOrder
    """Which sample stands at which position."""
    train: BatchReader
    held_out: BatchReader
    fingerprint: str
    """Names the order of these very samples."""


class TokenDataModule(DataModule):
    """Base of the data modules that hand tokens to a language model.

    A subclass says how its samples are made ready (:meth:`prepare`); order, exact resume, shares of ranks, and loaders
    are here.

    Args:
        seq_len: Tokens of a sample.
        global_batch_size: Samples per optimizer step over all ranks.
        num_workers: Loader processes; 0 reads in the training process.
        seed: Of the loaders' own generator.
    """

    def __init__(
        self, *, seq_len: int, global_batch_size: int, num_workers: int, seed: int
    ) -> None:
        super().__init__(global_batch_size=global_batch_size)
        self.seq_len, self.num_workers, self.seed = seq_len, num_workers, seed
        self._prepared: Prepared | None = None
        self._resumed_data: str | None = None

    def prepare(self) -> Prepared:
        """Reads the files; every process of a run may call it at once."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare")

    def setup(self, stage: str | None = None) -> None:
        """Makes the samples ready, once.

        Raises:
            ConfigError: The configuration does not fit what is in the files.
            DataError: The files cannot be read.
        """
        if self._prepared is None:
            self._prepared = self.prepare()

    @property
    def prepared(self) -> Prepared:
        """What :meth:`setup` found."""
        if self._prepared is None:
            raise RuntimeError("this data module has no data yet: call setup() first")
        return self._prepared

    @property
    def tokenizer(self) -> Tokenizer:
        """What makes tokens of text and text of tokens."""
        return self.prepared.tokenizer

    @property
    def order(self) -> SampleOrder:
        """Which sample stands at which position."""
        return self.prepared.order

    def train_dataloader(self) -> DataLoader[StepBatch]:
        """The optimizer steps that remain; its length is that of the whole run.

        Raises:
            ConfigError: The trainer has no ``max_steps``.
        """
        trainer, parallel = self._trainer, self.data_parallel
        if trainer.max_steps < 1:
            raise ConfigError([f"trainer.max_steps={trainer.max_steps}: say how long the run is"])
        if self._resumed_data not in (None, self.prepared.fingerprint):
            logger.warning(
                "the corpus, mixture, seed or seq_len is not that of the checkpoint: the run goes on "
                "at position %d of another order of samples",
                self.position,
            )
        sampler = StepSampler(
            self.order,
            global_batch_size=self.global_batch_size,
            micro_batch_size=parallel.micro_batch_size,
            rank=parallel.data_parallel_rank,
            size=parallel.data_parallel_size,
            position=self.position,
            num_steps=max(trainer.max_steps - trainer.global_step, 0),
            total_steps=trainer.max_steps,
        )
        read = functools.partial(_read_batch, self.prepared.train)
        return self._make_loader(StepDataset(read, blank=_blank), sampler)

    def val_dataloader(self) -> DataLoader[TextBatch] | list[Any]:
        """Held-out samples, in an order that mixes the subsets and is the same each time.

        Their batches do not hang on the number of ranks, also where ``trainer.limit_val_batches``
        takes only some: it counts those of all ranks together.
        """
        parallel, held_out = self.data_parallel, self.prepared.held_out
        if not len(held_out):
            return []
        sample_ids = _shuffle(len(held_out))
        limit = self._trainer.limit_val_batches
        if isinstance(limit, int):
            sample_ids = sample_ids[: limit * parallel.micro_batch_size]
        sampler = EvalSampler(
            sample_ids,
            batch_size=parallel.micro_batch_size,
            rank=parallel.data_parallel_rank,
            size=parallel.data_parallel_size,
        )
        read = functools.partial(_read_batch, held_out)
        return self._make_loader(EvalDataset(read, blank=_blank), sampler)

    def _make_loader(self, dataset: Any, sampler: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            sampler=sampler,
            batch_size=None,
            collate_fn=take_as_is,
            num_workers=self.num_workers,
            worker_init_fn=outlast_notice,
            persistent_workers=self.num_workers > 0,
            # Without one of its own, each pass over the loader would move the global generator on.
            generator=torch.Generator().manual_seed(self.seed),
        )

    @property
    def _trainer(self) -> Any:
        assert self.trainer is not None, "data_parallel refuses before"
        return self.trainer

    def count_drawn(self) -> int:
        """Samples that were drawn; before the first step: those that are going to be."""
        if self.position or self.trainer is None or self.trainer.max_steps < 1:
            return self.position
        return find_position(
            self.trainer.max_steps,
            epoch_size=self.order.epoch_size,
            global_batch_size=self.global_batch_size,
        )

    def artefacts(self) -> Mapping[str, bytes]:
        """The files of the tokenizer."""
        return self.tokenizer.to_bytes()

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        state = super().state_dict()
        return state if self._prepared is None else state | {"data": self._prepared.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the position of a checkpoint."""
        super().load_state_dict(state_dict)
        self._resumed_data = state_dict.get("data")


def _shuffle(number: int) -> list[int]:
    shuffled = permute(
        np.arange(number, dtype=np.uint64),
        np.array([number], dtype=np.uint64),
        np.array([derive_key("held out")]),
    )
    return [int(sample) for sample in shuffled]


def _read_batch(reader: BatchReader, sample_ids: list[int]) -> TextBatch:
    return reader.read(sample_ids)


def _blank(batch: TextBatch) -> TextBatch:
    return replace(batch, targets_BT=torch.full_like(batch.targets_BT, IGNORE_INDEX))
