"""Beam search with a length penalty; the same texts as transformers' for the same weights."""
# Shapes: B = requests, N = beams, V = vocabulary, K = candidates that are looked at.

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_like.text.tokenizer import Tokenizer

from .cache import KeyValueCache
from .request import GenerationResult, Request
from .sampling import penalize_repetition
from .streaming import TextStream

if TYPE_CHECKING:
    from ..decoder.network import DecoderNetwork

_NEVER = -1e9


class BeamSearch:
    """The beams of one request.

    A beam that ends is set aside with its score and no longer competes with those that run, so that as many go on. The
    search ends when the best running beam, at its present length, scores below all that are set aside.

    Args:
        tokenizer: Of the network.
        request: Its configuration says how many beams.

    Attributes:
        beams: Tokens of the running beams, best first.
        finished: Score and tokens of the best beams that ended, at most N.
        is_over: Whether nothing better can come.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self.request, self._tokenizer = request, tokenizer
        num_beams = request.config.num_beams
        self.beams: list[list[int]] = [[] for _ in range(num_beams)]
        # All beams are alike at first; only one may bring forth candidates.
        self._scores_N = torch.tensor([0.0] + [_NEVER] * (num_beams - 1))
        self.finished: list[tuple[float, list[int]]] = []
        self.is_over = request.config.max_tokens == 0

    def advance(self, logits_NV: Tensor) -> list[int]:
        """Takes the logits behind each beam.

        Returns:
            For each of the new beams the old one that it continues.
        """
        num_beams, vocab = len(self.beams), self.request.vocab_size
        logprobs_NV = logits_NV[:, :vocab].float().log_softmax(dim=-1)
        logprobs_NV = self._penalize(logprobs_NV)
        sums = (logprobs_NV + self._scores_N.to(logits_NV.device).unsqueeze(1)).flatten()
        # Enough that N go on even if each beam's likeliest continuations are stop tokens.
        count = max(2, 1 + len(self.request.stop_tokens)) * num_beams
        values, indices = sums.topk(min(count, sums.numel()))
        candidates = [
            (score, index // vocab, [*self.beams[index // vocab], index % vocab])
            for score, index in zip(values.tolist(), indices.tolist(), strict=True)
        ]
        ended = [self._has_ended(tokens) for _, _, tokens in candidates]
        length = len(candidates[0][2])
        for rank, (score, _, tokens) in enumerate(candidates):
            if ended[rank] and rank < num_beams:
                self.finished.append((self._compare(score, length), tokens))
        self.finished = heapq.nlargest(num_beams, self.finished, key=lambda it: it[0])
        # What ended stands last, and goes on only where nothing else is left.
        order = sorted(range(len(candidates)), key=lambda rank: ended[rank])[:num_beams]
        best = candidates[order[0]][0] + _NEVER * ended[order[0]]
        self.beams = [candidates[rank][2] for rank in order]
        scores = [candidates[rank][0] + _NEVER * ended[rank] for rank in order]
        self._scores_N = torch.tensor(scores)
        can_improve = len(self.finished) < num_beams or (
            self._compare(best, length) > self.finished[-1][0]
        )
        self.is_over = all(ended) or not can_improve
        return [candidates[rank][1] for rank in order]

    def to_result(self) -> GenerationResult:
        """The best beam."""
        if not self.finished:
            return self.request.to_result()
        score, tokens = self.finished[0]
        for token in tokens:
            self.request.accept(token)
        result = self.request.to_result()
        result.score = score
        return result

    def _compare(self, score: float, length: int) -> float:
        return float(score / length**self.request.config.length_penalty)

    def _has_ended(self, tokens: list[int]) -> bool:
        request = self.request
        if len(tokens) >= request.config.max_tokens or tokens[-1] in request.stop_tokens:
            return True
        if not request.config.stop:
            return False
        text = TextStream(self._tokenizer, request.prompt, request.config.stop)
        for token in tokens:
            text.push(token)
        return text.stopped_by is not None

    def _penalize(self, logprobs_NV: Tensor) -> Tensor:
        seen_V = self.request.seen_V
        if seen_V is None:
            return logprobs_NV
        seen_NV = seen_V.repeat(len(self.beams), 1)
        for row, tokens in enumerate(self.beams):
            seen_NV[row, tokens] = True
        penalty = self.request.config.repetition_penalty
        return penalize_repetition(logprobs_NV, seen_NV.to(logprobs_NV.device), penalty)


@torch.inference_mode()
def search_beams(
    network: DecoderNetwork, tokenizer: Tokenizer, requests: Sequence[Request], *, cache_size: int
) -> list[GenerationResult]:
    """Runs the searches of several requests together.

    Args:
        network: In evaluation mode.
        tokenizer: Of the network.
        requests: With one configuration.
        cache_size: Slots of each beam.

    Returns:
        The best beam of each.
    """
    from .generate import compute_logits

    config = requests[0].config
    num_beams = config.num_beams
    searches = [BeamSearch(tokenizer, request) for request in requests]
    running = [search for search in searches if not search.is_over]
    if not running:
        return [search.to_result() for search in searches]
    cache = KeyValueCache.build(
        network,
        num_rows=len(running) * num_beams,
        cache_size=cache_size,
        eviction_policy=config.eviction_policy,
        num_sinks=config.num_sinks,
    )
    prompts = [search.request.prompt for search in running]
    logits_BV = compute_logits(network, prompts, cache.append([len(it) for it in prompts]))
    logits_BV = logits_BV.repeat_interleave(num_beams, dim=0)
    # Where the beams of each search lie; at first all are the prompt.
    places = [[index] * num_beams for index in range(len(running))]
    while running:
        sources, still = [], []
        for rows, search, logits_NV in zip(
            places, running, logits_BV.split(num_beams), strict=True
        ):
            parents = search.advance(logits_NV)
            if not search.is_over:
                sources += [rows[parent] for parent in parents]
                still.append(search)
        running = still
        if not running:
            break
        targets = list(range(len(sources)))
        cache.copy(sources, targets)
        places = [targets[at : at + num_beams] for at in range(0, len(targets), num_beams)]
        tokens = [beam[-1:] for search in running for beam in search.beams]
        logits_BV = compute_logits(network, tokens, cache.append([1] * len(tokens)))
    return [search.to_result() for search in searches]
