"""Stop strings in a text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, and never a part of one.

    Args:
        strings: Not empty each; none at all lets everything through at once.

    Attributes:
        found: The string that ended the text, or None.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = list(strings)
        self.found: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """Takes the next piece.

        Returns:
            What can be shown: all but a tail that may become a stop string. Nothing once one was found.
        """
        if self.found is not None:
            return ""
        if not self.strings:
            return text
        text = self._held + text
        hits = [(at, it) for it in self.strings if (at := text.find(it)) >= 0]
        if hits:
            at, self.found = min(hits)
            self._held = ""
            return text[:at]
        held = self._count_held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        text, self._held = self._held, ""
        return text

    def _count_held(self, text: str) -> int:
        """Length of the longest tail that some stop string begins with."""
        longest = min(len(text), max(map(len, self.strings)) - 1)
        for count in range(longest, 0, -1):
            if any(it.startswith(text[-count:]) for it in self.strings):
                return count
        return 0
