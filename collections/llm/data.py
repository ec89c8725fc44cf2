"""Text for language models: from jsonl.zst files to the batches of an optimizer step."""

# Shapes: B = samples, T = tokens of a sample.

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nemo_like.core.datamodule import DataModule, StepBatch
from nemo_like.core.errors import ConfigError, DataError
from nemo_like.core.paths import resolve
from nemo_like.core.summary import Section, Table
from nemo_like.data.cache import find_cache_dir
from nemo_like.data.corpus import hash_key
from nemo_like.data.mixture import describe_mixture, find_unknown, plan_draws
from nemo_like.data.order import SampleOrder, derive_key, permute
from nemo_like.data.packing import IGNORE_INDEX as IGNORE_INDEX
from nemo_like.data.packing import BlockReader
from nemo_like.data.progress import show_bytes
from nemo_like.data.sampler import (
    EvalDataset,
    EvalSampler,
    StepDataset,
    StepSampler,
    find_position,
    take_as_is,
)
from nemo_like.data.tokenize import TokenCorpus, tokenize_corpus
from nemo_like.data.vocabulary import learn_tokenizer
from nemo_like.text.tokenizer import Tokenizer

from .config import MixtureConfig, TextDataModuleConfig, TokenizerConfig

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


class TextDataModule(DataModule):
    """Samples of text from a corpus of documents, in subsets that are mixed by a table.

    :meth:`setup` trains the tokenizer, if it is asked to, and tokenises the corpus, once for all
    runs that share them. What the arguments mean stands in ``TextDataModuleConfig``.

    Raises:
        ConfigError: A value makes no sense; all faults at once.
    """

    def __init__(
        self,
        *,
        corpus: list[str] | str,
        tokenizer: TokenizerConfig,
        seq_len: int,
        global_batch_size: int,
        mixture: MixtureConfig | None = None,
        subset_key: str = "subset",
        held_out_fraction: float = 0.01,
        on_error: Literal["skip", "raise"] = "raise",
        seed: int = 0,
        num_workers: int = 0,
        tokenize_processes: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        self.config = TextDataModuleConfig(
            corpus=[corpus] if isinstance(corpus, str) else list(corpus),
            tokenizer=tokenizer,
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            mixture=mixture or MixtureConfig(),
            subset_key=subset_key,
            held_out_fraction=held_out_fraction,
            on_error=on_error,
            seed=seed,
            num_workers=num_workers,
            tokenize_processes=tokenize_processes,
            cache_dir=cache_dir,
        )
        if faults := list(self.config.check_all()):
            raise ConfigError(faults)
        super().__init__(global_batch_size=global_batch_size)
        self.seq_len = seq_len
        self._data: _TextData | None = None
        self._resumed_data: str | None = None

    def setup(self, stage: str | None = None) -> None:
        """Makes or finds tokenizer and token shards, and the order of samples.

        Every process of a run may call it at once; one of each machine works, the others wait.

        Raises:
            ConfigError: The mixture names a subset that the corpus does not have.
            DataError: The corpus cannot be read.
        """
        if self._data is None:
            self._data = _TextData(self.config)

    @property
    def _ready(self) -> _TextData:
        if self._data is None:
            raise RuntimeError("this data module has no data yet: call setup() first")
        return self._data

    @property
    def tokenizer(self) -> Tokenizer:
        """What makes tokens of text and text of tokens."""
        return self._ready.tokenizer

    @property
    def order(self) -> SampleOrder:
        """Which sample stands at which position."""
        return self._ready.order

    @property
    def mixture_shares(self) -> dict[str, float] | None:
        """Share of each subset in an epoch by the mixture table; None without a table, or with a zero in it."""
        if self.config.mixture.weights is None and self.config.mixture.epochs is None:
            return None
        draws = dict(zip(self._ready.subsets, self.order.draws, strict=True))
        total = sum(draws.values())
        return (
            {name: count / total for name, count in draws.items()} if all(draws.values()) else None
        )

    def train_dataloader(self) -> DataLoader[StepBatch]:
        """The optimizer steps that remain; its length is that of the whole run.

        Raises:
            ConfigError: The trainer has no ``max_steps``.
        """
        trainer, parallel = self._trainer, self.data_parallel
        if trainer.max_steps < 1:
            raise ConfigError([f"trainer.max_steps={trainer.max_steps}: say how long the run is"])
        if self._resumed_data not in (None, self._ready.fingerprint):
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
        read = functools.partial(_read_batch, self._ready.blocks)
        return self._make_loader(StepDataset(read, blank=_blank), sampler)

    def val_dataloader(self) -> DataLoader[TextBatch] | list[Any]:
        """Held-out samples, in an order that mixes the subsets and is the same each time.

        Their batches do not hang on the number of ranks, also where ``trainer.limit_val_batches``
        takes only some: it counts those of all ranks together.
        """
        parallel, blocks = self.data_parallel, self._ready.held_out_blocks
        if not len(blocks):
            return []
        sample_ids = self._ready.shuffle_held_out()
        limit = self._trainer.limit_val_batches
        if isinstance(limit, int):
            sample_ids = sample_ids[: limit * parallel.micro_batch_size]
        sampler = EvalSampler(
            sample_ids,
            batch_size=parallel.micro_batch_size,
            rank=parallel.data_parallel_rank,
            size=parallel.data_parallel_size,
        )
        read = functools.partial(_read_batch, blocks)
        return self._make_loader(EvalDataset(read, blank=_blank), sampler)

    def _make_loader(self, dataset: Any, sampler: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            sampler=sampler,
            batch_size=None,
            collate_fn=take_as_is,
            num_workers=self.config.num_workers,
            persistent_workers=self.config.num_workers > 0,
            # Without one of its own, each pass over the loader would move the global generator on.
            generator=torch.Generator().manual_seed(self.config.seed),
        )

    @property
    def _trainer(self) -> Any:
        assert self.trainer is not None, "data_parallel refuses before"
        return self.trainer

    def held_out_documents(self) -> Iterator[tuple[str, str]]:
        """Subset and raw text of every held-out document, in the order of the corpus."""
        for subset, text in self._ready.corpus.read_held_out():
            if subset in self._ready.subsets:
                yield subset, text

    def artefacts(self) -> Mapping[str, bytes]:
        """The files of the tokenizer."""
        return self.tokenizer.to_bytes()

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        state = super().state_dict()
        return state if self._data is None else state | {"data": self._data.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the position of a checkpoint."""
        super().load_state_dict(state_dict)
        self._resumed_data = state_dict.get("data")

    def describe(self) -> list[Section]:
        """What was drawn of each subset (before the first step: what is going to be), and what is held out."""
        position = self.position
        if not position and self.trainer is not None and self.trainer.max_steps > 0:
            position = find_position(
                self.trainer.max_steps,
                epoch_size=self.order.epoch_size,
                global_batch_size=self.global_batch_size,
            )
        return self._ready.describe(position)


class _TextData:
    """What a configured corpus comes to: tokenizer, shards, blocks, order."""

    def __init__(self, config: TextDataModuleConfig) -> None:
        self.config = config
        cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir else find_cache_dir()
        specs = [config.corpus] if isinstance(config.corpus, str) else config.corpus
        paths = [path for spec in specs for path in resolve(spec)]
        shared: dict[str, Any] = {
            "cache_dir": cache_dir,
            "held_out_fraction": config.held_out_fraction,
            "subset_key": config.subset_key,
            "on_error": config.on_error,
        }
        self.tokenizer = self._find_tokenizer(paths, shared)
        with show_bytes("tokenising") as progress:
            self.corpus: TokenCorpus = tokenize_corpus(
                paths,
                tokenizer=self.tokenizer,
                processes=config.tokenize_processes,
                progress=progress,
                **shared,
            )
        if faults := find_unknown(config.mixture.exclude, self.corpus.subsets, "mixture.exclude"):
            raise ConfigError(faults)
        self.subsets = [it for it in self.corpus.subsets if it not in config.mixture.exclude]
        self.blocks = self._cut("train")
        self.held_out_blocks = self._cut("held_out")
        draws = plan_draws(
            dict(zip(self.subsets, self.blocks.num_blocks, strict=True)),
            weights=config.mixture.weights,
            epochs=config.mixture.epochs,
        )
        if not any(draws.values()):
            raise DataError(f"the training split of {', '.join(self.subsets)} has no text")
        self.order = SampleOrder(
            names=self.subsets,
            num_blocks=self.blocks.num_blocks,
            draws=[draws[name] for name in self.subsets],
            seed=config.seed,
        )
        self.fingerprint = hash_key(
            [self.corpus.folder.name, config.seq_len, config.seed, self.subsets, draws]
        )
        self._warn_of_missing_held_out()

    def _find_tokenizer(self, paths: list[Path], shared: dict[str, Any]) -> Tokenizer:
        config = self.config.tokenizer
        if config.path is not None:
            return Tokenizer.load(
                resolve(config.path)[0], bos_token=config.bos_token, eos_token=config.eos_token
            )
        assert config.train_vocab_size is not None, "checked by TokenizerConfig"
        with show_bytes("training the tokenizer") as progress:
            return learn_tokenizer(
                paths,
                vocab_size=config.train_vocab_size,
                max_bytes=int(config.train_mb * 1e6),
                exclude=self.config.mixture.exclude,
                progress=progress,
                **shared,
            )

    def _cut(self, split: Literal["train", "held_out"]) -> BlockReader:
        return BlockReader(
            [self.corpus.open_shard(subset, split) for subset in self.subsets],
            seq_len=self.config.seq_len,
            prefix_id=self.tokenizer.prefix_id,
            eos_id=self.tokenizer.eos_id,
        )

    def _warn_of_missing_held_out(self) -> None:
        counts = self.corpus.counts
        empty = [name for name in self.subsets if not counts[name]["held_out"].documents]
        if empty and self.config.held_out_fraction:
            logger.warning(
                "held_out_fraction=%s holds out no document of %s; raise it to see them in validation",
                self.config.held_out_fraction,
                ", ".join(empty),
            )

    def shuffle_held_out(self) -> list[int]:
        number = len(self.held_out_blocks)
        shuffled = permute(
            np.arange(number, dtype=np.uint64),
            np.array([number], dtype=np.uint64),
            np.array([derive_key("held out")]),
        )
        return [int(sample) for sample in shuffled]

    def describe(self, position: int) -> list[Section]:
        train = [self.corpus.counts[name]["train"] for name in self.subsets]
        held_out = [self.corpus.counts[name]["held_out"] for name in self.subsets]
        report = self.corpus.report
        composition = describe_mixture(
            names=self.subsets,
            documents=[count.documents for count in train],
            tokens=[count.tokens for count in train],
            num_blocks=self.blocks.num_blocks,
            draws=self.order.draws,
            drawn=self.order.count_draws(position),
            note=f"{position:,} samples of {self.config.seq_len} tokens, an epoch being "
            f"{self.order.epoch_size:,}." + (f" {report.describe()}" if report.faults else ""),
        )
        rows: list[list[str | int | float]] = [
            [name, count.documents, count.tokens, count.bytes, count.bytes / max(count.tokens, 1)]
            for name, count in zip(self.subsets, held_out, strict=True)
        ]
        totals = [sum(int(row[column]) for row in rows) for column in (1, 2, 3)]
        rows.append(["total", *totals, totals[2] / max(totals[1], 1)])
        table = Table(
            columns=["subset", "documents", "tokens", "bytes", "bytes per token"],
            rows=rows,
            emphasis=[len(self.subsets)],
        )
        return [composition, Section(title="Held-out text", table=table)]


def _read_batch(blocks: BlockReader, sample_ids: list[int]) -> TextBatch:
    tokens_BT, targets_BT, segments_BT = blocks.read(sample_ids)
    return TextBatch(
        torch.from_numpy(tokens_BT),
        torch.from_numpy(targets_BT),
        None if segments_BT is None else torch.from_numpy(segments_BT),
    )


def _blank(batch: TextBatch) -> TextBatch:
    return TextBatch(
        batch.tokens_BT, torch.full_like(batch.targets_BT, IGNORE_INDEX), batch.segments_BT
    )
