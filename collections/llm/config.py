"""Configuration of the text data: corpus, tokenizer, mixture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

MIN_TRAINED_VOCAB = 257  # every byte, and the end of text


@dataclass(kw_only=True)
class TokenizerConfig:
    """Where the tokenizer comes from: one of ``path`` and ``train_vocab_size``."""

    path: str | None = None
    """A ``tokenizer.json`` or a Hugging Face folder; ``pkg://package/...`` looks inside a
    package."""
    train_vocab_size: int | None = None
    """Trains a byte-level BPE of this many tokens from the training split of the corpus, once."""
    train_mb: float = 64.0
    """Megabytes of text that it is trained from: a sample of documents, kept in memory; more
    changes little."""
    bos_token: str | None = None
    """Begin of text; null takes what the files say, which may be none."""
    eos_token: str | None = None
    """End of text; null takes what the files say."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        if (self.path is None) == (self.train_vocab_size is None):
            yield (
                f"path={self.path} and train_vocab_size={self.train_vocab_size}: give one of the two, "
                "a tokenizer to load or the size of one to train"
            )
        if self.train_vocab_size is not None:
            if self.train_vocab_size < MIN_TRAINED_VOCAB:
                yield (
                    f"train_vocab_size={self.train_vocab_size}: must be at least {MIN_TRAINED_VOCAB}, "
                    "the bytes and the end of text"
                )
            for name in ("bos_token", "eos_token"):
                if getattr(self, name) is not None:
                    yield f"{name}={getattr(self, name)!r}: is for a tokenizer to load; a trained one has its own"
        if not self.train_mb > 0:
            yield f"train_mb={self.train_mb}: must be above 0"


@dataclass(kw_only=True)
class MixtureConfig:
    """How often each subset is drawn; without a table every block comes once an epoch."""

    weights: dict[str, float] | None = None
    """Relative share of samples of each subset, all of them named; 0 leaves one out of training."""
    epochs: dict[str, float] | None = None
    """Passes over a subset within one epoch, such as 2 or 0.5; one where it is not named."""
    exclude: list[str] = field(default_factory=list)
    """Subsets that are neither trained on, nor held out, nor seen by a tokenizer in training."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        if self.weights is not None and self.epochs is not None:
            yield "weights and epochs: both are given; keep one"
        for kind in ("weights", "epochs"):
            table: dict[str, float] = getattr(self, kind) or {}
            for name, number in table.items():
                if not 0 <= number < float("inf"):
                    yield f"{kind}.{name}={number}: must be a number from 0 up"
                if name in self.exclude:
                    yield f"{kind}.{name}={number}: is excluded as well; take it out of one of the two"


@dataclass(kw_only=True)
class TextDataModuleConfig:
    """A corpus of documents, tokenised once, cut into blocks, mixed and ordered."""

    corpus: list[str] | str
    """jsonl.zst files or globs; ``pkg://package/...`` looks inside a package."""
    tokenizer: TokenizerConfig
    """Which tokenizer."""
    seq_len: int
    """Tokens of a sample; documents share blocks and never see each other."""
    global_batch_size: int
    """Samples per optimizer step over all ranks."""
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    """How often each subset is drawn."""
    subset_key: str = "subset"
    """Key of a document's ``meta`` that names its subset; else ``pile_set_name``, else the name of
    the file."""
    held_out_fraction: float = 0.01
    """Share of documents, chosen by content, that are kept for validation; 0 keeps none."""
    on_error: Literal["skip", "raise"] = "raise"
    """What a record that cannot be read does: it is skipped, counted and reported, or it ends the
    run."""
    seed: int = 0
    """Of the order of samples."""
    num_workers: int = 0
    """Loader processes; 0 reads in the training process, which is enough while a step takes a few
    milliseconds."""
    tokenize_processes: int | None = None
    """Processes that tokenise; null chooses by the size of the corpus and the number of cores."""
    cache_dir: str | None = None
    """Folder for token shards and trained tokenizers; null is ``nemo-like`` in ``$XDG_CACHE_HOME``
    or ``~/.cache``."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        if not self.corpus:
            yield f"corpus={self.corpus!r}: names no file"
        for name in ("seq_len", "global_batch_size"):
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)}: must be at least 1"
        if not 0 <= self.held_out_fraction < 1:
            yield f"held_out_fraction={self.held_out_fraction}: must be at least 0 and below 1"
        if self.num_workers < 0:
            yield f"num_workers={self.num_workers}: must be at least 0"
        if self.tokenize_processes is not None and self.tokenize_processes < 1:
            yield f"tokenize_processes={self.tokenize_processes}: must be at least 1, or null to choose"

    def check_all(self) -> Iterator[str]:
        """Faults in the values, those of the parts included."""
        yield from self.check()
        for name, part in (("tokenizer", self.tokenizer), ("mixture", self.mixture)):
            yield from (f"{name}.{fault}" for fault in part.check())


@dataclass(kw_only=True)
class HeldOutSamplesConfig:
    """Answers to held-out prompts after each validation."""

    num_prompts: int = 4
    """How many; always the same ones, the first of the validation data."""
    max_tokens: int = 64
    """Longest answer in tokens."""

    def check(self) -> Iterator[str]:
        """Faults in the values."""
        for name in ("num_prompts", "max_tokens"):
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)}: must be at least 1"
