"""Speculative decoding: a cheap draft guesses the next tokens, the network checks all of them in one pass.

Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318). Greedy tokens are those of plain
decoding. Drawn tokens have the distribution of plain decoding: with ``p`` of the network and ``q`` of the draft, both
behind penalty, temperature and filters, a guess ``x`` that was drawn from ``q`` is taken with probability
``min(1, p(x) / q(x))``; else the token is drawn from what ``p`` has above ``q``.
"""
# Shapes: B = requests, N = requests whose guesses were right so far, T = tokens of a pass, G = guesses, V = vocabulary.

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from nemo_like.text.tokenizer import Tokenizer

from .cache import KeyValueCache
from .layout import project
from .request import (
    GenerationResult,
    Request,
    Speculation,
    TokenLogprob,
    adjust_logits,
    choose_tokens,
    find_logprobs,
)
from .sampling import draw_tokens

if TYPE_CHECKING:
    from ..decoder.network import DecoderNetwork

LONGEST_DRAFT = 64
"""Guesses of a pass; more would only be thrown away."""


@dataclasses.dataclass
class Proposal:
    """Guesses for one request."""

    tokens: list[int]
    probabilities_GV: Tensor | None = None
    """float64, the distribution that each guess was drawn from; None where the draft was certain."""


class Drafter(Protocol):
    """Guesses for the requests of one call, a row each."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        """Guesses what follows.

        Args:
            requests: In the order of the rows; they have grown since the last call.
            counts: Guesses of each at most, 0 to ``num_tokens``.

        Returns:
            One proposal a request. What is drawn takes random numbers of the request's own generator, and how many
            does not depend on other requests.
        """
        ...

    def move(self, source: int, target: int) -> None:
        """The request of the last row takes the place of one that ended; both may be the same."""
        ...


class Draft(Protocol):
    """Where guesses come from."""

    @property
    def num_tokens(self) -> int:
        """Guesses of a pass at most."""
        ...

    def find_faults(self, tokenizer: Tokenizer, *, cache_size: int) -> Iterator[str]:
        """Yields a line for each reason why it cannot guess for a network with this tokenizer."""
        ...

    def begin(self, requests: Sequence[Request], *, cache_size: int) -> Drafter:
        """Starts with some requests; ``cache_size`` is the longest that one of them becomes."""
        ...


class SpeculativeDecoding:
    """Passes of a network over guessed tokens.

    Args:
        network: In evaluation mode.
        cache: Of the network; evicts nothing.
        draft: Where guesses come from.
        requests: One a row of the cache, in order.
    """

    def __init__(
        self,
        network: DecoderNetwork,
        cache: KeyValueCache,
        draft: Draft,
        requests: Sequence[Request],
    ) -> None:
        self.network, self.cache = network, cache
        self.num_tokens = draft.num_tokens
        self.drafter = draft.begin(requests, cache_size=cache.cache_size)
        for request in requests:
            request.speculation = Speculation()

    def advance(self, requests: Sequence[Request]) -> None:
        """Gives each request at least one token: the guesses that were right, and one more.

        Args:
            requests: Unfinished ones, whose tokens have all been read but the last.
        """
        # A request that needs r tokens takes r - 1 guesses at most: so neither its text nor its row becomes too long.
        counts = [
            min(self.num_tokens, request.config.max_tokens - len(request.tokens) - 1)
            for request in requests
        ]
        proposals = self.drafter.propose(requests, counts)
        tokens = [
            [request.tokens[-1], *proposal.tokens]
            for request, proposal in zip(requests, proposals, strict=True)
        ]
        verify(self._compute_logits(tokens), requests, proposals)
        # The last token has not been read; it may stand where a wrong guess was.
        self.cache.rollback(range(len(requests)), [count_read(request) for request in requests])

    def _compute_logits(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Logits behind every new token; (B, T, V)."""
        device, longest = self.network.output_weight_VD.device, max(map(len, tokens))
        padded = [[*row, *[0] * (longest - len(row))] for row in tokens]
        step = self.cache.append([len(row) for row in tokens])
        hidden_BTD = self.network.compute_hidden(torch.tensor(padded, device=device), cache=step)
        logits_NV = project(self.network, hidden_BTD.flatten(0, 1))
        return logits_NV.view(len(tokens), longest, -1)

    def move(self, source: int, target: int) -> None:
        """See :meth:`Drafter.move`."""
        self.drafter.move(source, target)


def count_read(request: Request) -> int:
    """Tokens of prompt and text that a cache may hold: all but the last."""
    return len(request.prompt) + len(request.tokens) - 1


def verify(logits_BTV: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal]) -> None:
    """Gives each request its tokens from one pass.

    Guess after guess is decided as if the tokens came one by one, so stop tokens, stop strings and the repetition
    penalty act inside a stretch of guesses as they do elsewhere.

    Args:
        logits_BTV: Behind the last token before the guesses, and behind each guess.
        requests: B.
        proposals: One a request.
    """
    for request, proposal in zip(requests, proposals, strict=True):
        assert request.speculation is not None, "set when decoding began"
        request.speculation.passes += 1
        request.speculation.drafted += len(proposal.tokens)
    alive, place = list(range(len(requests))), 0
    while alive:
        logits_NV = (
            logits_BTV[:, place] if len(alive) == len(requests) else logits_BTV[alive, place]
        )
        choices = _choose(
            logits_NV, [requests[it] for it in alive], [proposals[it] for it in alive], place
        )
        right = []
        for index, (token, logprob) in zip(alive, choices, strict=True):
            request, guesses = requests[index], proposals[index].tokens
            request.accept(token, logprob)
            if place < len(guesses) and token == guesses[place]:
                assert request.speculation is not None, "set when decoding began"
                request.speculation.accepted += 1
                if request.finish_reason is None:
                    right.append(index)
        alive, place = right, place + 1


def _choose(
    logits_NV: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal], place: int
) -> list[tuple[int, TokenLogprob | None]]:
    """The next token of each; it equals the guess exactly if the guess is taken."""
    config = requests[0].config  # one for all requests of a call
    if config.temperature == 0:
        return choose_tokens(logits_NV, requests)
    logits_NV = logits_NV[:, : requests[0].vocab_size].float()
    adjusted_NV = adjust_logits(logits_NV, requests)
    tokens = [
        _draw(adjusted_V, request.generator, proposal, place)
        for adjusted_V, request, proposal in zip(adjusted_NV, requests, proposals, strict=True)
    ]
    return list(zip(tokens, find_logprobs(logits_NV, requests, tokens), strict=True))


def _draw(adjusted_V: Tensor, generator: torch.Generator, proposal: Proposal, place: int) -> int:
    if place == len(proposal.tokens):
        return draw_tokens(adjusted_V.unsqueeze(0), [generator])[0]
    guess = proposal.tokens[place]
    p_V = adjusted_V.double().softmax(dim=-1)
    if proposal.probabilities_GV is None:
        q_V = torch.zeros_like(p_V)
        q_V[guess] = 1
    else:
        q_V = proposal.probabilities_GV[place].to(p_V.device)
    draw = torch.rand((), dtype=torch.float64, generator=generator)
    if float(draw) * float(q_V[guess]) < float(p_V[guess]):
        return guess
    rest_V = (p_V - q_V).clamp(min=0)
    rest_V[guess] = 0  # p was below q here
    if float(rest_V.sum()) == 0:  # both are the same but for rounding
        return guess
    return draw_tokens(rest_V.log().unsqueeze(0), [generator])[0]


def summarize_speculation(results: Iterable[GenerationResult]) -> Speculation:
    """Sums over several results; those without speculation count for nothing."""
    total = Speculation()
    for result in results:
        if result.speculation is not None:
            total.passes += result.speculation.passes
            total.drafted += result.speculation.drafted
            total.accepted += result.speculation.accepted
    return total
