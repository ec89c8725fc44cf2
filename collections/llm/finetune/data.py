"""The data module of fine-tuning: from files of chats, pairs and texts to the batches of an optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from nemo_like.core.errors import ConfigError, DataError
from nemo_like.core.summary import Section, Table
from nemo_like.data.cache import find_cache_dir
from nemo_like.data.corpus import hash_key
from nemo_like.data.mixture import plan_draws
from nemo_like.data.order import SampleOrder

from ..config import TokenizerConfig
from ..loading import Prepared, TokenDataModule
from .blocks import BlockReader, Blocks, plan_blocks
from .chat import ChatTemplate
from .config import FinetuneDataModuleConfig, KeysConfig, Kind, SourceConfig, TooLong
from .encode import build_encoder
from .store import Split, Store, open_store

logger = logging.getLogger(__name__)


class FinetuneDataModule(TokenDataModule):
    """Samples whose answers are learnt, packed into blocks or padded, from one source or several.

    :meth:`setup` tokenises, once for all runs that share files, tokenizer and template, and packs, once for each
    length. What the arguments mean stands in ``FinetuneDataModuleConfig``.

    Raises:
        ConfigError: A value makes no sense; all faults at once.
    """

    def __init__(
        self,
        *,
        tokenizer: TokenizerConfig,
        seq_len: int,
        global_batch_size: int,
        files: list[str] | str | None = None,
        sources: dict[str, SourceConfig] | None = None,
        kind: Kind = "auto",
        keys: KeysConfig | None = None,
        chat_template: str | None = None,
        too_long: TooLong = "keep_start",
        packing: bool = True,
        pad_to: Literal["longest", "seq_len"] = "longest",
        validation_files: list[str] | str | None = None,
        held_out_fraction: float | None = None,
        on_error: Literal["skip", "raise"] = "raise",
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        self.config = FinetuneDataModuleConfig(
            files=files,
            sources=sources or {},
            tokenizer=tokenizer,
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            kind=kind,
            keys=keys or KeysConfig(),
            chat_template=chat_template,
            too_long=too_long,
            packing=packing,
            pad_to=pad_to,
            validation_files=validation_files,
            held_out_fraction=held_out_fraction,
            on_error=on_error,
            seed=seed,
            num_workers=num_workers,
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
        self._data: _FinetuneData | None = None

    def prepare(self) -> Prepared:
        """Makes or finds tokenised samples and blocks, and the order of samples.

        Raises:
            ConfigError: The chat template cannot be used.
            DataError: A file cannot be read, a record cannot be used, or a source has no sample.
        """
        data = self._data = _FinetuneData(self.config)
        return Prepared(
            data.encoder.tokenizer, data.order, data.train, data.held_out, data.fingerprint
        )

    @property
    def chat(self) -> ChatTemplate:
        """The chat template in use."""
        self.prepared  # noqa: B018  says what is missing
        assert self._data is not None
        return self._data.encoder.chat

    def artefacts(self) -> Mapping[str, bytes]:
        """The files of the tokenizer, with the chat template in use."""
        source = self.chat.template.source
        template = {} if source is None else {"chat_template.jinja": source.encode()}
        return {**super().artefacts(), **template}

    def describe(self) -> list[Section]:
        """What there is of each source, what was cut and skipped, and what was drawn (before the first step: what is
        going to be)."""
        self.prepared  # noqa: B018  says what is missing
        assert self._data is not None
        return self._data.describe(self.count_drawn())


class _FinetuneData:
    """What configured files come to: stores, blocks, order."""

    def __init__(self, config: FinetuneDataModuleConfig) -> None:
        self.config = config
        self.cache_dir = (
            Path(config.cache_dir).expanduser() if config.cache_dir else find_cache_dir()
        )
        self.encoder, template_key = build_encoder(config)
        self.sources = config.list_sources()
        fraction = config.held_out
        shared: dict[str, Any] = {"template_key": template_key}
        self.stores = {
            name: self._open(source, held_out_fraction=fraction, **shared)
            for name, source in self.sources.items()
        }
        self.blocks = {name: self._plan(store, "train") for name, store in self.stores.items()}
        if empty := [name for name, blocks in self.blocks.items() if not len(blocks)]:
            raise DataError(
                f"no sample is left to train on in {', '.join(empty)}: see what was read, cut and skipped: "
                f"{self._tell_counts()}"
            )
        if config.validation_files:
            source = config.fill(SourceConfig(files=config.validation_files, split="validation"))
            store = self._open(source, held_out_fraction=0.0, **shared)
            self.held_out_blocks = {"validation": self._plan(store, "train")}
        else:
            self.held_out_blocks = {
                name: self._plan(store, "held_out") for name, store in self.stores.items()
            }
        self.train, self.held_out = self._read(self.blocks), self._read(self.held_out_blocks)
        weights = {name: it.weight for name, it in self.sources.items() if it.weight is not None}
        sizes = dict(zip(self.sources, self.train.num_blocks, strict=True))
        draws = plan_draws(sizes, weights=weights or None)
        self.order = SampleOrder(
            names=list(sizes),
            num_blocks=list(sizes.values()),
            draws=[draws[name] for name in sizes],
            seed=config.seed,
        )
        self.fingerprint = hash_key(
            [[it.key for it in self.blocks.values()], config.seed, list(sizes), draws]
        )
        logger.info("fine-tuning data: %s", self._tell_counts())

    def _open(self, source: SourceConfig, *, template_key: str, held_out_fraction: float) -> Store:
        return open_store(
            source,
            encoder=self.encoder,
            template_key=template_key,
            held_out_fraction=held_out_fraction,
            on_error=self.config.on_error,
            cache_dir=self.cache_dir,
        )

    def _plan(self, store: Store, split: Split) -> Blocks:
        return plan_blocks(
            store,
            split,
            seq_len=self.config.seq_len,
            too_long=self.config.too_long,
            is_packed=self.config.packing,
            cache_dir=self.cache_dir,
        )

    def _read(self, blocks: dict[str, Blocks]) -> BlockReader:
        return BlockReader(
            list(blocks.values()),
            seq_len=self.config.seq_len,
            pad_id=self.encoder.tokenizer.eos_id,
            is_packed=self.config.packing,
            pad_to=self.config.pad_to,
        )

    def _tell_counts(self) -> str:
        """One line: samples, tokens, what was too long and what was skipped."""
        shards = [it.shard for it in self.blocks.values()]
        samples = sum(map(len, shards))
        targets = sum(shard.num_targets for shard in shards)
        tokens = sum(shard.ids.num_tokens for shard in shards)
        blocks = sum(map(len, self.blocks.values()))
        long = sum(it.pieces.counts["too long"] for it in self.blocks.values())
        empty = sum(it.pieces.counts["without a target"] for it in self.blocks.values())
        skipped = sum(store.report.faults.total() for store in self.stores.values())
        text = f"{samples:,} samples of {tokens:,} tokens ({targets:,} learnt) in {blocks:,} "
        text += f"blocks of {self.config.seq_len}" if self.config.packing else "rows"
        if long:
            text += f"; {long:,} longer than {self.config.seq_len} tokens ({_ACTIONS[self.config.too_long]})"
        if empty:
            text += f"; {empty:,} left out, since cutting left nothing to learn"
        if skipped:
            text += f"; {skipped:,} records skipped"
        return text

    def describe(self, position: int) -> list[Section]:
        drawn = self.order.count_draws(position)
        rows: list[list[str | int | float]] = []
        for (name, blocks), count in zip(self.blocks.items(), drawn, strict=True):
            tokens = int(blocks.pieces.lengths_P.sum())
            size = len(blocks) * self.config.seq_len
            rows.append(
                [
                    name,
                    len(blocks.shard),
                    blocks.shard.ids.num_tokens,
                    blocks.shard.num_targets,
                    blocks.pieces.counts["too long"],
                    len(blocks),
                    tokens / size,
                    count / len(blocks),
                    count / max(position, 1),
                ]
            )
        reports = [it.report for it in self.stores.values() if it.report.faults]
        note = f"{position:,} blocks drawn, an epoch being {self.order.epoch_size:,}. {self._tell_counts()}."
        columns = ["source", "samples", "tokens", "learnt", "too long"]
        columns += ["blocks" if self.config.packing else "rows", "filled", "epochs", "share"]
        train = Section(
            title="Fine-tuning data",
            table=Table(columns=columns, rows=rows),
            note="\n".join([note, *(report.describe() for report in reports)]),
        )
        held: list[list[str | int | float]] = [
            [name, len(it.shard), it.shard.ids.num_tokens, it.shard.num_targets]
            for name, it in self.held_out_blocks.items()
        ]
        table = Table(columns=["source", "samples", "tokens", "learnt"], rows=held)
        return [train, Section(title="Held-out samples", table=table)]


_ACTIONS: dict[TooLong, str] = {
    "keep_start": "only their start is kept",
    "keep_end": "only their end is kept",
    "split": "split",
    "drop": "dropped",
}
