"""Bits per byte: how many bits a model needs for each byte of raw text, whatever its tokenizer.

The figure of some text is its total negative log-likelihood in nats, divided by ln 2 and by its length in UTF-8 bytes.
Three ways to sum up several subsets are quoted in the wild and differ; :class:`BitsPerByte` has them by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_like.core.errors import ConfigError
from nemo_like.metrics.ranks import gather_from_ranks

# "Weight" of Table 1 of Gao et al. 2020, "The Pile: An 800GB Dataset of Diverse Text for Language Modeling"
# (arXiv 2101.00027), in percent, under the names that its files have in ``pile_set_name``.
PILE_WEIGHTS = {
    "Pile-CC": 18.11,
    "PubMed Central": 14.40,
    "Books3": 12.07,
    "OpenWebText2": 10.01,
    "ArXiv": 8.96,
    "Github": 7.59,
    "FreeLaw": 6.12,
    "StackExchange": 5.13,
    "USPTO Backgrounds": 3.65,
    "PubMed Abstracts": 3.07,
    "Gutenberg (PG-19)": 2.17,
    "OpenSubtitles": 1.55,
    "Wikipedia (en)": 1.53,
    "DM Mathematics": 1.24,
    "Ubuntu IRC": 0.88,
    "BookCorpus2": 0.75,
    "EuroParl": 0.73,
    "HackerNews": 0.62,
    "YoutubeSubtitles": 0.60,
    "PhilPapers": 0.38,
    "NIH ExPorter": 0.30,
    "Enron Emails": 0.14,
}


@dataclass(frozen=True)
class Weights:
    """How much each subset counts in the weighted aggregate."""

    by_subset: Mapping[str, float]
    """Above zero; they need not add up to 1."""
    source: str
    """Where they come from, for a reader."""


def choose_weights(
    num_bytes: Mapping[str, int], mixture: Mapping[str, float] | None = None
) -> Weights:
    """Takes the weights of the given mixture, else those published for the Pile, else the bytes that are there.

    Args:
        num_bytes: UTF-8 bytes of each subset that was evaluated.
        mixture: Subset -> weight; may name others as well.

    Raises:
        ConfigError: The mixture lacks a subset, or weighs one by zero or less.
    """
    if mixture is not None:
        wrong = {name: mixture.get(name) for name in num_bytes if not mixture.get(name, 0) > 0}
        if wrong:
            raise ConfigError(
                [f"the mixture must give each evaluated subset a weight above 0, but has {wrong}"]
            )
        return Weights({name: mixture[name] for name in num_bytes}, "the given mixture")
    if num_bytes.keys() <= PILE_WEIGHTS.keys():
        source = "Table 1 of the Pile (Gao et al. 2020), rescaled to the subsets here"
        return Weights({name: PILE_WEIGHTS[name] for name in num_bytes}, source)
    return Weights(dict(num_bytes), "bytes, as no mixture is known")


@dataclass(frozen=True)
class BitsPerByte:
    """Figures of each subset and the three aggregates over them."""

    by_subset: Mapping[str, float]
    pooled: float
    """All bits over all bytes: large subsets count more."""
    weighted: float
    """Mean of the subsets' figures by :class:`Weights`."""
    mean: float
    """Plain mean of the subsets' figures: small subsets count as much as large ones."""

    @classmethod
    def from_bits(
        cls, bits: Mapping[str, float], num_bytes: Mapping[str, int], weights: Weights
    ) -> BitsPerByte:
        """Divides and aggregates.

        Args:
            bits: Of each subset.
            num_bytes: UTF-8 bytes of each subset, above 0.
            weights: Of each subset.
        """
        by_subset = {name: bits[name] / num_bytes[name] for name in num_bytes}
        shares = weights.by_subset
        return cls(
            by_subset=by_subset,
            pooled=math.fsum(bits[name] for name in num_bytes) / sum(num_bytes.values()),
            weighted=math.fsum(shares[name] * by_subset[name] for name in num_bytes)
            / math.fsum(shares[name] for name in num_bytes),
            mean=math.fsum(by_subset.values()) / len(by_subset),
        )


@dataclass
class TextLosses:
    """Negative log-likelihoods of pieces of text, and the sizes of the texts, by subset.

    Pieces are added up by ``math.fsum``, whose result is the exact sum, rounded once: it depends neither on their order
    nor on which rank computed which. Every rank counts every document and adds the pieces that it computed.
    """

    nats: dict[str, list[float]] = field(default_factory=dict)
    """One number a piece."""
    num_bytes: dict[str, int] = field(default_factory=dict)
    """UTF-8 bytes of the raw texts."""
    num_documents: dict[str, int] = field(default_factory=dict)

    def count_document(self, subset: str, num_bytes: int) -> None:
        """Counts a document; its loss comes piece by piece."""
        self.num_bytes[subset] = self.num_bytes.get(subset, 0) + num_bytes
        self.num_documents[subset] = self.num_documents.get(subset, 0) + 1

    def add_piece(self, subset: str, nats: float) -> None:
        """Adds the loss of a piece of a document."""
        self.nats.setdefault(subset, []).append(nats)

    def compute_bits(self, *, world_size: int = 1) -> dict[str, float]:
        """Bits of each subset over the pieces of all ranks; all of them must call it.

        Args:
            world_size: How many ranks share the pieces.
        """
        parts = gather_from_ranks(self.nats, world_size=world_size)
        return {
            subset: math.fsum(nats for part in parts for nats in part.get(subset, ())) / math.log(2)
            for subset in self.num_bytes
        }
