"""Bits per byte of a language model on documents, by rolling windows, next to what compressors reach.

A document is its prefix token (begin of text, else end of text) and its tokens. The first window predicts up to
``context`` of them; each later one predicts the next ``stride`` (``context`` unless given) and reads as many tokens
before them as ``context`` allows. So windows of full length have one token of context without a stride, and the last
window of a document, which has less to predict, has more: the rule of lm-eval's rolling log-likelihoods.
"""

# Shapes: B = windows, T = tokens of the longest one, D = width, V = vocabulary.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_like.core.errors import ConfigError, DataError
from nemo_like.core.summary import Section, Table
from nemo_like.data.packing import IGNORE_INDEX
from nemo_like.metrics.bits_per_byte import BitsPerByte, TextLosses, Weights, choose_weights
from nemo_like.metrics.compression import measure_compression
from nemo_like.text.tokenizer import Tokenizer

from .decoder.network import DecoderNetwork
from .losses import token_losses

Item = TypeVar("Item")

# Texts that are tokenised together, and batches among which windows of like length are put together.
_DOCUMENTS_AT_ONCE = 64
_BATCHES_AT_ONCE = 64


@dataclass(frozen=True)
class Window:
    """A stretch of a document that is computed at once."""

    subset: str
    tokens: NDArray[np.int32]
    """What is read, and one more; never longer than the context and one."""
    num_targets: int
    """How many of the last tokens are predicted."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What :func:`evaluate_bits_per_byte` found; subsets stand in the order of their names."""

    model: BitsPerByte
    compressors: Mapping[str, BitsPerByte]
    """The same for each compressor by name; its ``pooled`` compresses all subsets as one text."""
    num_documents: Mapping[str, int]
    """Of each subset, without empty ones."""
    num_bytes: Mapping[str, int]
    """UTF-8 bytes of the raw texts of each subset."""
    num_empty: int
    """Documents without text, which are left out."""
    weights: Weights
    context: int
    """Tokens that the model reads at most."""
    stride: int
    """Tokens that a window behind the first predicts."""
    prefix: str
    """Which token stands before each document."""
    tokenizer: str
    """Size and content hash."""
    quantized: Mapping[str, BitsPerByte] = field(default_factory=dict)
    """Of the same network with quantised weights, by kind."""

    def to_section(self, title: str = "Bits per byte on held-out text") -> Section:
        """A table with a row for each subset and for each of the three aggregates."""
        columns = [self.model, *self.quantized.values(), *self.compressors.values()]
        rows: list[list[str | int | float]] = [
            [name, self.num_documents[name], size, *(column.by_subset[name] for column in columns)]
            for name, size in self.num_bytes.items()
        ]
        total = [sum(self.num_documents.values()), sum(self.num_bytes.values())]
        rows.append(["all, pooled over bytes", *total, *(column.pooled for column in columns)])
        rows.append(["all, weighted mean", "", "", *(column.weighted for column in columns)])
        rows.append(["all, plain mean", "", "", *(column.mean for column in columns)])
        names = ["subset", "documents", "bytes", "model", *self.quantized, *self.compressors]
        emphasis = range(len(rows) - 3, len(rows))
        return Section(
            title=title,
            table=Table(columns=names, rows=rows, emphasis=emphasis),
            note=". ".join(self._describe()) + ".",
        )

    def _describe(self) -> Iterator[str]:
        how = (
            "disjoint windows"
            if self.stride == self.context
            else f"windows every {self.stride} tokens"
        )
        yield f"Context {self.context} tokens, stride {self.stride} ({how})"
        yield f"Prefix of each document: {self.prefix}"
        yield f"Tokenizer: {self.tokenizer}"
        yield f"Weights of the weighted mean: {self.weights.source}"
        if self.compressors:
            yield "Compressors: pooled is all subsets as one text"
        if self.num_empty:
            yield f"Empty documents left out: {self.num_empty}"

    def to_dict(self) -> dict[str, Any]:
        """Every figure in full precision, for JSON."""
        figures = {"model": self.model, **self.quantized, **self.compressors}
        return {
            "bits_per_byte": {
                name: {
                    "by_subset": dict(each.by_subset),
                    "pooled": each.pooled,
                    "weighted": each.weighted,
                    "mean": each.mean,
                }
                for name, each in figures.items()
            },
            "num_documents": dict(self.num_documents),
            "num_bytes": dict(self.num_bytes),
            "num_empty": self.num_empty,
            "weights": dict(self.weights.by_subset),
            "weights_source": self.weights.source,
            "context": self.context,
            "stride": self.stride,
            "prefix": self.prefix,
            "tokenizer": self.tokenizer,
        }


def evaluate_bits_per_byte(
    network: DecoderNetwork,
    tokenizer: Tokenizer,
    documents: Iterable[tuple[str, str]],
    *,
    context: int,
    stride: int | None = None,
    batch_size: int = 8,
    mixture: Mapping[str, float] | None = None,
    compression: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> Evaluation:
    """Computes bits per byte of each subset and over all of them.

    The figures do not depend on the number of ranks: the same windows are computed together whoever computes them, and
    their losses are summed exactly.

    Args:
        network: Computes on its own device, in evaluation mode; autocast is the caller's.
        tokenizer: Of the network.
        documents: Subset and raw text of each; the same on every rank, read once.
        context: Tokens that the network reads at most.
        stride: Tokens that a window behind the first predicts; None is ``context``, the least work.
        batch_size: Windows that are computed at once.
        mixture: Weights of the weighted mean by subset; None takes those published for the Pile where all names
            match, else bytes.
        compression: Also measure the compressors, which keeps the texts in memory.
        rank: Which share of the work this process does; all ranks must call this.
        world_size: How many ranks share it.

    Raises:
        ConfigError: ``context``, ``stride`` or ``batch_size`` is out of range, or the mixture lacks a subset.
        DataError: There is no text.
    """
    stride = context if stride is None else stride
    longest = network.shape.max_positions
    faults = []
    if not 1 <= context <= longest:
        faults.append(
            f"context={context}: must be 1 to {longest}, the longest sequence of the model"
        )
    if not 1 <= stride <= context:
        faults.append(f"stride={stride}: must be 1 to context={context}")
    if batch_size < 1:
        faults.append(f"batch_size={batch_size}: must be at least 1")
    if faults:
        raise ConfigError(faults)
    corpus = _Corpus(documents, tokenizer, context=context, stride=stride, keep_texts=compression)
    was_training = network.training
    network.eval()
    try:
        for share in _group(corpus.iterate_batches(batch_size), world_size):
            is_mine = rank < len(share)
            # Where ranks outnumber the batches that are left, they compute all the same: a network whose weights are
            # spread over the ranks needs all of them for each forward pass.
            batch = share[rank] if is_mine else share[0]
            for window, nats in zip(batch, compute_nats(network, batch), strict=True):
                if is_mine:
                    corpus.losses.add_piece(window.subset, nats)
    finally:
        network.train(was_training)
    return corpus.conclude(mixture=mixture, rank=rank, world_size=world_size)


def cut_windows(
    ids: NDArray[np.int32], *, subset: str, prefix_id: int, context: int, stride: int
) -> Iterator[Window]:
    """Cuts a document into windows that predict each of its tokens once.

    Args:
        ids: Tokens of the document, without a prefix; may be empty.
        subset: Where it belongs.
        prefix_id: What the first token is predicted from.
        context: Tokens that the network reads at most.
        stride: Tokens that a window behind the first predicts, 1 to ``context``.
    """
    stored = np.concatenate([np.array([prefix_id], dtype=np.int32), ids])
    done = 0
    while done < len(ids):
        end = min(len(ids), done + (stride if done else context))
        start = max(0, end - context)
        yield Window(subset, stored[start : end + 1], end - done)
        done = end


@torch.no_grad()
def compute_nats(network: DecoderNetwork, windows: Sequence[Window]) -> list[float]:
    """Negative log-likelihood of the targets of each window, in nats, added up in float64."""
    lengths = [len(window.tokens) - 1 for window in windows]
    tokens_BT = torch.zeros(len(windows), max(lengths), dtype=torch.int64)
    targets_BT = torch.full_like(tokens_BT, IGNORE_INDEX)
    for row, (window, length) in enumerate(zip(windows, lengths, strict=True)):
        tokens = torch.from_numpy(window.tokens.astype(np.int64))
        tokens_BT[row, :length] = tokens[:-1]
        targets_BT[row, length - window.num_targets : length] = tokens[-window.num_targets :]
    weight_VD = network.output_weight_VD
    hidden_BTD = network.compute_hidden(tokens_BT.to(weight_VD.device))
    nats_BT: Tensor = token_losses(hidden_BTD, weight_VD, targets_BT.to(weight_VD.device))
    # On the CPU, as not every device has float64.
    sums: list[float] = nats_BT.cpu().double().sum(dim=1).tolist()
    return sums


class _Corpus:
    """Documents on their way to figures; a pass over its batches counts them."""

    def __init__(
        self,
        documents: Iterable[tuple[str, str]],
        tokenizer: Tokenizer,
        *,
        context: int,
        stride: int,
        keep_texts: bool,
    ) -> None:
        self.documents, self.tokenizer = documents, tokenizer
        self.context, self.stride, self.keep_texts = context, stride, keep_texts
        self.losses = TextLosses()
        self.texts: dict[str, list[bytes]] = {}
        self.num_empty = 0

    def iterate_batches(self, batch_size: int) -> Iterator[list[Window]]:
        """Windows in batches of like length; which ones come together depends on the documents alone."""
        for windows in _group(self._iterate_windows(), batch_size * _BATCHES_AT_ONCE):
            windows.sort(key=lambda window: -len(window.tokens))
            yield from _group(windows, batch_size)

    def _iterate_windows(self) -> Iterator[Window]:
        for documents in _group(self._iterate_real(), _DOCUMENTS_AT_ONCE):
            all_ids = self.tokenizer.encode_batch([text for _, text in documents])
            for (subset, _), ids in zip(documents, all_ids, strict=True):
                yield from cut_windows(
                    ids,
                    subset=subset,
                    prefix_id=self.tokenizer.prefix_id,
                    context=self.context,
                    stride=self.stride,
                )

    def _iterate_real(self) -> Iterator[tuple[str, str]]:
        """Documents with text, counted."""
        for subset, text in self.documents:
            # The bytes of what stands in the corpus: what a tokenizer makes of it does not matter.
            raw = text.encode()
            if not raw:
                self.num_empty += 1
                continue
            self.losses.count_document(subset, len(raw))
            if self.keep_texts:
                self.texts.setdefault(subset, []).append(raw)
            yield subset, text

    def conclude(
        self, *, mixture: Mapping[str, float] | None, rank: int, world_size: int
    ) -> Evaluation:
        """Figures over all ranks; all of them must call it, when all batches are done."""
        num_bytes = dict(sorted(self.losses.num_bytes.items()))
        if not num_bytes:
            raise DataError(
                f"there is no text to evaluate: {self.num_empty} documents, all of them empty"
            )
        weights = choose_weights(num_bytes, mixture)
        bits = self.losses.compute_bits(world_size=world_size)
        compressors = {}
        if self.keep_texts:
            texts = {subset: self.texts[subset] for subset in num_bytes}
            sizes = measure_compression(texts, rank=rank, world_size=world_size)
            for name, (by_subset, together) in sizes.items():
                bits_of_it = {subset: 8 * size for subset, size in by_subset.items()}
                figures = BitsPerByte.from_bits(bits_of_it, num_bytes, weights)
                pooled = 8 * together / sum(num_bytes.values())
                compressors[name] = replace(figures, pooled=pooled)
        tokenizer = self.tokenizer
        return Evaluation(
            model=BitsPerByte.from_bits(bits, num_bytes, weights),
            compressors=compressors,
            num_documents=self.losses.num_documents,
            num_bytes=num_bytes,
            num_empty=self.num_empty,
            weights=weights,
            context=self.context,
            stride=self.stride,
            prefix=f"begin of text ({tokenizer.bos_token})"
            if tokenizer.bos_token is not None
            else f"end of text ({tokenizer.eos_token})",
            tokenizer=f"{tokenizer.vocab_size} tokens, {tokenizer.content_hash[:12]}",
        )


def _group(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of ``size`` items; the last one may be shorter."""
    group: list[Item] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
