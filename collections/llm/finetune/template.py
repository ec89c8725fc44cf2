"""Chat templates: conversations as one text, by the template of a tokenizer or by a built-in one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from nemo_like.core.errors import ConfigError
from nemo_like.core.extras import require
from nemo_like.core.paths import resolve
from nemo_like.text.tokenizer import Tokenizer

from .samples import BadSampleError, Message

BUILT_IN = ("chatml", "none")
# The built-in templates in Jinja, so that a checkpoint carries the one that it was trained with. START and END are
# replaced by literals.
_CHATML_SOURCE = """\
{{ START }}{% if tools %}{{ '<|im_start|>system\\n' }}\
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% set messages = messages[1:] %}{% endif %}\
{{ 'Tools, one a line:' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ END + '\\n' }}{% endif %}\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}\
{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\\n' }}{% endif %}\
{{ '<tool_call>\\n' + ((call.function or call) | tojson) + '\\n</tool_call>' }}\
{% endfor %}{{ END + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_PLAIN_SOURCE = """\
{{ START }}{% for message in messages %}{{ message.content }}\
{% if message.role == 'assistant' %}{{ END }}{% endif %}{% endfor %}"""


def _fill(source: str, *, start: str, end: str) -> str:
    return source.replace("START", json.dumps(start)).replace("END", json.dumps(end))


class Template(Protocol):
    """Writes a conversation as one text, special tokens by their names."""

    source: str | None
    """The template in Jinja; None is the one that the tokenizer brings."""

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, *, asks_for_answer: bool
    ) -> str:
        """The text; with ``asks_for_answer`` it ends where the assistant begins to speak.

        Raises:
            BadSampleError: The template refuses the conversation.
        """
        ...


class ChatML:
    """``<|im_start|>role``, a line end, the content, ``<|im_end|>``, a line end.

    Where the vocabulary has no such tokens, the beginning of a message is written as plain text, and the end of text
    ends every message, so that a pre-trained model needs no new rows in its embedding.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.backend.get_vocab()
        is_native = all(name in vocabulary for name in ("<|im_start|>", "<|im_end|>"))
        self.end = "<|im_end|>" if is_native else tokenizer.eos_token
        self.start = tokenizer.bos_token or ("" if is_native else tokenizer.eos_token)
        self.source: str | None = _fill(_CHATML_SOURCE, start=self.start, end=self.end)

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, *, asks_for_answer: bool
    ) -> str:
        """The text."""
        parts = [self.start]
        if tools:
            listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            head = f"Tools, one a line:\n{listed}"
            if messages and messages[0]["role"] == "system":
                head = f"{messages[0]['content']}\n\n{head}"
                messages = messages[1:]
            parts.append(self._write("system", head))
        for message in messages:
            calls = [
                f"<tool_call>\n{json.dumps(call.get('function', call), ensure_ascii=False)}\n</tool_call>"
                for call in message.get("tool_calls", ())
            ]
            content = "\n".join([message["content"], *calls] if message["content"] else calls)
            parts.append(self._write(message["role"], content))
        if asks_for_answer:
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)

    def _write(self, role: str, content: str) -> str:
        return f"<|im_start|>{role}\n{content}{self.end}\n"


class PlainText:
    """The contents of the messages as they are, with an end of text behind each answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.end = tokenizer.eos_token
        self.start = tokenizer.bos_token or tokenizer.eos_token
        self.source: str | None = _fill(_PLAIN_SOURCE, start=self.start, end=self.end)

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, *, asks_for_answer: bool
    ) -> str:
        """The text."""
        if tools or any("tool_calls" in message for message in messages):
            raise BadSampleError("chat_template=none has no place for tools and calls of them")
        ends = {"assistant": self.end}
        texts = (it["content"] + ends.get(it["role"], "") for it in messages)
        return self.start + "".join(texts)


class JinjaTemplate:
    """A template in Jinja, run by transformers.

    Args:
        tokenizer: Its own template is taken, and its special tokens are known to any template.
        source: Text of another template.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        transformers = require("transformers")
        files = tokenizer.to_bytes()
        config = json.loads(files["tokenizer_config.json"])
        # The class that runs tokenizer.json as it is; others may build a tokenizer of their own from it.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        for name in ("auto_map", "fix_mistral_regex"):
            config.pop(name, None)
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
            self._tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
                folder, local_files_only=True
            )
        self.source = source

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, *, asks_for_answer: bool
    ) -> str:
        """The text."""
        jinja2 = require("jinja2")
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=asks_for_answer,
            )
        except jinja2.exceptions.TemplateError as error:
            raise BadSampleError(f"the chat template refuses it: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            # Its code runs over the record: what does not fit fails in it as in any code.
            kind = type(error).__name__
            raise BadSampleError(f"the chat template fails on it: {kind}: {error}") from error
        return text


def has_template(tokenizer: Tokenizer) -> bool:
    """Whether the files of a tokenizer bring a chat template."""
    files = tokenizer.to_bytes()
    config = json.loads(files["tokenizer_config.json"])
    return "chat_template.jinja" in files or bool(config.get("chat_template"))


def choose_template(tokenizer: Tokenizer, name: str | None) -> tuple[Template, str, str]:
    """The template that a configuration means, its name, and what decides about its texts, for a cache key.

    Args:
        tokenizer: Of the model.
        name: As ``chat_template`` of the configuration.

    Raises:
        ConfigError: It is neither built in nor a file.
        MissingExtraError: A Jinja template needs transformers.
    """
    if name is None and has_template(tokenizer):
        files = tokenizer.to_bytes()
        own = files.get("chat_template.jinja", b"") + files["tokenizer_config.json"]
        return JinjaTemplate(tokenizer), "of the tokenizer", own.decode()
    if name == "none":
        return PlainText(tokenizer), "none", "none"
    if name in (None, "chatml"):
        chatml = ChatML(tokenizer)
        return chatml, "chatml", f"chatml {chatml.end}"
    assert name is not None
    found = resolve(name)[0]
    if not found.is_file():
        raise ConfigError(
            [
                f"chat_template={name}: must be {', '.join(BUILT_IN)}, or a file with a Jinja template"
            ]
        )
    source = found.read_text(encoding="utf-8")
    return JinjaTemplate(tokenizer, source), name, source
