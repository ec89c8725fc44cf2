"""Records of fine-tuning data: from the keys of an object to a typed sample, or to a fault."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nemo_like.core.errors import suggest

from .config import KeysConfig, Kind

Message = dict[str, Any]
"""``role``, ``content``, and what else a template may ask for (``tool_calls``, ``name``)."""

ROLES = ("system", "user", "assistant", "tool")
_ROLE_NAMES = {
    **{name: name for name in ROLES},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
_USUAL: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "role": ("role", "from"),
    "content": ("content", "value"),
    "tools": ("tools",),
    "system": ("system",),
    "prompt": ("instruction", "prompt", "question"),
    "input": ("input", "context"),
    "completion": ("output", "completion", "answer", "response"),
    "text": ("text",),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
}


class BadSampleError(ValueError):
    """A record that is no sample."""


class SameAnswersError(BadSampleError):
    """A preference between an answer and itself."""

    def __init__(self) -> None:
        super().__init__("chosen and rejected are the same: there is nothing to prefer")


@dataclass(frozen=True)
class ChatSample:
    """A conversation; the answers in it are learnt. An instruction pair is one of two messages."""

    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class TextSample:
    """A text that is learnt whole."""

    text: str


@dataclass(frozen=True)
class PreferenceSample:
    """Two answers to the same conversation, of which one is better."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[Any] | None = None


Sample = ChatSample | TextSample | PreferenceSample


def fingerprint(sample: Sample) -> str:
    """The content of a sample as one text, the same wherever it stands."""
    return json.dumps([type(sample).__name__, asdict(sample)], sort_keys=True, ensure_ascii=False)


def read_sample(
    record: Mapping[str, Any], *, kind: Kind = "auto", keys: KeysConfig | None = None
) -> Sample:
    """What a record says.

    Args:
        record: An object of a file.
        kind: What it is; ``auto`` goes by the keys it has.
        keys: Names of the keys.

    Raises:
        BadSampleError: It is none of that kind; the text says what is missing or wrong.
    """
    return _Reader(record, keys or KeysConfig()).read(kind)


class _Reader:
    def __init__(self, record: Mapping[str, Any], keys: KeysConfig) -> None:
        # A table has every column in every row: what a row lacks is null there.
        self.record = {name: value for name, value in record.items() if value is not None}
        self.keys = keys

    def read(self, kind: Kind) -> Sample:
        if kind == "auto":
            kind = self._recognise()
        if kind == "chat":
            messages = self._with_system(self._read_messages("messages"))
            return ChatSample(_require_answer(messages, "the chat"), self._read_tools())
        if kind == "pair":
            return self._read_pair()
        if kind == "preference":
            return self._read_preference()
        text = self._require("text")
        if type(text) is not str or not text:
            raise BadSampleError(
                f"{self._name('text')!r} must be a text that is not empty, this is {_show(text)}"
            )
        return TextSample(text)

    def _recognise(self) -> Kind:
        if self._find("messages") is not None:
            return "chat"
        if self._find("chosen") is not None and self._find("rejected") is not None:
            return "preference"
        if self._find("completion") is not None and (self._find("prompt") or self._find("input")):
            return "pair"
        if self._find("text") is not None:
            return "text"
        there = ", ".join(map(repr, list(self.record)[:8])) or "none"
        raise BadSampleError(
            "no chat (messages), pair (prompt, completion), text or preference (chosen, rejected) by its keys: "
            f"{there}; name them with keys.<what>=<key>"
        )

    def _find(self, what: str) -> str | None:
        """The key under which something stands in this record."""
        given = getattr(self.keys, what)
        return next((it for it in ((given,) if given else _USUAL[what]) if it in self.record), None)

    def _name(self, what: str) -> str:
        return self._find(what) or getattr(self.keys, what) or _USUAL[what][0]

    def _require(self, what: str) -> Any:
        key = self._find(what)
        if key is None:
            there = ", ".join(map(repr, list(self.record)[:8])) or "none"
            name = self._name(what)
            raise BadSampleError(
                f"the key {name!r} is missing{suggest(name, self.record)}; there are: {there}"
            )
        return self.record[key]

    def _read_pair(self) -> ChatSample:
        has_prompt = self._find("prompt") is not None
        parts = [self._require("prompt" if has_prompt else "input")]
        if has_prompt and self._find("input") is not None:
            parts.append(self._require("input"))
        answer = self._require("completion")
        if all(type(it) is list for it in (*parts, answer)):
            messages = [message for part in parts for message in self._read_list(part)]
            messages += self._read_list(answer)
        else:
            for value in (*parts, answer):
                if type(value) is not str:
                    raise BadSampleError(
                        f"prompt and answer must be texts, or both lists of messages; this is {_show(value)}"
                    )
            question = "\n\n".join(part for part in parts if part)
            messages = [_say("user", question), _say("assistant", answer)]
        messages = self._with_system(messages)
        return ChatSample(_require_answer(messages, "the pair"), self._read_tools())

    def _read_preference(self) -> PreferenceSample:
        answers = []
        for what in ("chosen", "rejected"):
            value = self._require(what)
            is_text = type(value) is str
            answers.append([_say("assistant", value)] if is_text else self._read_list(value, what))
        prompt: list[Message] = []
        if self._find("prompt") is not None:
            value = self._require("prompt")
            prompt = [_say("user", value)] if type(value) is str else self._read_list(value)
        chosen, rejected = answers
        if chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
            shared = len(prompt)
            while shared < min(map(len, answers)) and chosen[shared] == rejected[shared]:
                shared += 1
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if chosen == rejected:
            raise SameAnswersError
        if not prompt:
            raise BadSampleError(
                "a preference needs a prompt: the key 'prompt', or messages that chosen and rejected share"
            )
        return PreferenceSample(
            self._with_system(prompt),
            _require_answer(chosen, "chosen"),
            _require_answer(rejected, "rejected"),
            self._read_tools(),
        )

    def _with_system(self, messages: list[Message]) -> list[Message]:
        key = self._find("system")
        if key is None or not self.record[key] or messages[0]["role"] == "system":
            return messages
        return [_say("system", self.record[key]), *messages]

    def _read_tools(self) -> list[Any] | None:
        key = self._find("tools")
        tools = self.record[key] if key else None
        if type(tools) is str:
            tools = _parse_json(tools, repr(key))
        if not tools:
            return None
        if type(tools) is not list:
            raise BadSampleError(f"{key!r} must be a list of tools, this is {_show(tools)}")
        return tools

    def _read_messages(self, what: str) -> list[Message]:
        value = self._require(what)
        return self._read_list(
            _parse_json(value, what) if type(value) is str else value, self._name(what)
        )

    def _read_list(self, value: Any, name: str = "messages") -> list[Message]:
        if type(value) is not list or not value:
            raise BadSampleError(
                f"{name!r} must be a list of messages, at least one; this is {_show(value)}"
            )
        return [self._read_message(it, f"{name}[{number}]") for number, it in enumerate(value)]

    def _read_message(self, value: Any, place: str) -> Message:
        if type(value) is not dict:
            raise BadSampleError(f"{place} must be an object, this is {_show(value)}")
        message = {name: it for name, it in value.items() if it is not None and it != []}
        role_keys = (self.keys.role,) if self.keys.role else _USUAL["role"]
        content_keys = (self.keys.content,) if self.keys.content else _USUAL["content"]
        role_key = next((it for it in role_keys if it in message), role_keys[0])
        content_key = next((it for it in content_keys if it in message), content_keys[0])
        role = message.pop(role_key, None)
        known = _ROLE_NAMES.get(role) if type(role) is str else None
        if known is None:
            hint = suggest(role, _ROLE_NAMES) if type(role) is str else ""
            raise BadSampleError(
                f"{place}.{role_key}={role!r}: must be one of {', '.join(_ROLE_NAMES)}{hint}"
            )
        calls = message.pop("tool_calls", None)
        content = _read_content(message.pop(content_key, None), f"{place}.{content_key}")
        if content is None and not calls:
            raise BadSampleError(f"{place}: has no {content_key!r} and calls no tool")
        # In this order, which is that of the tools that write such files: templates may print a message.
        result: Message = {"role": known, "content": content or ""}
        if calls:
            result["tool_calls"] = _read_calls(calls, f"{place}.tool_calls")
        return result | message


def _say(role: str, content: Any) -> Message:
    if type(content) is not str:
        raise BadSampleError(f"the {role} message must be a text, this is {_show(content)}")
    return {"role": role, "content": content}


def _read_content(value: Any, place: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if type(value) is list:  # parts, as the interfaces of hosted models have them
        found = [it.get("text") if type(it) is dict else it for it in value]
        texts = [it for it in found if isinstance(it, str)]
        if texts and len(texts) == len(found):
            return "".join(texts)
    raise BadSampleError(f"{place} must be a text or a list of text parts, this is {_show(value)}")


def _read_calls(calls: Any, place: str) -> list[Any]:
    """Tool calls with their arguments as objects, which is what templates expect."""
    if type(calls) is str:
        calls = _parse_json(calls, place)
    if type(calls) is not list or not all(type(call) is dict for call in calls):
        raise BadSampleError(f"{place} must be a list of objects, this is {_show(calls)}")
    result = []
    for call in calls:
        function = call.get("function", call)
        if type(function) is dict and type(function.get("arguments")) is str:
            arguments = _parse_json(function["arguments"], f"{place}.arguments")
            function = function | {"arguments": arguments}
        result.append(call | {"function": function} if "function" in call else function)
    return result


def _parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadSampleError(f"{place} is a text that is no JSON: {error}") from None


def _require_answer(messages: Sequence[Message], name: str) -> list[Message]:
    answers = [it for it in messages if it["role"] == "assistant"]
    if not any(it["content"] or it.get("tool_calls") for it in answers):
        raise BadSampleError(f"{name} has no answer of the assistant: there is nothing to learn")
    return list(messages)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
