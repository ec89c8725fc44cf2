"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any

from .errors import (
    EngineStoppedError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    RequestTooLongError,
)

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        status: Of HTTP.
        message: What came, what is allowed, what to do.
        param: Field of the request.
        code: A word that programs compare with.
        headers: Further headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def to_json(self) -> dict[str, Any]:
        """The body."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _KINDS.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """What a client is told of an error of ours; of others it learns nothing."""
        text = str(error)
        if isinstance(error, ApiError):
            return error
        if isinstance(error, QueueFullError):
            headers = {"Retry-After": str(error.retry_after_s)}
            return cls(429, text, code="queue_full", headers=headers)
        if isinstance(error, RequestTooLongError):
            return cls(400, text, param="messages or prompt", code="context_length_exceeded")
        if isinstance(error, RequestTimeoutError):
            return cls(504, text, code="timeout")
        if isinstance(error, EngineStoppedError | RequestCancelledError):
            return cls(503, text, code="stopped", headers={"Retry-After": "5"})
        return cls(500, "the request failed; the server's log says why", code="failed")
