"""What a caller can ask of generation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

EvictionPolicy = Literal["error", "sliding_window", "attention_sinks"]
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = ("error", "sliding_window", "attention_sinks")


@dataclass(kw_only=True)
class GenerationConfig:
    """How a text is continued. The filters act in the order in which they stand here, as in transformers."""

    max_tokens: int = 256
    """Tokens after which generation ends at the latest."""
    repetition_penalty: float = 1.0
    """What the logits of tokens of prompt and text are divided by (multiplied with where negative), above 0; 1 is none
    (Keskar et al. 2019, arXiv:1909.05858)."""
    temperature: float = 1.0
    """What logits are divided by; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw from this many likeliest tokens; null is all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability, above 0, up to 1 (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Draw from tokens with at least this share of the likeliest one's probability, 0 to 1; 0 is all
    (Nguyen et al. 2024, arXiv:2407.01082)."""
    seed: int | None = None
    """Where the random numbers of the first prompt start; the next prompts take the next numbers. Null draws one, and
    the result names it."""
    num_beams: int = 1
    """Beams of a beam search, which takes no random numbers; 1 is none."""
    length_penalty: float = 1.0
    """Beams are compared by log-probability / tokens ** length_penalty: above 0 favours long texts."""
    stop: list[str] = field(default_factory=list)
    """Strings before which the text ends."""
    stop_tokens: list[int] = field(default_factory=list)
    """Further tokens that end the text, besides the tokenizer's end of text."""
    ignore_eos: bool = False
    """Go on behind the tokenizer's end of text."""
    logprobs: int | None = None
    """Give the log-probability of every token, and of so many likeliest ones at its place, as the model had them before
    penalty, temperature and filters; null gives none."""
    cache_size: int | None = None
    """Tokens of a row that are remembered at once; null is as many as prompt and text need, and with eviction at most
    as many as the model is meant for."""
    eviction_policy: EvictionPolicy = "error"
    """When that is too little: ``error`` refuses the prompt, ``sliding_window`` forgets the oldest tokens,
    ``attention_sinks`` forgets the oldest but the first ``num_sinks`` (Xiao et al. 2023, arXiv:2309.17453)."""
    num_sinks: int = 4
    """Tokens at the start that ``attention_sinks`` keeps."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken at each step."""
        return self.temperature == 0 and self.num_beams == 1

    def check(self) -> Iterator[str]:
        """Yields one line per fault."""
        if self.max_tokens < 0:
            yield f"max_tokens={self.max_tokens}: must be at least 0"
        if not 0 < self.repetition_penalty < math.inf:
            yield f"repetition_penalty={self.repetition_penalty}: must be a finite number above 0"
        if not 0 <= self.temperature < math.inf:
            yield f"temperature={self.temperature}: must be at least 0; 0 takes the likeliest token"
        if self.top_k is not None and self.top_k < 1:
            yield f"top_k={self.top_k}: must be at least 1; null is all"
        if not 0 < self.top_p <= 1:
            yield f"top_p={self.top_p}: must be above 0 and at most 1"
        if not 0 <= self.min_p <= 1:
            yield f"min_p={self.min_p}: must lie between 0 and 1"
        if self.seed is not None and not 0 <= self.seed < 2**63:
            yield f"seed={self.seed}: must be at least 0 and below 2**63"
        if self.num_beams < 1:
            yield f"num_beams={self.num_beams}: must be at least 1"
        if not math.isfinite(self.length_penalty):
            yield f"length_penalty={self.length_penalty}: must be a finite number"
        if "" in self.stop:
            yield "stop: holds an empty string, which would end every text at once"
        bad = [token for token in self.stop_tokens if token < 0]
        if bad:
            yield f"stop_tokens={bad}: token ids are at least 0"
        if self.logprobs is not None and not 0 <= self.logprobs <= 100:
            yield f"logprobs={self.logprobs}: must lie between 0 and 100"
        if self.cache_size is not None and self.cache_size < 1:
            yield f"cache_size={self.cache_size}: must be at least 1"
        if self.eviction_policy not in EVICTION_POLICIES:
            yield (
                f"eviction_policy={self.eviction_policy!r}: must be one of "
                f"{', '.join(EVICTION_POLICIES)}"
            )
        if self.num_sinks < 1:
            yield f"num_sinks={self.num_sinks}: must be at least 1"
        yield from self._find_idle()

    def _find_idle(self) -> Iterator[str]:
        """Settings that another one leaves without effect."""
        default = GenerationConfig.__dataclass_fields__
        names: tuple[str, ...] = ()
        reason = ""
        if self.num_beams > 1:
            names = ("temperature", "top_k", "top_p", "min_p", "seed", "logprobs")
            reason = f"num_beams={self.num_beams}"
        elif self.temperature == 0:
            names, reason = ("top_k", "top_p", "min_p"), "temperature=0"
        for name in names:
            value = getattr(self, name)
            if value != default[name].default and not (name == "temperature" and value == 0):
                yield f"{name}={value}: has no effect with {reason}; leave it out"
        if self.num_beams == 1 and self.length_penalty != 1:
            yield f"length_penalty={self.length_penalty}: has no effect with num_beams=1; leave it out"
