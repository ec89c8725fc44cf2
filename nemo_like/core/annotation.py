"""What the annotations of a schema let stand in a configuration file."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nemo_like.core.config import Component
from nemo_like.core.interpolation import BROKEN

_SCALARS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


class Wanted:
    """One annotation, taken apart into the alternatives of its union.

    A type that a file has no word for (a tensor, a callable) lets anything pass: its class will judge.
    """

    def __init__(self, annotation: Any) -> None:
        self.members = tuple(_members(annotation))
        self.is_open = any(not _is_known(member) for member in self.members)
        self.takes_list = self.is_open or any(map(_is_list, self.members))
        self.takes_mapping = self.is_open or any(map(_is_mapping, self.members))
        is_free = self.takes_mapping and self.value is Any
        self.takes_component = self.is_open or self.has(Component) or is_free
        self.is_tuple = any(typing.get_origin(member) is tuple for member in self.members)

    def has(self, kind: Any) -> bool:
        """Whether a type is one of the alternatives."""
        return kind in self.members

    @property
    def literals(self) -> list[Any]:
        """Values that may be chosen."""
        found = [member for member in self.members if typing.get_origin(member) is Literal]
        return [value for member in found for value in typing.get_args(member)]

    @property
    def record(self) -> type | None:
        """The dataclass that a mapping becomes."""
        classes = (member for member in self.members if isinstance(member, type))
        return next((cls for cls in classes if dataclasses.is_dataclass(cls)), None)

    @property
    def length(self) -> int | None:
        """How long a list must be; None for any length."""
        args = [typing.get_args(it) for it in self.members if typing.get_origin(it) is tuple]
        return next((len(it) for it in args if Ellipsis not in it), None)

    @property
    def item(self) -> Any:
        """Annotation of what stands in a list."""
        args = [typing.get_args(member) for member in self.members if _is_list(member)]
        return next((it[0] for it in args if it), Any)

    @property
    def value(self) -> Any:
        """Annotation of what stands in a mapping."""
        args = [typing.get_args(member) for member in self.members if _is_mapping(member)]
        return next((it[1] for it in args if it), Any)

    def __str__(self) -> str:
        return " or ".join(self._describe(member) for member in self.members)

    def _describe(self, member: Any) -> str:
        if member in _SCALARS:
            return _SCALARS[member]
        if typing.get_origin(member) is Literal:
            return "one of " + ", ".join(map(str, typing.get_args(member)))
        if _is_list(member):
            what = "a list" if self.length is None else f"a list of {self.length}"
            return what if self.item is Any else f"{what} (each {Wanted(self.item)})"
        if dataclasses.is_dataclass(member):
            return f"a mapping with the keys of {getattr(member, '__name__', member)}"
        if member is Component:
            return "a mapping with _target_"
        return "a mapping" if _is_mapping(member) else "a value"


def to_plain(value: Any) -> Any:
    """A default as plain data; ``BROKEN`` for an object that a file has no word for."""
    if type(value) in _SCALARS:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        items = [to_plain(item) for item in value]
        return BROKEN if any(item is BROKEN for item in items) else items
    if isinstance(value, dict):
        mapping = {key: to_plain(item) for key, item in value.items()}
        return BROKEN if any(item is BROKEN for item in mapping.values()) else mapping
    return BROKEN


def _members(annotation: Any) -> list[Any]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return [inner for member in args for inner in _members(member)]
    return _members(args[0]) if origin is typing.Annotated else [annotation]


def _is_list(member: Any) -> bool:
    kinds = (list, tuple, Sequence)
    return member in kinds or typing.get_origin(member) in kinds


def _is_mapping(member: Any) -> bool:
    kinds = (dict, Mapping, Component)
    return member in kinds or typing.get_origin(member) in kinds


def _is_known(member: Any) -> bool:
    is_literal = typing.get_origin(member) is Literal
    is_container = _is_list(member) or _is_mapping(member)
    return member in _SCALARS or is_literal or is_container or dataclasses.is_dataclass(member)
