"""Bodies of requests, by the names of OpenAI's protocol: every field is honoured, refused, or known to be idle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_like.core.errors import suggest

from ..generation.config import GenerationConfig
from .api_error import ApiError
from .config import HIGHEST_PRIORITY

_MOST_LIKELIEST = 20
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
# Fields that say nothing about the answer.
_IDLE = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
)
# Fields that cannot be honoured, and the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}
_INSTEAD = {
    "frequency_penalty": "; use repetition_penalty",
    "presence_penalty": "; use repetition_penalty",
}
_IDLE_IN_MESSAGE = ("refusal", "tool_calls", "function_call", "audio", "annotations", "name")
_ROLES = {it: it for it in ("system", "user", "assistant")} | {"developer": "system"}


@dataclass(kw_only=True)
class TextRequest:
    """What both endpoints have in common."""

    model: str
    config: GenerationConfig
    num_choices: int
    """Texts of each prompt."""
    seed: int | None
    priority: int
    is_streamed: bool
    includes_usage: bool
    """Whether a stream ends with its usage."""
    prompts: list[str | list[int]] = dataclasses.field(default_factory=list)
    """Of ``/v1/completions``."""
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    """Of ``/v1/chat/completions``."""
    has_max_tokens: bool = True
    """False: as many as there is room for."""


class _Fields:
    """The fields of an object, taken one by one; what is left over is unknown."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        # Null is what clients send for a field that they do not mean.
        self.values = {name: value for name, value in body.items() if value is not None}
        self.known: set[str] = set(_IDLE) | set(_UNSUPPORTED)

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """The value of a field.

        Raises:
            ApiError: It is of another type.
        """
        self.known.add(name)
        value = self.values.get(name)
        if value is None:
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise _refuse(name, f"{name}={_show(value)}: must be {_KINDS[kind]}")
        if isinstance(value, str):
            _check_text(name, value)
        return value

    def take_raw(self, name: str) -> Any:
        """The value of a field, whatever it is."""
        self.known.add(name)
        return self.values.get(name)

    def finish(self) -> None:
        """Refuses what was not taken.

        Raises:
            ApiError: A field is unknown, or asks for what cannot be done.
        """
        for name, value in self.values.items():
            if name not in self.known:
                raise _refuse(name, f"{name}: is no field of this request{self._suggest(name)}")
            if name in _UNSUPPORTED and value not in _UNSUPPORTED[name]:
                more = _INSTEAD.get(name, "; leave it out")
                raise _refuse(
                    name, f"{name}={_show(value)}: is not supported here{more}", "unsupported"
                )

    def _suggest(self, name: str) -> str:
        return suggest(name, sorted(self.known))


def read_completion(body: Any, *, max_choices: int) -> TextRequest:
    """A body of ``/v1/completions``.

    Args:
        body: As JSON gave it.
        max_choices: Texts that may be asked for.

    Raises:
        ApiError: A field is missing, unknown, or has a wrong value.
    """
    fields = _Fields(_require_object(body))
    prompt = fields.take_raw("prompt")
    logprobs = fields.take("logprobs", int)
    best_of = fields.take("best_of", int)
    request = _read_common(fields, max_tokens=fields.take("max_tokens", int, 16), logprobs=logprobs)
    request.prompts = _read_prompts(prompt)
    if best_of not in (None, request.num_choices):
        raise _refuse(
            "best_of", f"best_of={best_of}: is not supported beyond n={request.num_choices}"
        )
    _limit_choices(request, len(request.prompts), max_choices)
    return request


def read_chat(body: Any, *, max_choices: int) -> TextRequest:
    """A body of ``/v1/chat/completions``; the arguments and errors are those of :func:`read_completion`."""
    fields = _Fields(_require_object(body))
    messages = fields.take_raw("messages")
    both = [fields.take(name, int) for name in ("max_completion_tokens", "max_tokens")]
    if None not in both and both[0] != both[1]:
        raise _refuse("max_tokens", f"max_tokens={both[1]}: max_completion_tokens={both[0]}, too")
    max_tokens = both[1] if both[0] is None else both[0]
    has_logprobs, count = fields.take("logprobs", bool, False), fields.take("top_logprobs", int)
    if count is not None and not has_logprobs:
        raise _refuse("top_logprobs", f"top_logprobs={count}: has no effect without logprobs=true")
    logprobs = (count or 0) if has_logprobs else None
    request = _read_common(
        fields, max_tokens=1 if max_tokens is None else max_tokens, logprobs=logprobs
    )
    request.messages, request.has_max_tokens = _read_messages(messages), max_tokens is not None
    _limit_choices(request, 1, max_choices)
    return request


def _read_common(fields: _Fields, *, max_tokens: int, logprobs: int | None) -> TextRequest:
    model = fields.take("model", str)
    temperature = fields.take("temperature", float, 1.0)
    filters = {
        "top_k": fields.take("top_k", int),
        "top_p": fields.take("top_p", float, 1.0),
        "min_p": fields.take("min_p", float, 0.0),
    }
    config = GenerationConfig(
        max_tokens=max_tokens,
        repetition_penalty=fields.take("repetition_penalty", float, 1.0),
        temperature=temperature,
        stop=_read_stop(fields.take_raw("stop")),
        ignore_eos=fields.take("ignore_eos", bool, False),
        logprobs=logprobs,
        seed=fields.take("seed", int),
        **filters,
    )
    num_choices, priority = fields.take("n", int, 1), fields.take("priority", int, 0)
    is_streamed = fields.take("stream", bool, False)
    options = fields.take_raw("stream_options")
    fields.finish()
    if model is None:
        raise _refuse("model", "model: is missing; /v1/models names the one that is served")
    if options is not None and not is_streamed:
        raise _refuse("stream_options", "stream_options: has no effect without stream=true")
    _check_values(config, num_choices, priority)
    if temperature == 0:  # clients send the others along, which then mean nothing
        config = dataclasses.replace(config, top_k=None, top_p=1.0, min_p=0.0)
    return TextRequest(
        model=model,
        config=dataclasses.replace(config, seed=None),
        num_choices=num_choices,
        seed=config.seed,
        priority=priority,
        is_streamed=is_streamed,
        includes_usage=_read_stream_options(options),
    )


def _check_values(config: GenerationConfig, num_choices: int, priority: int) -> None:
    # At a temperature of zero the other filters are idle, but must still be numbers that mean something.
    warm = dataclasses.replace(config, temperature=config.temperature or 1.0)
    for fault in warm.check():
        raise _refuse(fault.partition("=")[0].partition(":")[0], fault)
    if config.logprobs is not None and config.logprobs > _MOST_LIKELIEST:
        raise _refuse("logprobs", f"logprobs={config.logprobs}: at most {_MOST_LIKELIEST}")
    if num_choices < 1:
        raise _refuse("n", f"n={num_choices}: must be at least 1")
    if abs(priority) > HIGHEST_PRIORITY:
        limits = f"must lie between -{HIGHEST_PRIORITY} and {HIGHEST_PRIORITY}"
        raise _refuse("priority", f"priority={priority}: {limits}")


def _limit_choices(request: TextRequest, num_prompts: int, most: int) -> None:
    count = request.num_choices * num_prompts
    if count > most:
        raise _refuse("n", f"n={request.num_choices}: {count} texts in one request, at most {most}")


def _read_stream_options(value: Any) -> bool:
    if value is None:
        return False
    options = _Fields(_require_object(value, "stream_options"))
    options.known = {"include_obfuscation"}  # which there is none of
    includes_usage: bool = options.take("include_usage", bool, False)
    options.finish()
    return includes_usage


def _read_stop(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if strings is None:
        return []
    if not isinstance(strings, list) or not all(isinstance(it, str) for it in strings):
        raise _refuse("stop", f"stop={_show(value)}: must be a text or a list of texts")
    if len(strings) > 16:
        raise _refuse("stop", f"stop: has {len(strings)} texts, at most 16")
    for each in strings:
        _check_text("stop", each)
    return strings


def _read_prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or _is_token_list(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise _refuse(
            "prompt",
            f"prompt={_show(value)}: must be a text, a list of texts, or token ids as a list or lists",
        )
    for each in value:
        if isinstance(each, str):
            _check_text("prompt", each)
        elif not _is_token_list(each):
            raise _refuse("prompt", f"prompt: {_show(each)} is neither a text nor token ids")
    return list(value)


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(it) is int for it in value)


def _read_messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise _refuse("messages", f"messages={_show(value)}: must be a list of messages")
    return [_read_message(each, f"messages[{number}]") for number, each in enumerate(value)]


def _read_message(value: Any, place: str) -> dict[str, str]:
    message = _require_object(value, place)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        near = suggest(role, sorted(_ROLES)) if isinstance(role, str) else ""
        raise _refuse(
            f"{place}.role",
            f"{place}.role={_show(role)}: must be one of {', '.join(sorted(_ROLES))}{near}",
        )
    for name, entry in message.items():
        if name in ("role", "content") or entry in (None, []):
            continue
        if name not in _IDLE_IN_MESSAGE:
            raise _refuse(f"{place}.{name}", f"{place}.{name}: is no field of a message")
        if name != "name":
            raise _refuse(f"{place}.{name}", f"{place}.{name}: is not supported here")
    return {"role": _ROLES[role], "content": _read_content(message.get("content"), place)}


def _read_content(value: Any, place: str) -> str:
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    texts = []
    for part in parts if isinstance(parts, list) and parts else [None]:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise _refuse(
                f"{place}.content",
                f"{place}.content={_show(value)}: must be a text, or parts of text",
            )
        texts.append(part["text"])
    text = "".join(texts)
    _check_text(f"{place}.content", text)
    return text


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refuse(
            name, f"{name}: is no text: half a character at place {error.start}"
        ) from error


def _require_object(value: Any, name: str = "the body") -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(name, f"{name}: must be a JSON object, this is {_show(value)}")
    return value


def _refuse(name: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=name, code=code)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
