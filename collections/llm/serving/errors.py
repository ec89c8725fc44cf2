"""Why a request was not taken, or did not reach its end."""

from __future__ import annotations

from nemo_like.core.errors import ConfigError, NemoLikeError


class RequestTooLongError(ConfigError):
    """Prompt and text do not fit a row of the cache."""


class QueueFullError(NemoLikeError):
    """As many requests wait as may wait.

    Args:
        message: What was reached.
        retry_after_s: When a place may be free, by the pace of the last requests.
    """

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStoppedError(NemoLikeError):
    """The engine takes no more requests."""


class RequestCancelledError(NemoLikeError):
    """Somebody cancelled the request."""


class RequestTimeoutError(NemoLikeError):
    """The request took longer than it may."""


class RequestFailedError(NemoLikeError):
    """Computing the request went wrong; the cause is chained."""
