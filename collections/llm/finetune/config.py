"""Configuration of the fine-tuning data: files, what stands in a record, template, cutting, packing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..config import TokenizerConfig

Kind = Literal["auto", "chat", "pair", "text", "preference"]
TooLong = Literal["keep_start", "keep_end", "split", "drop"]
DEFAULT_HELD_OUT = 0.02


@dataclass(kw_only=True)
class KeysConfig:
    """Under which keys of a record things stand; null tries the usual names."""

    messages: str | None = None
    """Messages of a chat: ``messages``, ``conversations``, ``conversation``."""
    role: str | None = None
    """Who speaks, in a message: ``role``, ``from``."""
    content: str | None = None
    """What is said, in a message: ``content``, ``value``."""
    tools: str | None = None
    """Tools that a chat may call: ``tools``; a list, or a list written as JSON."""
    system: str | None = None
    """System message beside a chat, pair or preference: ``system``."""
    prompt: str | None = None
    """What is asked: ``instruction``, ``prompt``, ``question``."""
    input: str | None = None
    """What is appended to it after an empty line, unless empty: ``input``, ``context``."""
    completion: str | None = None
    """The answer to learn: ``output``, ``completion``, ``answer``, ``response``."""
    text: str | None = None
    """A plain text, all of it to learn: ``text``."""
    chosen: str | None = None
    """The better answer of a preference: ``chosen``."""
    rejected: str | None = None
    """The worse one: ``rejected``."""


@dataclass(kw_only=True)
class SourceConfig:
    """Some files, taken together."""

    files: list[str] | str
    """``.jsonl``, ``.jsonl.zst``, ``.jsonl.gz``, ``.json``, ``.parquet``, ``.arrow``, folders of a Hugging Face data
    set, globs of all of them; ``pkg://package/...`` looks inside a package."""
    weight: float | None = None
    """Relative share of samples (of blocks, when packed); given for all sources or for none, which shows each sample
    once an epoch."""
    split: str = "train"
    """Which split of a Hugging Face folder."""
    kind: Kind | None = None
    """What a record is; null is that of the data module."""
    keys: KeysConfig | None = None
    """Names of the keys; null are those of the data module."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        if not self.files:
            yield f"files={self.files!r}: names no file"
        if self.weight is not None and not 0 < self.weight < float("inf"):
            yield f"weight={self.weight}: must be a number above 0"


@dataclass(kw_only=True)
class FinetuneDataModuleConfig:
    """Samples of chats, pairs and texts, tokenised once, cut, packed and ordered."""

    files: list[str] | str | None = None
    """The files of the one source; or see ``sources``."""
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Several sources by name, mixed by their weights; instead of ``files``."""
    tokenizer: TokenizerConfig
    """The tokenizer of the model: ``path`` is a tokenizer.json, a Hugging Face folder, a checkpoint, or a run."""
    seq_len: int
    """Most tokens of a sample, and size of a block when packed."""
    global_batch_size: int
    """Samples (blocks, when packed) per optimizer step over all ranks."""
    kind: Kind = "auto"
    """What a record is; ``auto`` goes by its keys."""
    keys: KeysConfig = field(default_factory=KeysConfig)
    """Under which keys things stand."""
    chat_template: str | None = None
    """Null is the tokenizer's own, or else ``chatml``; ``chatml`` is the built-in one; ``none`` joins the messages as
    they are, with an end of text behind each answer; anything else is a file with a Jinja template."""
    too_long: TooLong = "keep_start"
    """What becomes of a sample of more tokens than ``seq_len``: its start or its end is kept, or it is split into
    samples of its own, or dropped. Each is counted."""
    packing: bool = True
    """Several samples share a block and never see each other; without it, each is a row that is padded on the right."""
    pad_to: Literal["longest", "seq_len"] = "longest"
    """Without packing: length of the rows, that of the longest in the micro-batch or the same always (pipelines and
    compiled models want that)."""
    validation_files: list[str] | str | None = None
    """Files of the same kind to validate on."""
    held_out_fraction: float | None = None
    """Share of samples, chosen by content, that are kept for validation; null is 0.02, or 0 with validation files."""
    on_error: Literal["skip", "raise"] = "raise"
    """What a record that cannot be used does: it is skipped, counted and reported, or it ends the run."""
    seed: int = 0
    """Of the order of samples."""
    num_workers: int = 0
    """Loader processes; 0 reads in the training process."""
    cache_dir: str | None = None
    """Folder for tokenised samples; null is ``nemo-like`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""

    @property
    def held_out(self) -> float:
        """The share that is kept for validation."""
        if self.held_out_fraction is not None:
            return self.held_out_fraction
        return 0.0 if self.validation_files else DEFAULT_HELD_OUT

    def list_sources(self) -> dict[str, SourceConfig]:
        """The sources by name, complete: kind and keys are filled in."""
        named = dict(self.sources)
        if self.files is not None:
            named = {"train": SourceConfig(files=self.files)}
        return {name: self.fill(it) for name, it in named.items()}

    def fill(self, source: SourceConfig) -> SourceConfig:
        """A source with kind and keys."""
        return SourceConfig(
            files=source.files,
            weight=source.weight,
            split=source.split,
            kind=source.kind or self.kind,
            keys=source.keys or self.keys,
        )

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        if (self.files is None) == (not self.sources):
            yield (
                f"files={self.files!r} and sources={sorted(self.sources)}: give one of the two, the files of one "
                "source or several sources by name"
            )
        elif self.files is not None and not self.files:
            yield f"files={self.files!r}: names no file"
        weights = {name: source.weight for name, source in self.sources.items()}
        if None in weights.values() and set(weights.values()) != {None}:
            without = ", ".join(name for name, weight in weights.items() if weight is None)
            yield f"sources: no weight for {without}; give one to all sources or to none"
        for name in ("seq_len", "global_batch_size"):
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)}: must be at least 1"
        if self.packing and self.pad_to != "longest":
            yield f"pad_to={self.pad_to}: has no effect with packing=true, whose blocks all have seq_len tokens"
        fraction = self.held_out_fraction
        if fraction is not None and not 0 <= fraction < 1:
            yield f"held_out_fraction={fraction}: must be at least 0 and below 1"
        if fraction and self.validation_files:
            yield f"held_out_fraction={fraction}: has no effect beside validation_files; leave one of them out"
        if self.num_workers < 0:
            yield f"num_workers={self.num_workers}: must be at least 0"

    def check_all(self) -> Iterator[str]:
        """Faults in the values, those of the parts included."""
        yield from self.check()
        yield from (f"tokenizer.{fault}" for fault in self.tokenizer.check())
        if self.tokenizer.train_vocab_size is not None:
            yield (
                f"tokenizer.train_vocab_size={self.tokenizer.train_vocab_size}: fine-tuning takes the tokenizer of "
                "the model; give tokenizer.path"
            )
        for name, source in self.sources.items():
            yield from (f"sources.{name}.{fault}" for fault in source.check())
