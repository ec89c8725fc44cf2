"""The data module of preferences: from files of pairs to the batches of an optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from nemo_like.core.errors import ConfigError, DataError
from nemo_like.core.summary import Section, Table
from nemo_like.data.cache import find_cache_dir
from nemo_like.data.corpus import hash_key
from nemo_like.data.order import SampleOrder

from ..config import TokenizerConfig
from ..finetune.config import KeysConfig, SourceConfig
from ..finetune.encode import build_encoder
from ..finetune.store import Store, open_store
from ..loading import Prepared, TokenDataModule
from .batch import PreferenceBatch
from .config import PreferenceDataModuleConfig
from .pairs import PairReader, Pairs, select_pairs

logger = logging.getLogger(__name__)


class PreferenceDataModule(TokenDataModule):
    """Pairs of a better and a worse answer; both of a pair are always computed at once.

    :meth:`setup` tokenises, once for all runs that share files, tokenizer and template. A sample of the loaders is a
    pair. What the arguments mean stands in ``PreferenceDataModuleConfig``.

    Raises:
        ConfigError: A value makes no sense; all faults at once.
    """

    def __init__(
        self,
        *,
        files: list[str] | str,
        tokenizer: TokenizerConfig,
        seq_len: int,
        global_batch_size: int,
        split: str = "train",
        keys: KeysConfig | None = None,
        chat_template: str | None = None,
        too_long: Literal["keep_start", "drop"] = "keep_start",
        pad_to: Literal["longest", "seq_len"] = "longest",
        validation_files: list[str] | str | None = None,
        held_out_fraction: float | None = None,
        on_error: Literal["skip", "raise"] = "raise",
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        self.config = PreferenceDataModuleConfig(
            files=files,
            tokenizer=tokenizer,
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            split=split,
            keys=keys or KeysConfig(),
            chat_template=chat_template,
            too_long=too_long,
            pad_to=pad_to,
            validation_files=validation_files,
            held_out_fraction=held_out_fraction,
            on_error=on_error,
            seed=seed,
            num_workers=num_workers,
            cache_dir=cache_dir,
        )
        if faults := list(self.config.check()):
            raise ConfigError(faults)
        super().__init__(
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else find_cache_dir()
        self._data: _PreferenceData | None = None

    def prepare(self) -> Prepared:
        """Makes or finds tokenised pairs, and their order.

        Raises:
            ConfigError: The chat template cannot be used.
            DataError: A file cannot be read, a record is no preference, or no pair is left.
        """
        data = self._data = _PreferenceData(self.config, self.cache_dir)
        fingerprint = hash_key([data.key, self.config.seed])
        tokenizer = data.encoder.tokenizer
        return Prepared(tokenizer, data.order, data.train, data.held_out, fingerprint)

    @property
    def _ready(self) -> _PreferenceData:
        self.prepared  # noqa: B018  says what is missing
        assert self._data is not None
        return self._data

    @property
    def pairs_key(self) -> str:
        """Names these very pairs, training and validation, cut in this way; not their order."""
        return self._ready.key

    @property
    def num_pairs(self) -> int:
        """Pairs of training and validation together."""
        return len(self._ready.train) + len(self._ready.held_out)

    def read_pairs(self, pair_ids: Sequence[int]) -> PreferenceBatch:
        """A batch of pairs, all of training or all of validation.

        Args:
            pair_ids: Numbers among all pairs, as batches carry them.
        """
        train, held_out = self._ready.train, self._ready.held_out
        if pair_ids[0] < len(train):
            return train.read(pair_ids)
        return held_out.read([pair_id - len(train) for pair_id in pair_ids])

    def artefacts(self) -> Mapping[str, bytes]:
        """The files of the tokenizer, with the chat template in use."""
        source = self._ready.encoder.chat.template.source
        template = {} if source is None else {"chat_template.jinja": source.encode()}
        return {**super().artefacts(), **template}

    def describe(self) -> list[Section]:
        """What there is, what was cut and left out, and what was drawn (before the first step: what is going to be)."""
        data, drawn = self._ready, self.count_drawn()
        rows: list[list[str | int | float]] = [
            [name, len(pairs), len(pairs.shard) // 2, pairs.counts["too long"], pairs.shard.num_targets]
            for name, pairs in (("training", data.pairs), ("validation", data.held_out_pairs))
        ]  # fmt: skip
        columns = ["split", "pairs", "read", "too long", "tokens of answers"]
        note = f"{drawn:,} pairs drawn, an epoch being {len(data.pairs):,}. {data.tell_counts()}."
        reports = [it.report for it in data.stores if it.report.faults]
        note = "\n".join([note, *(report.describe() for report in reports)])
        return [Section(title="Preferences", table=Table(columns=columns, rows=rows), note=note)]


class _PreferenceData:
    """What configured files come to: pairs, readers, order."""

    def __init__(self, config: PreferenceDataModuleConfig, cache_dir: Path) -> None:
        self.config, self.cache_dir = config, cache_dir
        settings = config.to_finetune()
        self.encoder, self._template_key = build_encoder(settings)
        source = settings.fill(SourceConfig(files=config.files, split=config.split))
        store = self._open(source, settings.held_out)
        self.stores = [store]
        self.pairs = self._select(store, "train")
        if config.validation_files:
            files = SourceConfig(files=config.validation_files, split="validation")
            self.stores.append(self._open(settings.fill(files), 0.0))
            self.held_out_pairs = self._select(self.stores[1], "train")
        else:
            self.held_out_pairs = self._select(store, "held_out")
        if not len(self.pairs):
            raise DataError(f"no pair is left to train on in {config.files}: {self.tell_counts()}")
        self.train, self.held_out = (
            PairReader(
                pairs,
                first_id=first,
                pad_id=self.encoder.tokenizer.eos_id,
                is_fixed=config.pad_to == "seq_len",
            )
            for pairs, first in ((self.pairs, 0), (self.held_out_pairs, len(self.pairs)))
        )
        number = len(self.pairs)
        self.order = SampleOrder(
            names=["train"], num_blocks=[number], draws=[number], seed=config.seed
        )
        folders = [it.folder.name for it in self.stores]
        self.key = hash_key([folders, config.seq_len, config.too_long])
        logger.info("preferences: %s", self.tell_counts())

    def _open(self, source: SourceConfig, held_out_fraction: float) -> Store:
        return open_store(
            source,
            encoder=self.encoder,
            template_key=self._template_key,
            held_out_fraction=held_out_fraction,
            on_error=self.config.on_error,
            cache_dir=self.cache_dir,
            as_pairs=True,
        )

    def _select(self, store: Store, split: Literal["train", "held_out"]) -> Pairs:
        return select_pairs(
            store.shards[split], seq_len=self.config.seq_len, too_long=self.config.too_long
        )

    def tell_counts(self) -> str:
        """One line: pairs, what was too long, and what was left out."""
        text = f"{len(self.pairs):,} pairs to learn from and {len(self.held_out_pairs):,} held out"
        splits = (self.pairs.counts, self.held_out_pairs.counts)
        counts = {name: sum(it[name] for it in splits) for name in splits[0]}
        skipped = sum(store.report.faults.total() for store in self.stores)
        was_cut = "left out" if self.config.too_long == "drop" else "only their start is kept"
        for number, what in (
            (counts["too long"], f"longer than {self.config.seq_len} tokens ({was_cut})"),
            (counts["without an answer"], "left out, since cutting left no answer"),
            (counts["the same"], "left out, since cutting left two times the same"),
            (sum(store.num_same for store in self.stores), "left out, whose answers are the same"),
            (skipped, "records skipped"),
        ):
            text += f"; {number:,} {what}" if number else ""
        return text
