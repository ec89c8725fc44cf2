"""Validation by generation: what the model answers to prompts that it does not train on."""
# Shapes: B = samples, T = tokens.

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from nemo_like.core.errors import ConfigError
from nemo_like.core.summary import Section

from .config import HeldOutSamplesConfig
from .data import IGNORE_INDEX, TextBatch
from .decoder.model import DecoderModel
from .generation.config import GenerationConfig
from .generation.generate import generate
from .preference.batch import PreferenceBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOutPrompt:
    """The start of a held-out sample, and how it goes on."""

    prompt: list[int]
    """Token ids that the model reads."""
    reference: list[int]
    """Token ids that stand there."""


def find_prompts(batch: TextBatch, limit: int) -> list[HeldOutPrompt]:
    """Cuts samples where what is scored begins: before the first answer of a chat.

    A text that is scored from its start is cut in the middle.

    Args:
        batch: Of a validation.
        limit: Most prompts that are given.
    """
    prompts: list[HeldOutPrompt] = []
    segments_BT = batch.segments_BT
    for row in range(len(batch.tokens_BT)):
        tokens_T, targets_T = batch.tokens_BT[row].cpu(), batch.targets_BT[row].cpu()
        segments_T = torch.zeros_like(tokens_T) if segments_BT is None else segments_BT[row].cpu()
        for segment in segments_T.unique_consecutive().tolist():
            places = (segments_T == segment).nonzero().flatten()
            found = _cut(tokens_T[places], targets_T[places])
            if found is not None and len(prompts) < limit:
                prompts.append(found)
    return prompts


def _cut(tokens_T: Tensor, targets_T: Tensor) -> HeldOutPrompt | None:
    """The prompt of one document; None where nothing is scored."""
    is_scored_T = targets_T != IGNORE_INDEX
    if not bool(is_scored_T.any()):
        return None
    first = int(is_scored_T.nonzero()[0])
    rest_T = is_scored_T[first:]
    # The first stretch without a gap: one answer of a chat of several.
    length = int(rest_T.long().cumprod(0).sum())
    if first < 2:
        first, length = first + length // 2, length - length // 2
    reference = targets_T[first : first + length].tolist()
    return HeldOutPrompt(tokens_T[: first + 1].tolist(), reference)


class HeldOutSamples(pl.Callback):
    """Generates from held-out prompts after each validation, and keeps prompt, answer and reference.

    They go into ``samples.jsonl`` in the folder of the run and, the last of them, into its report. The share of answers
    that are the reference, to the token, is ``val/exact_match``; greedy decoding draws no random number.

    Args:
        num_prompts: How many, the first of the validation data of rank zero, always the same.
        max_tokens: Longest answer.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(self, *, num_prompts: int = 4, max_tokens: int = 64) -> None:
        config = HeldOutSamplesConfig(num_prompts=num_prompts, max_tokens=max_tokens)
        if faults := list(config.check()):
            raise ConfigError(faults)
        self.num_prompts, self.max_tokens = num_prompts, max_tokens
        self._prompts: list[HeldOutPrompt] = []
        self._answers: list[dict[str, Any]] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forgets the prompts of the last validation."""
        self._prompts = []

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Takes prompts while there are too few."""
        missing = self.num_prompts - len(self._prompts)
        if trainer.is_global_zero and missing > 0:
            text = batch.better if isinstance(batch, PreferenceBatch) else batch
            self._prompts += find_prompts(text, missing)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Generates on rank zero and gives ``val/exact_match``."""
        assert isinstance(pl_module, DecoderModel), "a callback of language models"
        network = pl_module.take_whole_network()  # on all ranks: they may have to put it together
        score = 0.0
        if network is not None and pl_module.tokenizer is not None and self._prompts:
            tokenizer = pl_module.tokenizer
            config = GenerationConfig(
                max_tokens=self.max_tokens, temperature=0.0, eviction_policy="sliding_window"
            )
            results = generate(network, tokenizer, [it.prompt for it in self._prompts], config)
            self._answers = [
                {
                    "step": trainer.global_step,
                    "prompt": tokenizer.decode(held.prompt, skip_special_tokens=False),
                    "answer": result.text,
                    "reference": tokenizer.decode(held.reference),
                    "is_exact": _is_exact(result.tokens, held.reference, tokenizer.eos_id),
                }
                for held, result in zip(self._prompts, results, strict=True)
            ]
            score = sum(it["is_exact"] for it in self._answers) / len(self._answers)
            self._append(Path(trainer.default_root_dir) / "samples.jsonl")
        score = trainer.strategy.broadcast(score)
        if network is not None and pl_module.tokenizer is not None:
            pl_module.report_validation({"val/exact_match": score})

    def _append(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for answer in self._answers:
                file.write(json.dumps(answer, ensure_ascii=False) + "\n")

    def describe(self) -> list[Section]:
        """The answers of the last validation, for the report of a run."""
        if not self._answers:
            return []
        texts = [
            f"{it['prompt'].strip()}\n--> {it['answer'].strip()}\n(reference: {it['reference'].strip()})"
            for it in self._answers
        ]
        step = self._answers[0]["step"]
        return [
            Section(title=f"Answers to held-out prompts at step {step}", text="\n\n".join(texts))
        ]


def _is_exact(answer: list[int], reference: list[int], eos_id: int) -> bool:
    """Whether an answer is the reference; the token that ends it may be missing on either side."""
    ends = [tokens[:-1] if tokens[-1:] == [eos_id] else tokens for tokens in (answer, reference)]
    return ends[0] == ends[1]
