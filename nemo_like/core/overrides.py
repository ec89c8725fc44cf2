"""Overrides on a command line: ``a.b=c``, ``+a.b=c``, ``++a.b=c``, ``~a.b``, ``strategy=ddp``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nemo_like.core.layers import Source, parse_plain

_OVERRIDE = re.compile(r"(?P<prefix>\+\+|\+|~)?(?P<key>[^=]+)(?P<rest>=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """One override, taken apart."""

    line: str
    prefix: str
    """``""``, ``+``, ``++`` or ``~``."""
    key: str
    text: str | None
    """What stands behind the first ``=``; None without one."""

    @property
    def group(self) -> str:
        """The group that it chooses from, if it is a choice."""
        return self.key.partition("@")[0]

    @property
    def names(self) -> list[str]:
        """Keys from the top; ``a[0].b`` is the same as ``a.0.b``."""
        return _split(self.key)

    @property
    def source(self) -> Source:
        """Where its value comes from."""
        text = self.text.strip() if self.text is not None else None
        return Source(
            f"override {self.line!r}", None if is_structured(text or "") else text, is_override=True
        )


def _split(key: str) -> list[str]:
    return key.replace("[", ".").replace("]", "").split(".")


def is_structured(text: str) -> bool:
    """Whether a value is quoted text, a list or a mapping."""
    return text.lstrip()[:1] in ("'", '"', "[", "{")


def parse_override(line: str) -> Override:
    """Takes an override apart.

    Raises:
        ValueError: It is none.
    """
    match = _OVERRIDE.fullmatch(line)
    if match is None:
        raise ValueError("is no override: write key=value, +key=value or ~key")
    prefix, text = match["prefix"] or "", match["value"]
    if match["rest"] is None and prefix != "~":
        raise ValueError(
            f"has no value: write {match['key']}=<value>, or ~{match['key']} to delete"
        )
    if match["rest"] is not None and prefix == "~":
        raise ValueError(f"deletes and takes no value: write ~{match['key']}")
    if not all(_split(match["key"])):
        raise ValueError(f"has an empty part in its key {match['key']!r}")
    return Override(line, prefix, match["key"], text)


def parse_value(text: str) -> Any:
    """The value of an override.

    Unquoted text is taken to the end of the argument, so ``a=b=c`` is ``b=c``; quotes, lists and
    mappings follow Hydra's grammar.

    Raises:
        ValueError: Quotes or brackets do not match.
    """
    if not is_structured(text):
        return parse_plain(text)
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return _strip_quotes(OverridesParser.create().parse_override(f"value={text}").value())
    except HydraException as error:
        problem = str(error).partition("\n")[0]
        raise ValueError(f"the value {text!r} cannot be read: {problem}") from error


def _strip_quotes(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _strip_quotes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strip_quotes(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ValueError(f"{value} is a sweep or a function: give the value itself")
