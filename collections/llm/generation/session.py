"""A conversation that grows: what was read before is not read again."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import torch

from nemo_like.core.errors import ConfigError
from nemo_like.text.tokenizer import Tokenizer

from .cache import KeyValueCache
from .config import GenerationConfig
from .generate import compute_logits, evaluating
from .request import GenerationResult, Request, choose_tokens

if TYPE_CHECKING:
    from ..decoder.network import DecoderNetwork


class Session:
    """One row of a cache, and the tokens that are in it.

    Args:
        network: Of the conversation.
        tokenizer: Of the network.
        config: ``cache_size`` null is all that the model is meant for.

    Raises:
        ConfigError: The configuration has faults, or asks for beams.
    """

    def __init__(
        self, network: DecoderNetwork, tokenizer: Tokenizer, config: GenerationConfig
    ) -> None:
        faults = list(config.check())
        longest = network.shape.max_positions
        if config.num_beams > 1:
            faults.append(
                f"num_beams={config.num_beams}: the text of a beam search cannot be streamed"
            )
        if config.cache_size is not None and config.cache_size > longest:
            faults.append(
                f"cache_size={config.cache_size}: the model is meant for {longest} tokens"
            )
        if faults:
            raise ConfigError(faults)
        self.network, self.tokenizer, self.config = network, tokenizer, config
        self.cache = KeyValueCache.build(
            network,
            num_rows=1,
            cache_size=config.cache_size or longest,
            eviction_policy=config.eviction_policy,
            num_sinks=config.num_sinks,
        )
        self.tokens: list[int] = []
        self.num_reused = 0
        """Tokens of the last prompt that were in the cache already."""

    def stream(
        self, prompt: Sequence[int], *, seed: int | None = None
    ) -> Generator[str, None, GenerationResult]:
        """Continues a prompt and gives its text while it comes; the generator may be closed before its end.

        Args:
            prompt: Token ids of the whole conversation, not only of what is new.
            seed: As for a request.

        Yields:
            Pieces of text, as :func:`~nemo_like.collections.llm.generation.generate.stream` does.

        Raises:
            ConfigError: The conversation does not fit and nothing may be evicted.
        """
        request = Request(self.tokenizer, prompt, self.config, seed=seed)
        if self.config.eviction_policy == "error" and len(prompt) > self.cache.cache_size:
            raise ConfigError(
                [
                    f"the conversation has {len(prompt)} tokens, cache_size is {self.cache.cache_size}: start anew, or "
                    "let eviction_policy forget"
                ]
            )
        with evaluating(self.network):
            yield from self._run(request)
        return request.to_result()

    @torch.inference_mode()
    def _run(self, request: Request) -> Generator[str, None, None]:
        tokens = self._drop_shared(request.prompt)
        while request.finish_reason is None:
            logits_BV = compute_logits(self.network, [tokens], self.cache.append([len(tokens)]))
            self.tokens += (
                tokens  # only now: an interrupt may come while the cache is being written
            )
            ((token, logprob),) = choose_tokens(logits_BV, [request])
            piece = request.accept(token, logprob)
            is_full = len(self.tokens) >= self.cache.cache_size
            if is_full and request.finish_reason is None and self.config.eviction_policy == "error":
                piece += request.cut()
            if piece:
                yield piece
            tokens = [token]

    def _drop_shared(self, prompt: list[int]) -> list[int]:
        """Keeps what the cache shares with a prompt, and gives the tokens that are new: at least the last."""
        pairs = zip(prompt[:-1], self.tokens, strict=False)
        shared = next((at for at, (new, old) in enumerate(pairs) if new != old), None)
        if shared is None:
            shared = min(len(prompt) - 1, len(self.tokens))
        written = self.cache.lengths[0]
        if written > self.cache.cache_size and shared < written:
            shared = 0
            self.cache.free(0)
        else:
            self.cache.rollback([0], [shared])
        self.tokens = self.tokens[:shared]
        self.num_reused = shared
        return prompt[shared:]
