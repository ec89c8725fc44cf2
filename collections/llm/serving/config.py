"""What an engine and a server may spend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..generation.config import EVICTION_POLICIES, EvictionPolicy

DEFAULT_CACHE_SIZE = 2048
"""Tokens of a row where nothing is said and the model is meant for more."""
HIGHEST_PRIORITY = 10
"""Priorities lie between its negative and itself, so that a wait has a bound."""


@dataclass(kw_only=True)
class EngineConfig:
    """How many requests are computed together, and how they take turns."""

    max_batch: int = 8
    """Requests that are computed at once; each has a row of the cache."""
    cache_size: int | None = None
    """Tokens that prompt and text of one request may have together. Null is 2048, or what the model is meant for where
    that is less."""
    eviction_policy: EvictionPolicy = "error"
    """When a request needs more: ``error`` refuses it, the others forget (see ``GenerationConfig``)."""
    num_sinks: int = 4
    """Tokens at the start that ``attention_sinks`` keeps."""
    prefill_tokens: int = 256
    """Tokens of prompts that are read between two tokens of the running requests, at most."""
    max_waiting: int = 256
    """Requests that may wait; further ones are refused."""
    ageing_s: float = 10.0
    """Seconds of waiting that count as much as one step of priority, above 0."""

    def check(self) -> Iterator[str]:
        """Yields one line per fault."""
        for name in ("max_batch", "cache_size", "num_sinks", "prefill_tokens", "max_waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name}={value}: must be at least 1"
        if self.eviction_policy not in EVICTION_POLICIES:
            yield (
                f"eviction_policy={self.eviction_policy!r}: must be one of "
                f"{', '.join(EVICTION_POLICIES)}"
            )
        if not 0 < self.ageing_s < float("inf"):
            yield f"ageing_s={self.ageing_s}: must be a finite number above 0"


@dataclass(kw_only=True)
class ServerConfig:
    """What one client may ask for."""

    max_tokens: int | None = None
    """Tokens that a request may ask for; null is as many as the engine has room for."""
    max_choices: int = 16
    """Texts that a request may ask for (``n`` times prompts)."""
    max_body_bytes: int = 1 << 20
    """Bytes of a request."""
    max_time_s: float = 600.0
    """Seconds from a request to its last token, waiting included."""
    finish_s: float = 30.0
    """Seconds that running requests have to end when the server is stopped."""

    def check(self) -> Iterator[str]:
        """Yields one line per fault."""
        for name in ("max_tokens", "max_choices", "max_body_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name}={value}: must be at least 1"
        if not self.max_time_s > 0:
            yield f"max_time_s={self.max_time_s}: must be above 0"
        if not self.finish_s >= 0:
            yield f"finish_s={self.finish_s}: must be at least 0"
