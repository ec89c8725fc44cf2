"""A request on its way through the engine, as the one who submitted it sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Literal

from ..generation.request import GenerationResult, Request, TokenLogprob
from .errors import RequestCancelledError

State = Literal["waiting", "running", "finished", "failed"]


class Handle:
    """What :meth:`Engine.submit` gives: the text while it comes, the result, and a way to end it early.

    Iterating gives pieces of text as ``generate.stream`` does, and raises the error of a request that failed. All
    methods may be called from any thread.

    Args:
        request: What is generated; to be read only.
        priority: Higher goes first.
        arrived_s: On the engine's clock.
        deadline_s: On the engine's clock; None is none.
        listener: Called on the engine's thread after each token and at the end; must be quick.
        wake: Called after a cancellation.

    Attributes:
        state: Where the request is.
        error: Why it failed.
        first_token_s: When its first token came, on the engine's clock.
        ended_s: When it ended.
    """

    def __init__(
        self,
        request: Request,
        *,
        priority: int,
        arrived_s: float,
        deadline_s: float | None,
        listener: Callable[[], None] | None,
        wake: Callable[[], None],
    ) -> None:
        self.request, self.priority = request, priority
        self.arrived_s, self.deadline_s = arrived_s, deadline_s
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.state: State = "waiting"
        self.error: Exception | None = None
        self.is_cancelled = False
        self._listener, self._wake = listener, wake
        self._changed = threading.Condition()

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.state in ("finished", "failed")

    @property
    def text(self) -> str:
        """What came so far."""
        return "".join(self.request.pieces)

    def cancel(self) -> None:
        """Ends the request before the next token; nothing happens if it is over."""
        self.is_cancelled = True
        self._wake()

    def result(self, timeout_s: float | None = None) -> GenerationResult:
        """Waits for the end.

        Raises:
            NemoLikeError: The request did not reach its end.
            TimeoutError: It takes longer than ``timeout_s``; it goes on.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_over, timeout_s):
                raise TimeoutError(
                    f"no result after {timeout_s} s: the request is {self.state}, "
                    f"{len(self.request.tokens)} tokens so far"
                )
        if self.error is not None:
            raise self.error
        return self.request.to_result()

    def __iter__(self) -> Iterator[str]:
        pieces, seen = self.request.pieces, 0
        while True:
            with self._changed:
                while len(pieces) == seen and not self.is_over:
                    self._changed.wait()
            new = pieces[seen:]
            seen += len(new)
            yield from filter(None, new)
            if self.is_over and seen == len(pieces):
                break
        if self.error is not None:
            raise self.error

    def accept(self, token: int, logprob: TokenLogprob | None, *, now_s: float) -> None:
        """Takes the next token; called by the engine."""
        self.request.accept(token, logprob)
        if self.first_token_s is None:
            self.first_token_s = now_s
        if self.request.finish_reason is not None:
            self.finish(now_s=now_s)

    def finish(self, *, now_s: float) -> None:
        """Ends with a result; called by the engine."""
        self.state, self.ended_s = "finished", now_s

    def fail(self, error: Exception, *, now_s: float) -> None:
        """Ends without a result; called by the engine."""
        self.state, self.error, self.ended_s = "failed", error, now_s

    def announce(self) -> None:
        """Wakes those who wait for something new; called by the engine."""
        with self._changed:
            self._changed.notify_all()
        if self._listener is not None:
            self._listener()

    @property
    def was_cancelled(self) -> bool:
        """Whether it ended because somebody wanted it to."""
        return isinstance(self.error, RequestCancelledError)
