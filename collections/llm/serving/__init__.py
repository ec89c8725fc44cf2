"""Many requests at once: an engine that schedules token by token, and a server that speaks OpenAI's protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

from .config import EngineConfig, ServerConfig

if TYPE_CHECKING:
    from .engine import Engine as Engine
    from .handle import Handle as Handle

__all__ = ["Engine", "EngineConfig", "Handle", "ServerConfig"]

__getattr__ = lazy_names(__name__, {"Engine": ".engine", "Handle": ".handle"})
