"""A conversation as the tokens that a model continues."""

from __future__ import annotations

import json
import logging
from typing import Any

from nemo_like.core.errors import MissingExtraError
from nemo_like.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PLAIN = "plain"
_SPEAKERS = {"system": "", "user": "User: ", "assistant": "Assistant: "}


class Conversation:
    """What was said so far.

    Args:
        tokenizer: Of the model.
        template: ``plain`` writes ``User:`` and ``Assistant:`` for models that know no chat format; a name or a Jinja
            file as fine-tuning takes it; None is the tokenizer's own template, or ``plain`` where it has none or
            transformers, which reads templates, is not installed.
        system: What stands before everything.

    Raises:
        ConfigError: There is no such template.
        MissingExtraError: A template was asked for, and transformers is not installed.

    Attributes:
        messages: ``role`` and ``content`` of each turn.
        template_name: Which template is used.
        stop: Strings that end an answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, template: str | None = None, system: str | None = None
    ) -> None:
        self._tokenizer, self._system = tokenizer, system
        self._template: Any = None
        if template is None:
            template = "the tokenizer's own" if _has_template(tokenizer) else PLAIN
            if template != PLAIN:
                try:
                    self._template = _open(tokenizer, None)
                except MissingExtraError as error:
                    logger.warning("the chat template of the model is not used: %s", error)
                    template = PLAIN
        elif template != PLAIN:
            self._template = _open(tokenizer, template)
        self.template_name = template
        self.stop = ["\nUser:"] if self._template is None else []
        self.messages: list[dict[str, str]] = []
        self.reset()

    @property
    def end_tokens(self) -> list[int]:
        """The token that ends an answer, where the template has one."""
        return [] if self._template is None else [self._template.end_id]

    def reset(self) -> None:
        """Forgets everything but the system's message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, role: str, content: str) -> None:
        """Adds a turn."""
        self.messages.append({"role": role, "content": content})

    def encode(self) -> list[int]:
        """Token ids up to where the assistant begins to speak."""
        if self._template is not None:
            ids: list[int] = self._template.encode_prompt(self.messages)
            return ids
        lines = [f"{_SPEAKERS[it['role']]}{it['content']}\n" for it in self.messages]
        return [self._tokenizer.prefix_id, *self._tokenizer.encode("".join(lines) + "Assistant:")]


def _has_template(tokenizer: Tokenizer) -> bool:
    files = tokenizer.to_bytes()
    config = json.loads(files["tokenizer_config.json"])
    return "chat_template.jinja" in files or bool(config.get("chat_template"))


def _open(tokenizer: Tokenizer, name: str | None) -> Any:
    from ..finetune.chat import open_chat_template

    return open_chat_template(tokenizer, name)
