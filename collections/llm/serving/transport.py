"""Between HTTP and the service: bodies with a limit, clients that leave, streams of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from .api_error import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def read_json(request: Any, *, max_bytes: int, max_time_s: float) -> Any:
    """The body of a request.

    Args:
        request: Of Starlette.
        max_bytes: More is not even read.
        max_time_s: Seconds that it may take to arrive.

    Raises:
        ApiError: It is too large or too slow, or no JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also a lock: a page in a browser cannot send this type elsewhere without being allowed to.
        raise ApiError(
            415,
            f"Content-Type={kind!r}: must be application/json; with curl: -H 'Content-Type: application/json'",
        )
    too_large = ApiError(413, f"the body is too large: at most {max_bytes} bytes", code="too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(max_time_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError as error:
        message = f"the body did not arrive within {max_time_s:g} s"
        raise ApiError(408, message, code="timeout") from error
    try:
        return json.loads(b"".join(chunks))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="no_json") from error


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does some work while the client stays connected.

    Args:
        receive: Of ASGI, when the body was read.
        work: Is cancelled when the client leaves.

    Raises:
        ClientGoneError: It left.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events.

    Args:
        events: Whole events.
        close: Called at the end, however it comes.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._events, self._close = events, close

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Sends until the end, or until the client leaves."""
        try:
            await unless_gone(receive, self._send(send))
        except ClientGoneError:
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # a proxy before the server passes them on at once
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
