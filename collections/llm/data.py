"""Text for language models: from jsonl.zst files to the batches of an optimizer step."""

# Shapes: B = samples, T = tokens of a sample.

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_like.core.errors import ConfigError, DataError
from nemo_like.core.paths import resolve
from nemo_like.core.summary import Section, Table
from nemo_like.data.cache import find_cache_dir
from nemo_like.data.corpus import hash_key
from nemo_like.data.mixture import describe_mixture, find_unknown, plan_draws
from nemo_like.data.order import SampleOrder
from nemo_like.data.packing import IGNORE_INDEX as IGNORE_INDEX
from nemo_like.data.packing import BlockReader
from nemo_like.data.progress import show_bytes
from nemo_like.data.tokenize import TokenCorpus, tokenize_corpus
from nemo_like.data.vocabulary import learn_tokenizer
from nemo_like.text.tokenizer import Tokenizer

from .config import MixtureConfig, TextDataModuleConfig, TokenizerConfig
from .finetune.tokenizer import open_tokenizer
from .loading import Prepared, TokenDataModule
from .loading import TextBatch as TextBatch

logger = logging.getLogger(__name__)


class TextDataModule(TokenDataModule):
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
        super().__init__(
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        self._data: _TextData | None = None

    def prepare(self) -> Prepared:
        """Makes or finds tokenizer and token shards, and the order of samples.

        Every process of a run may call it at once; one of each machine works, the others wait.

        Raises:
            ConfigError: The mixture names a subset that the corpus does not have.
            DataError: The corpus cannot be read.
        """
        data = self._data = _TextData(self.config)
        return Prepared(
            data.tokenizer,
            data.order,
            _TextReader(data.blocks),
            _TextReader(data.held_out_blocks),
            data.fingerprint,
        )

    @property
    def _ready(self) -> _TextData:
        if self._data is None:
            raise RuntimeError("this data module has no data yet: call setup() first")
        return self._data

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

    def held_out_documents(self) -> Iterator[tuple[str, str]]:
        """Subset and raw text of every held-out document, in the order of the corpus."""
        for subset, text in self._ready.corpus.read_held_out():
            if subset in self._ready.subsets:
                yield subset, text

    def describe(self) -> list[Section]:
        """What was drawn of each subset (before the first step: what is going to be), and what is held out."""
        return self._ready.describe(self.count_drawn())


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
            return open_tokenizer(
                config.path, bos_token=config.bos_token, eos_token=config.eos_token
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


class _TextReader:
    """Blocks of a corpus as batches."""

    def __init__(self, blocks: BlockReader) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def read(self, sample_ids: Sequence[int]) -> TextBatch:
        tokens_BT, targets_BT, segments_BT = self.blocks.read(sample_ids)
        return TextBatch(
            torch.from_numpy(tokens_BT),
            torch.from_numpy(targets_BT),
            None if segments_BT is None else torch.from_numpy(segments_BT),
        )
