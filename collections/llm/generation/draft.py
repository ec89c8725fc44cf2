"""Drafts for speculative decoding: a smaller model, or the text itself."""
# Shapes: N = requests that are drafted for, V = vocabulary.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_like.core.errors import ConfigError
from nemo_like.text.tokenizer import Tokenizer

from .cache import KeyValueCache
from .generate import compute_logits
from .request import Request, adjust_logits
from .sampling import draw_tokens
from .speculative import LONGEST_DRAFT, Proposal, count_read

if TYPE_CHECKING:
    from ..decoder.network import DecoderNetwork


class ModelDraft:
    """A smaller network with the same vocabulary; its guesses are chosen as the configuration says.

    Args:
        network: Is put into evaluation mode.
        tokenizer: Of this network.
        num_tokens: Guesses of a pass at most.

    Raises:
        ConfigError: ``num_tokens`` is out of range.
    """

    def __init__(
        self, network: DecoderNetwork, tokenizer: Tokenizer, *, num_tokens: int = 4
    ) -> None:
        _check_count(num_tokens)
        self.network, self.tokenizer, self.num_tokens = network.eval(), tokenizer, num_tokens

    def find_faults(self, tokenizer: Tokenizer, *, cache_size: int) -> Iterator[str]:
        """Yields where the vocabularies differ, and whether the draft is meant for shorter texts."""
        difference = describe_difference(self.tokenizer, tokenizer)
        if difference is not None:
            yield f"draft: its vocabulary is not that of the model: {difference}"
        longest = self.network.shape.max_positions
        if cache_size > longest:
            yield (
                f"draft: is meant for {longest} tokens, prompt and text need {cache_size}; "
                "shorten them, or leave the draft out"
            )
        rows = self.network.shape.vocab_size
        if rows < tokenizer.vocab_size:
            yield f"draft: its network has {rows} tokens, the tokenizer {tokenizer.vocab_size}"

    def begin(self, requests: Sequence[Request], *, cache_size: int) -> ModelDrafter:
        """Starts with empty rows."""
        cache = KeyValueCache.build(self.network, num_rows=len(requests), cache_size=cache_size)
        return ModelDrafter(self.network, cache)


class ModelDrafter:
    """A network that guesses token by token.

    Args:
        network: Of the draft.
        cache: Its own, a row a request.
    """

    def __init__(self, network: DecoderNetwork, cache: KeyValueCache) -> None:
        self.network, self.cache = network, cache

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        """Guesses for all requests together; see :class:`~.speculative.Drafter`."""
        # What was read of wrong guesses is forgotten; what was right is not read again.
        kept = [
            min(self.cache.lengths[row], count_read(request))
            for row, request in enumerate(requests)
        ]
        self.cache.rollback(range(len(requests)), kept)
        unread = [
            [*request.prompt, *request.tokens][length:]
            for request, length in zip(requests, kept, strict=True)
        ]
        seen = [None if it.seen_V is None else it.seen_V.clone() for it in requests]
        proposals = [Proposal([]) for _ in requests]
        distributions: list[list[Tensor]] = [[] for _ in requests]
        for place in range(max(counts)):
            rows: Sequence[int] = [row for row, count in enumerate(counts) if count > place]
            if len(rows) == rows[-1] + 1:
                rows = range(len(rows))  # so that the cache is a view
            new = [unread[row] for row in rows]
            step = self.cache.append([len(it) for it in new], rows=rows)
            logits_NV = compute_logits(self.network, new, step)
            tokens, q_NV = self._choose(
                logits_NV, [requests[row] for row in rows], [seen[row] for row in rows]
            )
            for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
                proposals[row].tokens.append(token)
                unread[row] = [token]
                row_seen_V = seen[row]
                if row_seen_V is not None:
                    row_seen_V[token] = True
                if q_NV is not None:
                    distributions[row].append(q_NV[index])
        for proposal, rows_V in zip(proposals, distributions, strict=True):
            if rows_V:
                proposal.probabilities_GV = torch.stack(rows_V)
        return proposals

    def _choose(
        self, logits_NV: Tensor, requests: Sequence[Request], seen: Sequence[Tensor | None]
    ) -> tuple[list[int], Tensor | None]:
        """Guesses, and the distributions that they were drawn from."""
        logits_NV = logits_NV[:, : requests[0].vocab_size].float()
        adjusted_NV = adjust_logits(logits_NV, requests, seen=seen)
        if requests[0].config.temperature == 0:
            tokens: list[int] = adjusted_NV.argmax(dim=-1).tolist()
            return tokens, None
        drawn = draw_tokens(adjusted_NV, [request.generator for request in requests])
        return drawn, adjusted_NV.double().softmax(dim=-1)

    def move(self, source: int, target: int) -> None:
        """Moves a row of the cache."""
        self.cache.copy([source], [target])
        self.cache.free(source)


class PromptLookup:
    """Guesses that a text goes on as it did where its last tokens stood before: no second model is needed.

    It pays where texts repeat what they have read: summaries, corrections, code (Saxena 2023, "Prompt Lookup").

    Args:
        num_tokens: Guesses of a pass at most.
        max_ngram: Last tokens that are looked for, at most.
        min_ngram: The same at least; fewer find more places, and more wrong ones.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(self, *, num_tokens: int = 8, max_ngram: int = 3, min_ngram: int = 2) -> None:
        _check_count(num_tokens)
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(
                [f"min_ngram={min_ngram}: must be at least 1 and at most {max_ngram=}"]
            )
        self.num_tokens, self.max_ngram, self.min_ngram = num_tokens, max_ngram, min_ngram

    def find_faults(self, tokenizer: Tokenizer, *, cache_size: int) -> Iterator[str]:
        """It suits every network."""
        yield from ()

    def begin(self, requests: Sequence[Request], *, cache_size: int) -> LookupDrafter:
        """Starts with the prompts."""
        return LookupDrafter([_NgramIndex(self.min_ngram, self.max_ngram) for _ in requests])


class LookupDrafter:
    """One index a request."""

    def __init__(self, indexes: list[_NgramIndex]) -> None:
        self.indexes = indexes

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        """What followed the last time; see :class:`~.speculative.Drafter`."""
        return [
            Proposal(index.find_next([*request.prompt, *request.tokens], count))
            for index, request, count in zip(self.indexes, requests, counts, strict=False)
        ]

    def move(self, source: int, target: int) -> None:
        """Moves an index."""
        self.indexes[target] = self.indexes[source]


class _NgramIndex:
    """Where each stretch of tokens ended last, in a text that only grows."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.ends: dict[tuple[int, ...], int] = {}
        self.num_noted = 0

    def find_next(self, text: list[int], count: int) -> list[int]:
        # Stretches that end with the text are not noted yet: they would find themselves.
        for end in range(self.num_noted + 1, len(text)):
            for size in self.sizes:
                if size <= end:
                    self.ends[tuple(text[end - size : end])] = end
        self.num_noted = max(self.num_noted, len(text) - 1)
        for size in self.sizes:
            last = self.ends.get(tuple(text[-size:])) if size < len(text) else None
            if last is not None:
                # Where what followed ends with the text, the text is taken to go round and round.
                period = len(text) - last
                return [text[last + place % period] for place in range(count)]
        return []


def describe_difference(draft: Tokenizer, target: Tokenizer) -> str | None:
    """In words, the first token to which two tokenizers give different ids; None where all are the same."""
    if draft.content_hash == target.content_hash:
        return None
    ours, theirs = draft.backend.get_vocab(), target.backend.get_vocab()
    if len(ours) != len(theirs):
        return f"it has {len(ours)} tokens, the model {len(theirs)}"
    for token, index in sorted(theirs.items(), key=lambda item: item[1]):
        if ours.get(token) != index:
            place = "not there" if token not in ours else str(ours[token])
            return f"token {token!r} is {index} in the model's and {place} in the draft's"
    for name in ("bos_id", "eos_id"):
        mine, other = getattr(draft, name), getattr(target, name)
        if mine != other:
            return f"{name} is {other} in the model's and {mine} in the draft's"
    return None


def _check_count(num_tokens: int) -> None:
    if not 1 <= num_tokens <= LONGEST_DRAFT:
        raise ConfigError([f"draft_tokens={num_tokens}: must be 1 to {LONGEST_DRAFT}"])
