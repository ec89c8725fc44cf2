"""One request while it is generated, and what comes out of it."""
# Shapes: V = vocabulary.

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from nemo_like.text.tokenizer import Tokenizer

from .config import GenerationConfig
from .sampling import draw_tokens, filter_logits, penalize_repetition
from .streaming import TextStream

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at the place of one token, in nats, before penalty, temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens with theirs, falling."""


@dataclasses.dataclass(kw_only=True)
class Speculation:
    """What speculative decoding did for one request, or for several."""

    passes: int = 0
    """Passes of the network that guesses were given to; the one that read the prompt is not counted."""
    drafted: int = 0
    """Tokens that the draft guessed."""
    accepted: int = 0
    """Those of them that were taken."""

    @property
    def acceptance_rate(self) -> float:
        """Share of guesses that were taken; 0 where there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def accepted_per_pass(self) -> float:
        """Mean number of guesses that a pass took; it gives one token more. 0 where there was no pass."""
        return self.accepted / self.passes if self.passes else 0.0

    def describe(self) -> str:
        """A line for the terminal."""
        return (
            f"{self.accepted} of {self.drafted} guesses accepted ({self.acceptance_rate:.1%}), "
            f"{self.accepted_per_pass:.2f} a pass"
        )


@dataclasses.dataclass(kw_only=True)
class GenerationResult:
    """What one request gave."""

    text: str
    """Without the prompt, special tokens, the stop string, and a character that was cut."""
    tokens: list[int]
    """All that were generated, also the stop token or the tokens of the stop string."""
    prompt_tokens: list[int]
    """What was read, with the token that stands before every document."""
    finish_reason: FinishReason
    """``stop``: a stop token or string; ``length``: ``max_tokens``."""
    stopped_by: int | str | None = None
    """The stop token or the stop string."""
    seed: int | None = None
    """Gives the same text again; None where no random number was taken."""
    logprobs: list[TokenLogprob] | None = None
    """One a token, if asked for."""
    score: float | None = None
    """Beam search only: log-probability / tokens ** length_penalty."""
    speculation: Speculation | None = None
    """What the draft gained, where there was one."""


class Request:
    """A prompt that is being continued: its random numbers, tokens, text and end.

    Nothing here depends on other requests. A scheduler gives logits to :func:`choose_tokens` and the tokens to
    :meth:`accept` until :attr:`finish_reason` is set.

    Args:
        tokenizer: Of the network.
        prompt: Token ids, at least one.
        config: What is asked for.
        seed: Where its random numbers start; None draws one.

    Raises:
        ValueError: The prompt has no token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        config: GenerationConfig,
        *,
        seed: int | None = None,
    ) -> None:
        if not prompt:
            raise ValueError("prompt=[]: holds no token; give at least the one that starts a text")
        self.prompt, self.config = list(prompt), config
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] | None = None if config.logprobs is None else []
        self.finish_reason: FinishReason | None = None if config.max_tokens else "length"
        self.stopped_by: int | str | None = None
        self.speculation: Speculation | None = None
        self.vocab_size = tokenizer.vocab_size
        self.stop_tokens = set(config.stop_tokens)
        if not config.ignore_eos:
            self.stop_tokens.add(tokenizer.eos_id)
        self.seed: int | None = None
        if config.temperature > 0 and config.num_beams == 1:
            self.seed = secrets.randbits(32) if seed is None else seed
            self.generator = torch.Generator().manual_seed(self.seed)
        self.seen_V: Tensor | None = None
        if config.repetition_penalty != 1:
            self.seen_V = torch.zeros(self.vocab_size, dtype=torch.bool)
            self.seen_V[[it for it in self.prompt if it < self.vocab_size]] = True
        self._stream = TextStream(tokenizer, self.prompt, config.stop)

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> str:
        """Takes the next token.

        Returns:
            The text that can be shown now; when this ends the request, all that was held back.
        """
        self.tokens.append(token)
        if self.seen_V is not None:
            self.seen_V[token] = True
        if self.logprobs is not None and logprob is not None:
            self.logprobs.append(logprob)
        piece = ""
        if token in self.stop_tokens:
            self.finish_reason, self.stopped_by = "stop", token
        else:
            piece = self._stream.push(token)
            if self._stream.stopped_by is None and len(self.tokens) >= self.config.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            piece += self._stream.finish()
        if self._stream.stopped_by is not None:
            self.finish_reason, self.stopped_by = "stop", self._stream.stopped_by
        self.pieces.append(piece)
        return piece

    def cut(self) -> str:
        """Ends the request before ``max_tokens``, for want of room; gives the text that was held back."""
        self.finish_reason = "length"
        self.pieces.append(self._stream.finish())
        return self.pieces[-1]

    def to_result(self) -> GenerationResult:
        """What came out."""
        assert self.finish_reason is not None, "only when it is finished"
        return GenerationResult(
            text="".join(self.pieces),
            tokens=self.tokens,
            prompt_tokens=self.prompt,
            finish_reason=self.finish_reason,
            stopped_by=self.stopped_by,
            seed=self.seed,
            logprobs=self.logprobs,
            speculation=self.speculation,
        )


def choose_tokens(
    logits_BV: Tensor, requests: Sequence[Request]
) -> list[tuple[int, TokenLogprob | None]]:
    """The next token of each request, as its own configuration asks; rows do not influence each other.

    Args:
        logits_BV: Of the last position, a row a request.
        requests: B.

    Returns:
        Per request the token, and its log-probabilities if they are asked for.
    """
    # An embedding may have more rows than there are tokens.
    logits_BV = logits_BV[:, : requests[0].vocab_size].float()
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, request in enumerate(requests):
        config = request.config
        key = (
            config.repetition_penalty,
            config.temperature,
            config.top_k,
            config.top_p,
            config.min_p,
        )
        groups.setdefault(key, []).append(index)
    tokens = [0] * len(requests)
    for members in groups.values():
        part_NV = logits_BV if len(groups) == 1 else logits_BV[members]
        for index, token in zip(
            members, _choose_alike(part_NV, [requests[it] for it in members]), strict=True
        ):
            tokens[index] = token
    logprobs = find_logprobs(logits_BV, requests, tokens)
    return list(zip(tokens, logprobs, strict=True))


def _choose_alike(logits_NV: Tensor, requests: Sequence[Request]) -> list[int]:
    adjusted_NV = adjust_logits(logits_NV, requests)
    if requests[0].config.temperature == 0:
        tokens: list[int] = adjusted_NV.argmax(dim=-1).tolist()
        return tokens
    return draw_tokens(adjusted_NV, [it.generator for it in requests])


def adjust_logits(
    logits_NV: Tensor,
    requests: Sequence[Request],
    *,
    seen: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """What tokens are chosen from: logits behind repetition penalty, temperature and filters.

    Args:
        logits_NV: float32, of tokens only.
        requests: N, with the same penalty, temperature and filters.
        seen: Tokens that the penalty is for, bool (V); None takes those of each request.
    """
    config = requests[0].config
    if config.repetition_penalty != 1:
        found = [it.seen_V for it in requests] if seen is None else seen
        seen_NV = torch.stack([it for it in found if it is not None]).to(logits_NV.device)
        logits_NV = penalize_repetition(logits_NV, seen_NV, config.repetition_penalty)
    return logits_NV if config.temperature == 0 else filter_logits(logits_NV, config)


def find_logprobs(
    logits_BV: Tensor, requests: Sequence[Request], tokens: Sequence[int]
) -> list[TokenLogprob | None]:
    """Log-probabilities of chosen tokens, for requests that ask for them.

    Args:
        logits_BV: float32, of tokens only, before any adjustment.
        requests: B.
        tokens: One a request.
    """
    found: list[TokenLogprob | None] = [None] * len(requests)
    for index, request in enumerate(requests):
        if request.config.logprobs is None:
            continue
        logprobs_V = logits_BV[index].log_softmax(dim=-1)
        values, ids = logprobs_V.topk(min(request.config.logprobs, request.vocab_size))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        found[index] = TokenLogprob(tokens[index], float(logprobs_V[tokens[index]]), top)
    return found
