"""The endpoints: a request is read, put into the engine, and answered whole or piece by piece."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_like.core.errors import ConfigError, suggest

from ..finetune.samples import BadSampleError
from ..generation.config import GenerationConfig
from ..generation.conversation import Conversation
from ..generation.generate import encode_prompt
from .answers import Answer, Choice, count_usage, to_event
from .api_error import ApiError
from .config import ServerConfig
from .engine import Engine
from .errors import RequestTooLongError
from .fields import TextRequest, read_chat, read_completion
from .handle import Handle
from .transport import EventStream, read_json, unless_gone

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Work:
    """What one HTTP request has in the engine."""

    handles: list[Handle]
    choices: list[Choice]
    answer: Answer
    num_choices: int
    changed: asyncio.Event
    """Set whenever a token came or a request ended."""
    name: str
    """For the log."""
    started_s: float

    def cancel(self) -> None:
        """Frees what is still in the engine, and writes a line to the log."""
        is_whole = all(it.is_over for it in self.handles)
        for handle in self.handles:
            if not handle.is_over:
                handle.cancel()
        usage = self.count_usage()
        waits_s = [it.first_token_s - it.arrived_s for it in self.handles if it.first_token_s]
        logger.info(
            "%s: %d + %d tokens in %.2f s%s%s",
            self.name,
            usage["prompt_tokens"],
            usage["completion_tokens"],
            time.perf_counter() - self.started_s,
            f", the first after {min(waits_s):.2f} s" if waits_s else "",
            "" if is_whole else ", left by the client",
        )

    def count_usage(self) -> dict[str, Any]:
        """Tokens so far."""
        return count_usage([it.request for it in self.handles], num_choices=self.num_choices)


class Service:
    """Answers in OpenAI's protocol what an engine generates.

    Args:
        engine: That runs in a thread of its own.
        conversation: Writes prompts of chats; its own messages are not used.
        model_name: What clients call the model.
        config: Limits.
        stop_tokens: Further tokens that end a text.
        api_key: What clients must show; None lets everybody in.

    Raises:
        ConfigError: The limits have faults.
    """

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        *,
        model_name: str,
        config: ServerConfig | None = None,
        stop_tokens: Sequence[int] = (),
        api_key: str | None = None,
    ) -> None:
        config = config or ServerConfig()
        faults = list(config.check())
        if faults:
            raise ConfigError(faults)
        self.engine, self.conversation, self.config = engine, conversation, config
        self.model_name, self._api_key = model_name, api_key
        self._stop_tokens = list(stop_tokens)
        self._created = int(time.time())

    def authorize(self, authorization: str | None) -> None:
        """Lets a request pass.

        Raises:
            ApiError: There is a key, and the header does not show it.
        """
        if self._api_key is None:
            return
        given = (authorization or "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def describe_model(self, name: str | None = None) -> dict[str, Any]:
        """The model.

        Raises:
            ApiError: Another one is meant.
        """
        if name not in (None, self.model_name):
            assert name is not None
            raise ApiError(
                404,
                f"model={name!r}: is not served here, {self.model_name!r} is"
                f"{suggest(name, [self.model_name])}",
                param="model",
                code="model_not_found",
            )
        return {
            "id": self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "nemo-like",
        }

    async def complete(self, request: Any) -> Any:
        """``/v1/completions``: an object, or an :class:`EventStream`."""
        return await self._answer(request, read_completion, "text_completion")

    async def chat(self, request: Any) -> Any:
        """``/v1/chat/completions``: an object, or an :class:`EventStream`."""
        return await self._answer(request, read_chat, "chat.completion")

    async def _answer(self, request: Any, read: Callable[..., TextRequest], kind: str) -> Any:
        limits = self.config
        body = await read_json(
            request, max_bytes=limits.max_body_bytes, max_time_s=limits.max_time_s
        )
        asked = read(body, max_choices=limits.max_choices)
        self.describe_model(asked.model)
        # A long text takes a while to become tokens, in which others are served.
        prompts, config = await asyncio.to_thread(self._prepare, asked)
        work = self._submit(asked, prompts, config, Answer(kind, self.model_name))
        if asked.is_streamed:
            events = self._stream(work, includes_usage=asked.includes_usage)
            return EventStream(events, work.cancel)
        try:
            return await unless_gone(request.receive, self._finish(work))
        finally:
            work.cancel()

    def _prepare(self, asked: TextRequest) -> tuple[list[list[int]], GenerationConfig]:
        """Token ids of the prompts, and the configuration with what the model and the limits add."""
        config, limit = asked.config, self.config.max_tokens
        stop, stop_tokens = list(config.stop), list(self._stop_tokens)
        if asked.messages:
            conversation = copy.copy(self.conversation)
            conversation.messages = asked.messages
            try:
                prompts = [conversation.encode()]
            except BadSampleError as error:
                raise ApiError(
                    400, f"messages: {error}", param="messages", code="invalid_value"
                ) from error
            stop += conversation.stop
            stop_tokens += conversation.end_tokens
        else:
            prompts = [encode_prompt(self.engine.tokenizer, it) for it in asked.prompts]
        max_tokens = config.max_tokens
        if not asked.has_max_tokens:
            room = self.engine.cache.cache_size - len(prompts[0]) + 1
            max_tokens = max(1, room if limit is None else min(room, limit))
        elif limit is not None and max_tokens > limit:
            raise ApiError(
                400,
                f"max_tokens={max_tokens}: at most {limit}",
                param="max_tokens",
                code="invalid_value",
            )
        stop_tokens = [] if config.ignore_eos else stop_tokens
        return prompts, dataclasses.replace(
            config, max_tokens=max_tokens, stop=stop, stop_tokens=stop_tokens
        )

    def _submit(
        self,
        asked: TextRequest,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        answer: Answer,
    ) -> _Work:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        handles: list[Handle] = []
        try:
            for tokens in prompts:
                for _ in range(asked.num_choices):
                    seed = None if asked.seed is None else asked.seed + len(handles)
                    handle = self.engine.submit(
                        tokens,
                        config,
                        seed=seed,
                        priority=asked.priority,
                        max_time_s=self.config.max_time_s,
                        listener=lambda: _set(loop, changed),
                    )
                    handles.append(handle)
        except Exception as error:
            for handle in handles:
                handle.cancel()
            if isinstance(error, ConfigError) and not isinstance(error, RequestTooLongError):
                raise ApiError(400, str(error), param="prompt", code="invalid_value") from error
            raise
        tokenizer, is_chat = self.engine.tokenizer, answer.is_chat
        choices = [
            Choice(index, handle.request, tokenizer, strips=is_chat)
            for index, handle in enumerate(handles)
        ]
        return _Work(
            handles=handles,
            choices=choices,
            answer=answer,
            num_choices=asked.num_choices,
            changed=changed,
            name="chat" if is_chat else "completion",
            started_s=time.perf_counter(),
        )

    async def _finish(self, work: _Work) -> dict[str, Any]:
        while not all(handle.is_over for handle in work.handles):
            await work.changed.wait()
            work.changed.clear()
            _raise_first(work.handles)
        _raise_first(work.handles)
        return work.answer.write(work.choices, work.count_usage())

    async def _stream(self, work: _Work, *, includes_usage: bool) -> AsyncIterator[bytes]:
        answer = work.answer
        running = list(zip(work.choices, work.handles, strict=True))
        parts = [part for choice, _ in running for part in answer.write_start(choice)]
        while True:
            for part in parts:
                yield to_event(answer.write_chunk([part], includes_usage=includes_usage))
            if not running:
                break
            await work.changed.wait()
            work.changed.clear()
            parts = []
            for choice, handle in list(running):
                is_over = (
                    handle.is_over
                )  # asked first: what comes after the look is left for the next
                parts += answer.write_piece(choice)
                if handle.error is not None:
                    yield to_event(ApiError.of(handle.error).to_json())
                    return
                if is_over:
                    parts += answer.write_end(choice)
                    running.remove((choice, handle))
        if includes_usage:
            yield to_event(answer.write_chunk([], includes_usage=True, usage=work.count_usage()))
        yield to_event("[DONE]")


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


def _raise_first(handles: Sequence[Handle]) -> None:
    for handle in handles:
        if handle.error is not None:
            raise handle.error
