"""Text from a language model: a cache, sampling, beams, streaming.

The functions are ``generate`` and ``stream`` of :mod:`.generate`; a name here would hide that module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

from .config import GenerationConfig

if TYPE_CHECKING:
    from .cache import KeyValueCache as KeyValueCache
    from .draft import ModelDraft as ModelDraft
    from .draft import PromptLookup as PromptLookup
    from .request import GenerationResult as GenerationResult
    from .request import Request as Request
    from .request import Speculation as Speculation
    from .request import TokenLogprob as TokenLogprob
    from .session import Session as Session

__all__ = [
    "GenerationConfig",
    "GenerationResult",
    "KeyValueCache",
    "ModelDraft",
    "PromptLookup",
    "Request",
    "Session",
    "Speculation",
    "TokenLogprob",
]

__getattr__ = lazy_names(
    __name__,
    {
        "GenerationResult": ".request",
        "KeyValueCache": ".cache",
        "ModelDraft": ".draft",
        "PromptLookup": ".draft",
        "Request": ".request",
        "Session": ".session",
        "Speculation": ".request",
        "TokenLogprob": ".request",
    },
)
