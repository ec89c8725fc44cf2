"""A model and a data module of a few numbers, for tests of everything that surrounds a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nemo_like.core.datamodule import DataModule, StepBatch
from nemo_like.core.model import Model

# Shapes: B = samples, T = positions, C = channels.


@dataclass
class ToyBatch:
    """A micro-batch of :class:`ToyDataModule`."""

    x_BTC: Tensor
    y_BT: Tensor
    is_target_BT: Tensor
    """bool; how many are true differs from sample to sample."""


class ToyModel(Model):
    """Two linear layers with dropout between them, squared error over the positions that are targets.

    Args:
        channels: Size of C.
        width: Channels between the two layers.
        dropout: Probability, to test that randomness resumes.
    """

    unit = "positions"

    def __init__(self, *, channels: int = 8, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(channels, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1)
        )

    def count_targets(self, micro_batch: ToyBatch) -> Tensor:
        """Number of target positions."""
        return micro_batch.is_target_BT.sum()

    def count_units(self, micro_batch: ToyBatch) -> int:
        """All positions."""
        return micro_batch.is_target_BT.numel()

    def compute_loss_sum(self, micro_batch: ToyBatch) -> Tensor:
        """Sum of squared errors over the targets."""
        error_BT = self.network(micro_batch.x_BTC).squeeze(-1) - micro_batch.y_BT
        total: Tensor = error_BT.masked_fill(~micro_batch.is_target_BT, 0).square().sum()
        return total


class _Steps:
    """The training loader of :class:`ToyDataModule`: one item an optimizer step."""

    def __init__(self, data: ToyDataModule) -> None:
        self.data = data
        assert data.trainer is not None
        self.num_steps = int(data.trainer.max_steps)

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[StepBatch]:
        data, share = self.data, self.data.data_parallel
        position = data.position
        while True:
            start = position % data.num_samples
            ids = range(start, min(start + data.global_batch_size, data.num_samples))
            position += len(ids)
            size, rank = share.data_parallel_size, share.data_parallel_rank
            mine = list(ids)[rank * len(ids) // size : (rank + 1) * len(ids) // size]
            largest = -(-len(ids) // size)
            micro = share.micro_batch_size
            micro_batches = [data.make_batch(mine[i : i + micro]) for i in range(0, largest, micro)]
            yield StepBatch(micro_batches=micro_batches, position=position, sample_ids=mine)


class ToyDataModule(DataModule):
    """Random regression samples, in order, with ragged targets.

    Args:
        num_samples: Samples of an epoch.
        channels: Size of C.
    """

    def __init__(
        self, *, num_samples: int = 20, global_batch_size: int = 8, channels: int = 8
    ) -> None:
        super().__init__(global_batch_size=global_batch_size)
        self.num_samples = num_samples
        generator = torch.Generator().manual_seed(7)
        self.x_NTC = torch.randn(num_samples, 5, channels, generator=generator)
        self.y_NT = torch.randn(num_samples, 5, generator=generator)
        self.is_target_NT = torch.rand(num_samples, 5, generator=generator) < 0.5

    def make_batch(self, ids: list[int]) -> ToyBatch:
        """A micro-batch of these samples; none gives a blank one."""
        blank = not ids
        index = torch.tensor(ids or [0])
        is_target_BT = self.is_target_NT[index]
        return ToyBatch(
            self.x_NTC[index],
            self.y_NT[index],
            torch.zeros_like(is_target_BT) if blank else is_target_BT,
        )

    def train_dataloader(self) -> Any:
        """One :class:`StepBatch` an optimizer step, from the current position on."""
        return _Steps(self)

    def val_dataloader(self) -> Any:
        """All samples in pairs; where they do not divide, some ranks get a blank one, so that all do the same."""
        pairs: list[list[int]] = [[i, i + 1] for i in range(0, self.num_samples - 1, 2)]
        share = self.data_parallel
        pairs += [[]] * (-len(pairs) % share.data_parallel_size)
        return DataLoader(
            pairs[share.data_parallel_rank :: share.data_parallel_size],  # type: ignore[arg-type]
            batch_size=None,
            collate_fn=self.make_batch,
        )
