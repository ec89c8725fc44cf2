"""Answers in the shapes of OpenAI's protocol."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from nemo_like.text.tokenizer import Tokenizer

from ..generation.request import Request, TokenLogprob
from ..generation.streaming import REPLACEMENT

Json = dict[str, Any]


def to_event(data: Json | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def count_usage(requests: Sequence[Request], *, num_choices: int) -> Json:
    """Tokens of an answer.

    Args:
        requests: ``num_choices`` of one prompt after the other.
        num_choices: Texts of each prompt, which is counted once.
    """
    prompt_tokens = sum(len(it.prompt) for it in requests[::num_choices])
    completion_tokens = sum(len(it.tokens) for it in requests)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Choice:
    """One text of an answer, whole or in pieces.

    Args:
        index: Among the texts of the answer.
        request: That is generated.
        tokenizer: Names tokens.
        strips: Whether blanks at the beginning belong to the template.
    """

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, *, strips: bool) -> None:
        self.index, self.request = index, request
        self._tokenizer, self._strips = tokenizer, strips
        self._seen = 0
        self._length = 0

    def take(self) -> tuple[str, int, int]:
        """Text that has come since the last call, and the tokens that it came with, from first to behind the last."""
        start, pieces = self._seen, self.request.pieces
        stop = len(pieces)
        self._seen = stop
        text = "".join(pieces[start:stop])
        if self._strips and not self._length:
            text = text.lstrip()
        self._length += len(text)
        return text, start, stop

    def name_completion_logprobs(self, start: int, stop: int) -> Json | None:
        """Of ``/v1/completions``."""
        entries = self._cut(start, stop)
        if entries is None:
            return None
        pieces = self.request.pieces[start:stop]
        lengths = accumulate(
            (len(it) for it in pieces), initial=self._length - len("".join(pieces))
        )
        return {
            "tokens": [self._name(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            # Of several tokens with one text the likeliest stays, which comes first.
            "top_logprobs": [
                {self._name(token): value for token, value in reversed(entry.top)}
                for entry in entries
            ],
            "text_offset": list(lengths)[: len(entries)],
        }

    def name_chat_logprobs(self, start: int, stop: int) -> Json | None:
        """Of ``/v1/chat/completions``."""
        entries = self._cut(start, stop)
        if entries is None:
            return None
        content = [
            {
                **self._describe(entry.token, entry.logprob),
                "top_logprobs": [self._describe(*each) for each in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _cut(self, start: int, stop: int) -> list[TokenLogprob] | None:
        request = self.request
        if request.logprobs is None:
            return None
        # The token that ended the text is no part of it.
        has_end = isinstance(request.stopped_by, int)
        return request.logprobs[start : min(stop, len(request.tokens) - has_end)]

    def _name(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _describe(self, token: int, logprob: float) -> Json:
        text = self._name(token)
        # A part of a character has no text of its own, and the tokenizer does not tell its bytes.
        raw = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": raw}


class Answer:
    """The frame around the choices of one answer.

    Args:
        kind: ``text_completion`` or ``chat.completion``.
        model: Name that is served.
    """

    def __init__(self, kind: str, model: str) -> None:
        self.is_chat = kind == "chat.completion"
        self._kind = kind
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def write(self, choices: Sequence[Choice], usage: Json) -> Json:
        """The whole answer."""
        return {
            **self._head,
            "object": self._kind,
            "choices": [self._write_choice(it) for it in choices],
            "usage": usage,
        }

    def _write_choice(self, choice: Choice) -> Json:
        text, start, stop = choice.take()
        head = {"index": choice.index, "finish_reason": choice.request.finish_reason}
        if self.is_chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            return {**head, "message": message, "logprobs": choice.name_chat_logprobs(start, stop)}
        return {**head, "text": text, "logprobs": choice.name_completion_logprobs(start, stop)}

    def write_chunk(
        self, choices: Sequence[Json], *, includes_usage: bool, usage: Json | None = None
    ) -> Json:
        """A part of the answer; usage stands in the last one, and is null in the others, if it was asked for."""
        kind = "chat.completion.chunk" if self.is_chat else self._kind
        tail = {"usage": usage} if includes_usage else {}
        return {**self._head, "object": kind, "choices": list(choices), **tail}

    def write_start(self, choice: Choice) -> list[Json]:
        """What stands before the first piece of a text."""
        if not self.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def write_piece(self, choice: Choice) -> list[Json]:
        """What has come since the last piece."""
        text, start, stop = choice.take()
        name = choice.name_chat_logprobs if self.is_chat else choice.name_completion_logprobs
        logprobs = name(start, stop) if stop > start else None
        if not text and not logprobs:
            return []
        head = {"index": choice.index, "logprobs": logprobs, "finish_reason": None}
        return [{**head, "delta": {"content": text}} if self.is_chat else {**head, "text": text}]

    def write_end(self, choice: Choice) -> list[Json]:
        """What stands behind the last piece of a text."""
        head = {
            "index": choice.index,
            "logprobs": None,
            "finish_reason": choice.request.finish_reason,
        }
        return [{**head, "delta": {}} if self.is_chat else {**head, "text": ""}]
