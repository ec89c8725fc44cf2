"""Configuration of preference optimisation: the loss, its reference, and the pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ..config import TokenizerConfig
from ..finetune.config import FinetuneDataModuleConfig, KeysConfig

LossKind = Literal["sigmoid", "ipo"]
Reference = Literal["auto", "base", "cached", "none"]

_REFUSED_STRATEGIES = {
    "MegatronStrategy": "computes its own loss",
    "DeepSpeedStrategy": "is not supported with an objective",
}


@dataclass(kw_only=True)
class DpoConfig:
    """Direct preference optimisation: the better answer gains likelihood over the worse one, against a reference."""

    beta: float = 0.1
    """How dear it is to leave the reference: larger stays nearer to it."""
    loss: LossKind = "sigmoid"
    """``sigmoid`` is that of DPO; ``ipo`` (identity preference optimisation) draws the difference of the log-ratios per
    token to ``1 / (2 beta)`` and no further."""
    label_smoothing: float = 0.0
    """Share of pairs that are thought to be the wrong way round (conservative DPO), 0 to below 0.5; for ``sigmoid``."""
    reference: Reference = "auto"
    """``base`` is the frozen model, its adapters turned off; ``cached`` is the model that training starts from, whose
    log-probabilities are computed once before training and kept in the cache; ``none`` goes without (every answer
    equally likely). ``auto`` takes ``base`` with a new adapter, else ``cached``."""

    def resolve_reference(self, adapter: Any) -> Literal["base", "cached", "none"]:
        """What ``auto`` means.

        Args:
            adapter: Of the model: an object or a mapping with ``init_from``, or None.
        """
        if self.reference != "auto":
            return self.reference
        return "base" if adapter is not None and _start_of(adapter) is None else "cached"

    def check(self) -> Iterator[str]:
        """Yields one line per fault."""
        if not 0 < self.beta < math.inf:
            yield f"beta={self.beta}: must be a finite number above 0"
        if not 0 <= self.label_smoothing < 0.5:
            yield f"label_smoothing={self.label_smoothing}: must be at least 0 and below 0.5"
        if self.label_smoothing and self.loss != "sigmoid":
            yield f"label_smoothing={self.label_smoothing}: has no effect with loss={self.loss}; leave it out"

    def check_model(self, *, init_from: str | None, adapter: Any) -> Iterator[str]:
        """What does not fit the model.

        Args:
            init_from: Where training starts.
            adapter: As in :meth:`resolve_reference`.
        """
        if init_from is None:
            yield "model.init_from: is required with an objective: preferences are learnt by a model that can answer"
        if self.reference != "base":
            return
        if adapter is None:
            yield "reference=base: needs an adapter to turn off; take reference=cached"
        elif (start := _start_of(adapter)) is not None:
            yield (
                f"reference=base: would be the base without the adapter that training starts from ({start}); take "
                "reference=cached, or start a new adapter: model.init_from takes that folder, too, and merges it"
            )

    def check_run(self, run: Any) -> Iterator[str]:
        """What does not fit the rest of a run.

        Args:
            run: The ``RunConfig``.
        """
        strategy = str(run.strategy["_target_"]).rpartition(".")[2]
        if strategy in _REFUSED_STRATEGIES:
            yield (
                f"strategy._target_={strategy}: {_REFUSED_STRATEGIES[strategy]}; set strategy=ddp or strategy=fsdp"
            )
        yield from self.check_model(
            init_from=run.model.get("init_from"), adapter=run.model.get("adapter")
        )


def _start_of(adapter: Any) -> str | None:
    start = (
        adapter.get("init_from")
        if isinstance(adapter, dict)
        else getattr(adapter, "init_from", None)
    )
    return None if start is None else str(start)


@dataclass(kw_only=True)
class PreferenceDataModuleConfig:
    """Pairs of a better and a worse answer to the same prompt, tokenised once, and ordered."""

    files: list[str] | str
    """Files of preferences, of every kind that fine-tuning reads; ``pkg://package/...`` looks inside a package."""
    tokenizer: TokenizerConfig
    """The tokenizer of the model: ``path`` is a tokenizer.json, a Hugging Face folder, a checkpoint, or a run."""
    seq_len: int
    """Most tokens of an answer with its prompt."""
    global_batch_size: int
    """Pairs per optimizer step over all ranks; ``strategy.micro_batch_size`` counts pairs, too."""
    split: str = "train"
    """Which split of a Hugging Face folder."""
    keys: KeysConfig = field(default_factory=KeysConfig)
    """Under which keys things stand."""
    chat_template: str | None = None
    """Null is the tokenizer's own, or else ``chatml``; ``chatml``; ``none``; or a file with a Jinja template."""
    too_long: Literal["keep_start", "drop"] = "keep_start"
    """What becomes of a pair of which one side has more tokens than ``seq_len``: the start of both is kept, or it is
    left out. Both are counted, and so are pairs that cutting leaves without a difference."""
    pad_to: Literal["longest", "seq_len"] = "longest"
    """Length of the rows: that of the longest in the micro-batch, or the same always."""
    validation_files: list[str] | str | None = None
    """Files of the same kind to validate on."""
    held_out_fraction: float | None = None
    """Share of prompts, chosen by content, whose pairs are kept for validation; null is 0.02, or 0 with validation
    files."""
    on_error: Literal["skip", "raise"] = "raise"
    """What a record that is no preference does: it is skipped, counted and reported, or it ends the run. Pairs of an
    answer and itself are always left out and counted."""
    seed: int = 0
    """Of the order of pairs."""
    num_workers: int = 0
    """Loader processes; 0 reads in the training process."""
    cache_dir: str | None = None
    """Folder for tokenised pairs and log-probabilities; null is ``nemo-like`` in ``$XDG_CACHE_HOME`` or
    ``~/.cache``."""

    def to_finetune(self) -> FinetuneDataModuleConfig:
        """The same for the reader of fine-tuning data."""
        return FinetuneDataModuleConfig(
            files=self.files,
            tokenizer=self.tokenizer,
            seq_len=self.seq_len,
            global_batch_size=self.global_batch_size,
            kind="preference",
            keys=self.keys,
            chat_template=self.chat_template,
            too_long=self.too_long,
            packing=False,
            pad_to=self.pad_to,
            validation_files=self.validation_files,
            held_out_fraction=self.held_out_fraction,
            on_error=self.on_error,
            seed=self.seed,
            num_workers=self.num_workers,
            cache_dir=self.cache_dir,
        )

    def check(self) -> Iterator[str]:
        """Yields one line per fault."""
        if not self.files:
            yield f"files={self.files!r}: names no file"
        else:
            yield from self.to_finetune().check()

    def check_run(self, run: Any) -> Iterator[str]:
        """What does not fit the rest of a run.

        Args:
            run: The ``RunConfig``.
        """
        if not run.model.get("objective"):
            yield (
                "model.objective: is required with preferences, else the worse answers would be learnt as well: "
                "{_target_: nemo_like.collections.llm.preference.Dpo}"
            )
