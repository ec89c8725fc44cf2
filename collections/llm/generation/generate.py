"""Continuing prompts: a batch to its end, or one token by token."""
# Shapes: B = requests, T = tokens, D = width, V = vocabulary.

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_like.core.errors import ConfigError
from nemo_like.text.tokenizer import Tokenizer

from .beam import search_beams
from .cache import KeyValueCache, Step
from .config import GenerationConfig
from .layout import project
from .request import GenerationResult, Request, choose_tokens
from .speculative import Draft, SpeculativeDecoding

if TYPE_CHECKING:
    from ..decoder.network import DecoderNetwork

Prompt = str | Sequence[int]


def generate(
    network: DecoderNetwork,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    config: GenerationConfig | None = None,
    *,
    seeds: Sequence[int] | None = None,
    draft: Draft | None = None,
) -> list[GenerationResult]:
    """Continues several prompts together; each as it would be continued alone.

    The global random generators are left alone.

    Args:
        network: Computes on its own device, in evaluation mode; its mode is put back.
        tokenizer: Of the network.
        prompts: Texts, which are read as the start of a document, or token ids, which are read as they are.
        config: None is the default.
        seeds: One a prompt; None counts up from ``config.seed``.
        draft: Guesses tokens, several of which are then checked in one pass (:mod:`.draft`); greedy tokens are the
            same, drawn ones have the same distribution, and other random numbers.

    Returns:
        One result a prompt, in order.

    Raises:
        ConfigError: The configuration has faults, a prompt and its text do not fit the cache, or the draft does not
            go with them.
    """
    config = _check(config or GenerationConfig())
    requests = _build_requests(tokenizer, prompts, config, seeds)
    if not requests:
        return []
    _check_draft(network, tokenizer, requests, draft)
    with evaluating(network):
        if config.num_beams > 1:
            cache_size = choose_cache_size(network, requests)
            return search_beams(network, tokenizer, requests, cache_size=cache_size)
        for _ in _run(network, requests, draft):
            pass
    return [request.to_result() for request in requests]


def stream(
    network: DecoderNetwork,
    tokenizer: Tokenizer,
    prompt: Prompt,
    config: GenerationConfig | None = None,
    *,
    draft: Draft | None = None,
) -> Generator[str, None, GenerationResult]:
    """Continues one prompt and gives its text while it comes.

    Args:
        network: Computes on its own device, in evaluation mode; its mode is put back.
        tokenizer: Of the network.
        prompt: As for :func:`generate`.
        config: Without beams.
        draft: As for :func:`generate`.

    Yields:
        Pieces of text: whole characters, never a part of a stop string. Together they are the ``text`` of the result,
        which the generator returns.

    Raises:
        ConfigError: As for :func:`generate`; at once, not with the first piece.
    """
    config = _check(config or GenerationConfig())
    if config.num_beams > 1:
        raise ConfigError(
            [
                f"num_beams={config.num_beams}: the text of a beam search is known at its end; it cannot be streamed"
            ]
        )
    (request,) = _build_requests(tokenizer, [prompt], config, None)
    choose_cache_size(network, [request])
    _check_draft(network, tokenizer, [request], draft)
    return _stream(network, request, draft)


def _stream(
    network: DecoderNetwork, request: Request, draft: Draft | None
) -> Generator[str, None, GenerationResult]:
    shown = 0
    with evaluating(network):
        for _ in _run(network, [request], draft):
            piece = "".join(request.pieces[shown:])
            shown = len(request.pieces)
            if piece:
                yield piece
    return request.to_result()


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: a text is the start of a document, with the token that stands before every one."""
    if isinstance(prompt, str):
        return [tokenizer.prefix_id, *tokenizer.encode(prompt)]
    return list(prompt)


def fit_max_tokens(
    network: DecoderNetwork,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    config: GenerationConfig,
) -> GenerationConfig:
    """Lowers ``max_tokens`` to what fits behind the longest prompt, for callers who were not told a number.

    Args:
        network: Says for how many tokens it is meant.
        tokenizer: Of the network.
        prompts: As for :func:`generate`.
        config: Left as it is where tokens may be forgotten.
    """
    if config.eviction_policy != "error":
        return config
    limit = config.cache_size or network.shape.max_positions
    longest = max(len(encode_prompt(tokenizer, prompt)) for prompt in prompts)
    # The last token is never read; a prompt that does not fit by itself is refused later.
    return dataclasses.replace(
        config, max_tokens=max(1, min(config.max_tokens, limit - longest + 1))
    )


def choose_cache_size(network: DecoderNetwork, requests: Sequence[Request]) -> int:
    """Slots that these requests need together.

    Raises:
        ConfigError: ``cache_size`` or what the model is meant for is too little, and nothing may be evicted.
    """
    config, longest = requests[0].config, network.shape.max_positions
    # The last token is never read.
    needs = [max(len(it.prompt), len(it.prompt) + it.config.max_tokens - 1) for it in requests]
    if config.cache_size is not None and config.cache_size > longest:
        raise ConfigError(
            [f"cache_size={config.cache_size}: the model is meant for {longest} tokens at most"]
        )
    limit = longest if config.cache_size is None else config.cache_size
    if config.eviction_policy != "error":
        return limit if config.cache_size is not None else min(limit, max(needs))
    name = "cache_size" if config.cache_size is not None else "the model's max_positions"
    faults = [
        f"prompt {index}: {len(request.prompt)} tokens and max_tokens={request.config.max_tokens} need {need} "
        f"places, {name} is {limit}; shorten one, or let eviction_policy forget"
        for index, (request, need) in enumerate(zip(requests, needs, strict=True))
        if need > limit
    ]
    if faults:
        raise ConfigError(faults)
    return max(needs)


def compute_logits(network: DecoderNetwork, tokens: Sequence[Sequence[int]], step: Step) -> Tensor:
    """Logits behind the last new token of each row.

    Args:
        network: In evaluation mode.
        tokens: New tokens of each row; they may differ in number.
        step: Their places, from :meth:`KeyValueCache.append`.

    Returns:
        (B, V).
    """
    device = network.output_weight_VD.device
    longest = max(map(len, tokens))
    padded = [[*row, *[0] * (longest - len(row))] for row in tokens]
    hidden_BTD = network.compute_hidden(torch.tensor(padded, device=device), cache=step)
    if longest == 1:
        return project(network, hidden_BTD[:, 0])
    last_B = torch.tensor([len(row) - 1 for row in tokens], device=device)
    return project(network, hidden_BTD[torch.arange(len(tokens), device=device), last_B])


@contextlib.contextmanager
def evaluating(network: DecoderNetwork) -> Iterator[None]:
    """Puts a network into evaluation mode and back."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


@torch.inference_mode()
def _run(
    network: DecoderNetwork, requests: Sequence[Request], draft: Draft | None = None
) -> Iterator[None]:
    """Generates a token of each unfinished request (with a draft, or more) between two yields; finished ones leave."""
    running = [request for request in requests if request.finish_reason is None]
    if not running:
        return
    config = running[0].config
    cache = KeyValueCache.build(
        network,
        num_rows=len(running),
        cache_size=choose_cache_size(network, running),
        eviction_policy=config.eviction_policy,
        num_sinks=config.num_sinks,
    )
    speculation = None if draft is None else SpeculativeDecoding(network, cache, draft, running)
    tokens = [request.prompt for request in running]
    while running:
        if speculation is not None and running[0].tokens:
            speculation.advance(running)
        else:
            logits_BV = compute_logits(network, tokens, cache.append([len(it) for it in tokens]))
            for request, choice in zip(running, choose_tokens(logits_BV, running), strict=True):
                request.accept(*choice)
        yield
        # The last running row takes the place of a finished one, so that the running rows stay one range.
        for row in range(len(running) - 1, -1, -1):
            if running[row].finish_reason is not None:
                last = len(running) - 1
                cache.copy([last], [row])
                cache.free(last)
                if speculation is not None:
                    speculation.move(last, row)
                running[row] = running[last]
                running.pop()
        tokens = [request.tokens[-1:] for request in running]


def _check(config: GenerationConfig) -> GenerationConfig:
    faults = list(config.check())
    if faults:
        raise ConfigError(faults)
    return config


def _check_draft(
    network: DecoderNetwork,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    draft: Draft | None,
) -> None:
    if draft is None:
        return
    config, faults = requests[0].config, []
    if config.num_beams > 1:
        faults.append(f"num_beams={config.num_beams}: beams are not drafted; leave the draft out")
    if config.eviction_policy != "error":
        faults.append(
            f"eviction_policy={config.eviction_policy}: what is evicted for a wrong guess cannot come back; "
            "leave the draft out, or take error"
        )
    else:
        size = choose_cache_size(network, requests)
        faults += draft.find_faults(tokenizer, cache_size=size)
    if faults:
        raise ConfigError(faults)


def _build_requests(
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    config: GenerationConfig,
    seeds: Sequence[int] | None,
) -> list[Request]:
    if isinstance(prompts, str):
        raise ConfigError([f"prompts={prompts!r}: must be a list of prompts"])
    if seeds is None:
        given = [None if config.seed is None else config.seed + i for i in range(len(prompts))]
    elif len(seeds) != len(prompts):
        raise ConfigError([f"seeds: {len(seeds)} for {len(prompts)} prompts; give one each"])
    else:
        given = list(seeds)
    return [
        Request(tokenizer, encode_prompt(tokenizer, prompt), config, seed=seed)
        for prompt, seed in zip(prompts, given, strict=True)
    ]
