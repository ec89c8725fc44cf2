"""Tokens to text while they arrive: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.text.tokenizer import Tokenizer

from .stop import StopStrings

REPLACEMENT = "\ufffd"  # what decoding makes of bytes that are no UTF-8
_CONTEXT = 6
"""Tokens of the prompt that are decoded along, since some decoders drop a space at the start."""
_LONGEST_CHARACTER = 16
"""Tokens that may wait for the rest of a character; bytes that never become one do not wait longer."""


class TextStream:
    """The text of a request's tokens, in pieces whose concatenation is the text.

    Args:
        tokenizer: Special tokens have no text.
        prompt: Token ids that come before, whose text is not given.
        stop: Strings before which the text ends.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = StopStrings(stop)
        self._prefix = list(prompt[-_CONTEXT:])
        self._prefix_text = tokenizer.decode(self._prefix)
        if self._prefix_text.endswith(REPLACEMENT):
            self._prefix, self._prefix_text = [], ""
        self._waiting: list[int] = []

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Takes the next token; gives what can be shown, often nothing."""
        self._waiting.append(token)
        text = self._tokenizer.decode([*self._prefix, *self._waiting])
        if text.endswith(REPLACEMENT) and len(self._waiting) < _LONGEST_CHARACTER:
            return ""
        new = text[len(self._prefix_text) :]
        if new:  # a special token has no text, and what follows must still be decoded behind some
            self._prefix = self._waiting
            self._prefix_text = self._tokenizer.decode(self._prefix)
        self._waiting = []
        return self._stops.push(new)

    def finish(self) -> str:
        """What was held back, without a character that was cut."""
        text = self._tokenizer.decode([*self._prefix, *self._waiting])[len(self._prefix_text) :]
        self._waiting = []
        shown = self._stops.push(text.rstrip(REPLACEMENT))
        return shown + self._stops.finish()
