"""Conversations to tokens, and which of the tokens are learnt: the turns of the assistant, with the token that ends
each, and nothing else.

Where a turn lies in the text of a template is found without its help. The text of the messages before the turn, with
the request for an answer behind it, must be a prefix of the whole text: there the turn starts. Where a template
rewrites what came before, every content is replaced by a mark of its own, and the marks show where the contents lie.
A conversation where neither finds it exactly is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_like.core.errors import ConfigError
from nemo_like.text.tokenizer import Tokenizer

from .samples import BadSampleError, Message
from .template import Template, choose_template

Span = tuple[int, int]
"""Characters of a text: the first, and the one behind the last."""


class ChatTemplate:
    """A template together with the tokenizer that reads its texts.

    Args:
        tokenizer: Of the model.
        template: Writes conversations.
        name: For messages.

    Raises:
        ConfigError: What the template writes for an answer cannot be found, or has no token behind it that ends it.

    Attributes:
        end_token: What ends an answer, the last token that is learnt of it.
        end_id: Its id.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template, *, name: str = "chatml") -> None:
        self.tokenizer, self.template, self.name = tokenizer, template, name
        # Another object than the tokenizer's: here the names of special tokens mean the tokens.
        self._backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = False
        added = self._backend.get_added_tokens_decoder().values()
        self._added = _match_any([token.content for token in added])
        self._special = _match_any([token.content for token in added if token.special])
        self._probe()
        self.end_id: int = self._backend.get_vocab()[self.end_token]

    def _probe(self) -> None:
        """Finds what ends an answer, and whether a request for an answer is written at all."""
        question, answer = _mark(0), _mark(1)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            text = self.render(messages)
            asked = self.render(messages[:1], asks_for_answer=True)
            unasked = self.render(messages[:1])
        except BadSampleError as error:
            raise self._refuse(f"a question and an answer: {error}") from error
        if text.count(answer) != 1 or text.count(question) != 1:
            raise self._refuse("it does not write the contents of the messages once each")
        place = text.index(answer)
        behind = text[place + len(answer) :]
        found = self._added.search(behind)
        if found is None:
            raise self._refuse(
                f"behind an answer it writes {behind!r}, which has no token that ends it: the model would never learn "
                "to stop"
            )
        self.end_token = found.group()
        self._has_request = asked != unasked
        # Without a request, what stands before the content is a heading, which is no part of the answer.
        is_prefix = not self._has_request and text.startswith(asked)
        heading = text[len(asked) : place] if is_prefix else ""
        self._heading = heading.rstrip(" ") if heading.strip() else ""

    def _refuse(self, reason: str) -> ConfigError:
        return ConfigError(
            [
                f"chat_template {self.name}: {reason}; choose another one: chat_template=chatml, none, or a Jinja file"
            ]
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        *,
        asks_for_answer: bool = False,
    ) -> str:
        """The text of a conversation.

        Raises:
            BadSampleError: The template refuses it.
        """
        return self.template.render(messages, tools, asks_for_answer=asks_for_answer)

    def encode_prompt(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant begins to speak.

        Raises:
            BadSampleError: The template refuses it, or a content holds the name of a special token.
        """
        self._refuse_special(messages)
        text = self.render(messages, tools, asks_for_answer=True)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode(
        self, messages: Sequence[Message], tools: list[Any] | None = None, *, first: int = 0
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Tokens of a conversation, those that ``apply_chat_template`` of transformers gives, and which are learnt.

        Args:
            messages: In order. An answer with ``weight: 0`` is not learnt.
            tools: What the assistant may call.
            first: Answers before this message are not learnt.

        Returns:
            (T,) ids, and (T,) whether each is part of an answer that is learnt. A token that reaches from before an
            answer into it is not.

        Raises:
            BadSampleError: The template refuses it, a content holds the name of a special token, or the answers cannot
                be found exactly.
        """
        self._refuse_special(messages)
        text = self.render(messages, tools)
        spans = [span for _, span in self.find_answers(messages, tools, text, first=first)]
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        is_learnt = np.zeros(len(ids), dtype=np.bool_)
        for start, stop in spans:
            is_learnt |= (starts >= start) & (starts < stop)
        return ids, is_learnt

    def find_answers(
        self, messages: Sequence[Message], tools: list[Any] | None, text: str, *, first: int = 0
    ) -> list[tuple[int, Span]]:
        """Where the answers that are learnt stand in the text of a conversation: message, and characters."""
        wanted = [
            number
            for number, message in enumerate(messages)
            if number >= first and message["role"] == "assistant" and message.get("weight") != 0
        ]
        found = [(it, self._find_by_prefix(messages, tools, text, it)) for it in wanted]
        spans = [(it, span) for it, span in found if span is not None]
        if len(spans) < len(found):
            spans = self._find_by_marks(messages, tools, text, wanted)
        return spans

    def _find_by_prefix(
        self, messages: Sequence[Message], tools: list[Any] | None, text: str, number: int
    ) -> Span | None:
        try:
            before = self.render(messages[:number], tools, asks_for_answer=True)
        except BadSampleError:  # say, a conversation that may not be empty
            return None
        if not text.startswith(before + self._heading):
            return None
        start = len(before + self._heading)
        place = text.find(self.end_token, start)
        stop = place + len(self.end_token)
        try:
            after = self.render(messages[: number + 1], tools)
        except BadSampleError:
            after = ""
        agreed = _count_shared(text, after)
        if place >= 0 and stop <= agreed:
            return start, stop
        # A call of a tool may end in another token than an answer does (Llama: <|eom_id|>).
        others = list(self._special.finditer(text, start, agreed)) if agreed > start else []
        if others and not text[others[-1].end() : agreed].strip():
            return start, others[-1].end()
        # A template that shortens what is no longer the last answer (Qwen's thoughts): a special token in between would
        # be the beginning of another message.
        if place >= 0 and not self._special.search(text, start, place):
            return start, stop
        return None

    def _find_by_marks(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        text: str,
        wanted: Sequence[int],
    ) -> list[tuple[int, Span]]:
        marked = [
            message | ({"content": _mark(number)} if message["content"] else {})
            for number, message in enumerate(messages)
        ]
        pattern = self.render(marked, tools)
        order = [int(it) for it in _MARK.findall(pattern)]
        literals = _MARK.split(pattern)[::2]
        places = self._align(text, literals, [messages[it]["content"] for it in order])
        if places is None or sorted(order) != sorted(set(order)):
            raise self._not_exact()
        spans = []
        for number in wanted:
            if number not in order:
                raise self._not_exact()
            turn = order.index(number)
            start, content_stop = places[turn]
            limit = places[turn + 1][0] if turn + 1 < len(places) else len(text)
            place = text.find(self.end_token, content_stop, limit)
            if place < 0:
                raise self._not_exact()
            if not self._has_request:  # then the blank before the answer is the assistant's
                start = len(text[:start].rstrip(" "))
            spans.append((number, (start, place + len(self.end_token))))
        return spans

    def _align(
        self, text: str, literals: Sequence[str], contents: Sequence[str]
    ) -> list[Span] | None:
        """Where contents stand in a text, if it is literals and contents in turn, these perhaps trimmed."""
        place, places = 0, []
        for number, content in enumerate(contents):
            if not text.startswith(literals[number], place):
                return None
            place += len(literals[number])
            forms = (content, content.strip(), content.rstrip(), content.lstrip())
            follow = literals[number + 1]
            form = next((it for it in forms if text.startswith(it + follow, place)), None)
            if form is None:
                return None
            places.append((place, place + len(form)))
            place += len(form)
        return places if text[place:] == literals[len(contents)] else None

    def _not_exact(self) -> BadSampleError:
        return BadSampleError(
            f"the chat template {self.name} rewrites this conversation, so which of its tokens are the answers cannot "
            "be found exactly"
        )

    def _refuse_special(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages):
            content = message["content"]
            found = self._special.search(content)
            token = found.group() if found else None
            if token is None and self.end_token in content:
                token = self.end_token
            if token is not None:
                raise BadSampleError(
                    f"messages[{number}] holds the name of the special token {token!r}, which would become the token"
                )


def _count_shared(left: str, right: str) -> int:
    """How many characters two texts have in common at their start."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_MARK = re.compile("\ue000([0-9]+)\ue001")


def _mark(number: int) -> str:
    """A text that no template knows and no trimming touches."""
    return f"\ue000{number}\ue001"


def _match_any(words: Sequence[str]) -> re.Pattern[str]:
    """The first of some words, of several at one place the longest; nothing where there are none."""
    by_length = sorted((word for word in words if word), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, by_length)) if by_length else r"(?!)")


def open_chat_template(tokenizer: Tokenizer, name: str | None = None) -> ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: Of the model.
        name: Null is the tokenizer's own, or else ``chatml``; ``chatml``; ``none``; or a file with a Jinja template.

    Raises:
        ConfigError: There is no such template, or it cannot be used.
        MissingExtraError: It needs transformers.
    """
    template, known_as, _ = choose_template(tokenizer, name)
    return ChatTemplate(tokenizer, template, name=known_as)
