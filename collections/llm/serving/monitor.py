"""Figures of an engine: what it did, and how long people waited."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from .handle import Handle

_WINDOW_S = 10.0
"""Seconds over which the speed is taken."""
_LATEST = 1000
"""Requests over which waits are taken."""


@dataclass(frozen=True)
class Percentiles:
    """Of the latest requests, in seconds."""

    p50: float
    p95: float
    count: int

    @classmethod
    def of(cls, values: deque[float]) -> Percentiles | None:
        """Of some values by the nearest rank; None without any."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p95 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95))
        return cls(p50, p95, len(ordered))


@dataclass(frozen=True, kw_only=True)
class EngineStatistics:
    """A look at an engine."""

    waiting: int
    running: int
    finished: int
    failed: int
    """By an error or a time limit."""
    cancelled: int
    refused: int
    """Because too many waited."""
    prompt_tokens: int
    """Computed; what was copied from a row with the same beginning is not counted."""
    generated_tokens: int
    tokens_per_s: float
    """Generated in the last seconds."""
    time_to_first_token_s: Percentiles | None
    """From submission on."""
    time_per_token_s: Percentiles | None
    """Of each further token, averaged over a request."""

    def to_json(self) -> dict[str, Any]:
        """As an object."""
        return asdict(self)


class Monitor:
    """Counts what the engine tells it."""

    def __init__(self) -> None:
        self.finished = self.failed = self.cancelled = self.refused = 0
        self.prompt_tokens = self.generated_tokens = 0
        self._steps: deque[tuple[float, int]] = deque()
        self._first_s: deque[float] = deque(maxlen=_LATEST)
        self._each_s: deque[float] = deque(maxlen=_LATEST)
        self._ends_s: deque[float] = deque(maxlen=32)

    def count_step(self, generated: int, *, now_s: float) -> None:
        """A step that gave so many tokens."""
        self.generated_tokens += generated
        self._steps.append((now_s, generated))
        while self._steps[0][0] < now_s - _WINDOW_S:
            self._steps.popleft()

    def count_end(self, handle: Handle) -> None:
        """A request that is over."""
        assert handle.ended_s is not None, "it is over"
        self._ends_s.append(handle.ended_s)
        if handle.was_cancelled:
            self.cancelled += 1
        elif handle.error is not None:
            self.failed += 1
        else:
            self.finished += 1
        if handle.first_token_s is None:
            return
        self._first_s.append(handle.first_token_s - handle.arrived_s)
        further = len(handle.request.tokens) - 1
        if further > 0:
            self._each_s.append((handle.ended_s - handle.first_token_s) / further)

    def estimate_wait_s(self, *, now_s: float) -> int:
        """Whole seconds until a further request may end, by the pace of the last minute; 1 to 60."""
        ends_s = [it for it in self._ends_s.copy() if it >= now_s - 60]
        if len(ends_s) < 2:
            return 1
        return max(1, math.ceil((now_s - ends_s[0]) / (len(ends_s) - 1)))

    def summarize(self, *, waiting: int, running: int, now_s: float) -> EngineStatistics:
        """What there is to say now."""
        recent = [(at, count) for at, count in tuple(self._steps) if at >= now_s - _WINDOW_S]
        # The first step began before it was counted; so its tokens are none of the span's.
        span_s = now_s - recent[0][0] if recent else 0.0
        speed = sum(count for _, count in recent[1:]) / span_s if span_s > 0 else 0.0
        return EngineStatistics(
            waiting=waiting,
            running=running,
            finished=self.finished,
            failed=self.failed,
            cancelled=self.cancelled,
            refused=self.refused,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            tokens_per_s=speed,
            time_to_first_token_s=Percentiles.of(self._first_s.copy()),
            time_per_token_s=Percentiles.of(self._each_s.copy()),
        )
