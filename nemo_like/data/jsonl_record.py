"""One line of a corpus: from bytes to a text and its metadata, or to a fault that says what is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

FaultKind = Literal[
    "json", "utf8", "nul", "record", "text", "too_long", "damage", "sample", "template"
]

JSON_SPACE = b" \t\r\n"
BOM = b"\xef\xbb\xbf"
ROUNDED_FROM = 2**63  # orjson gives a float for integers outside of -2**63 ... 2**64 - 1
HALF_OF_A_PAIR = re.compile(r"[\ud800-\udfff]")
JSON_NAMES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    type(None): "null",
}


class BadLineError(ValueError):
    """A line that is not a document.

    Args:
        kind: Under which it is counted.
        message: What is wrong, with offsets in the line.
    """

    def __init__(self, kind: FaultKind, message: str) -> None:
        self.kind, self.message = kind, message
        super().__init__(message)


def parse_line(line: bytes | memoryview) -> tuple[str, dict[str, Any]] | None:
    """Reads a line.

    A document is an object with ``text`` (a string, or a list of paragraphs, which are joined by an empty line), or
    a bare string. Its metadata are the object ``meta`` and all further keys of the line; where both have a key, the
    one in ``meta`` counts. A ``meta`` that is no object is kept under the key ``meta``. Of a key that stands twice in
    one object the last counts, as everywhere in Python. Integers are exact, whatever their size.

    Args:
        line: Without its line feed.

    Returns:
        Text and metadata; None for a blank line.

    Raises:
        BadLineError: The line is something else.
    """
    import orjson

    try:
        record = orjson.loads(line)
    except ValueError:
        line = bytes(line)
        if not line.strip(JSON_SPACE):
            return None
        record = _parse_exactly(line)
    if type(record) is str:
        return record, {}
    text = _take_text(record)
    if _holds_rounded_integer(record.values()):
        record = _parse_exactly(bytes(line))
        del record["text"]
    meta = record.pop("meta", None)
    if meta is None:
        return text, record
    if type(meta) is not dict:
        meta = {"meta": meta}
    return text, {**record, **meta} if record else meta


def parse_object(line: bytes | memoryview) -> tuple[str, dict[str, Any]] | None:
    """Reads a line that holds an object of any keys.

    Args:
        line: Without its line feed.

    Returns:
        An empty text, and the object; None for a blank line. Integers are exact, whatever their size.

    Raises:
        BadLineError: The line is something else.
    """
    import orjson

    try:
        record = orjson.loads(line)
    except ValueError:
        line = bytes(line)
        if not line.strip(JSON_SPACE):
            return None
        record = _parse_exactly(line)
    if type(record) is not dict:
        found = JSON_NAMES.get(type(record), "a number")
        raise BadLineError("record", f"a line must be an object, this is {found}")
    if _holds_rounded_integer(record.values()):
        record = _parse_exactly(bytes(line))
    return "", record


def _take_text(record: Any) -> str:
    if type(record) is not dict:
        found = JSON_NAMES.get(type(record), "a number")
        raise BadLineError("record", f"a line must be an object or a string, this is {found}")
    try:
        text = record.pop("text")
    except KeyError:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise BadLineError("text", f"the key 'text' is missing; there are: {keys}") from None
    if type(text) is str:
        return text
    if type(text) is list and all(type(paragraph) is str for paragraph in text):
        return "\n\n".join(text)
    found = (
        "a list of other things" if type(text) is list else JSON_NAMES.get(type(text), "a number")
    )
    raise BadLineError("text", f"'text' must be a string or a list of strings, this is {found}")


def _holds_rounded_integer(values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is str:
            continue
        if kind is float:
            if value >= ROUNDED_FROM or value <= -ROUNDED_FROM:
                return True
        elif kind is dict:
            if _holds_rounded_integer(value.values()):
                return True
        elif kind is list and _holds_rounded_integer(value):
            return True
    return False


def _parse_exactly(line: bytes) -> Any:
    """Reads a line with the standard library: slower, exact integers, and also NaN and Infinity, which it writes."""
    if nuls := line.count(b"\0"):
        raise BadLineError(
            "nul", f"{nuls} NUL bytes, the first at byte {line.index(0)} of the line"
        )
    try:
        record = json.loads(line.removeprefix(BOM).decode())
    except UnicodeDecodeError as error:
        where = f"byte {error.start} of the line is {line.removeprefix(BOM)[error.start]:#04x}"
        raise BadLineError("utf8", f"no UTF-8: {where} ({error.reason})") from None
    except json.JSONDecodeError as error:
        message = (
            f"no JSON: {error.msg} at character {error.pos} of the line, which begins {line[:40]!r}"
        )
        raise BadLineError("json", message) from None
    except RecursionError:
        raise BadLineError("json", "no JSON that can be read: nested too deeply") from None
    except ValueError as error:  # Python's limit of digits in an integer
        raise BadLineError("json", f"no JSON that can be read: {error}") from None
    if half := HALF_OF_A_PAIR.search(json.dumps(record, ensure_ascii=False)):
        raise BadLineError(
            "utf8", f"the escape \\u{ord(half.group()):x} is half of a surrogate pair, no character"
        )
    return record
