"""``${trainer.max_steps}``, ``${oc.env:HOME}`` and ``${now:%Y-%m-%d}`` in a configuration."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator
from typing import Any

from nemo_like.core.errors import suggest
from nemo_like.core.launch import agree
from nemo_like.core.layers import KeyPath, find_grammar_fault, format_path


class Broken:
    """In place of a value that cannot be had and has been reported; no rule fails on it."""

    def __repr__(self) -> str:
        return "<broken>"

    def _is_false(self, other: object) -> bool:
        return False

    def _is_broken(self, other: object) -> Broken:
        return self

    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _is_false
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _is_broken
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _is_broken


BROKEN = Broken()


def resolve_interpolations(values: dict[str, Any]) -> list[tuple[KeyPath, str]]:
    """Replaces every interpolation in ``values`` by what it stands for, or by ``BROKEN``.

    What refers to a missing value becomes ``BROKEN`` without a fault of its own.

    Returns:
        Key path and description of each fault.
    """
    found = [(path, text) for path, text in _walk_texts(values, ()) if "${" in text]
    if not found:
        return []
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import (
        InterpolationToMissingValueError,
        OmegaConfBaseException,
    )

    OmegaConf.register_new_resolver("now", _now, replace=True)
    faults: list[tuple[KeyPath, str]] = []
    results: dict[KeyPath, Any] = {}
    for path, text in found:
        fault = find_grammar_fault(text)
        if fault is not None:
            faults.append((path, fault))
            results[path] = BROKEN
            _set(values, path, "???")
    config = OmegaConf.create(values)
    assert isinstance(config, DictConfig)
    for path, _ in found:
        if path in results:
            continue
        try:
            value: Any = config
            for key in path:
                value = value[key]
            results[path] = (
                OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            )
        except InterpolationToMissingValueError:
            results[path] = BROKEN
        except OmegaConfBaseException as error:
            faults.append((path, _describe(error, values)))
            results[path] = BROKEN
    for path, value in results.items():
        _set(values, path, value)
    return faults


def find_references(values: dict[str, Any]) -> dict[str, set[str]]:
    """Which keys each interpolation names."""
    texts = [(format_path(path), text) for path, text in _walk_texts(values, ()) if "${" in text]
    return {key: set(re.findall(r"\$\{([^:{}$]+)\}", text)) for key, text in texts}


def _describe(error: BaseException, values: dict[str, Any]) -> str:
    text = _first_line(error)
    if text.startswith("Recursive"):
        return "refers to itself"
    variable = re.search(r"Environment variable '(.+)' not found", text)
    if variable is not None:
        remedy = f"set it, or write a default: ${{oc.env:{variable[1]},...}}"
        return f"there is no environment variable {variable[1]}; {remedy}"
    text = text.partition("while resolving interpolation: ")[2] or text
    key = re.search(r"Interpolation key '(.+)' not found", text)
    if key is None:
        return text
    keys = [format_path(path) for path in _walk_paths(values, ())]
    return f"there is no key {key[1]!r}{suggest(key[1], keys)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _walk_paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield (*path, key)
        yield from _walk_paths(child, (*path, key))


def _walk_texts(values: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    for inner in _walk_paths(values, path):
        node = values
        for key in inner:
            node = node[key]
        if isinstance(node, str):
            yield inner, node


def _set(values: Any, path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        values = values[key]
    values[path[-1]] = value


@functools.cache
def _start_time() -> time.struct_time:
    pattern = "%Y-%m-%d_%H-%M-%S"
    agreed = os.environ.get("NEMO_LIKE_AGREED_START_TIME") or agree(
        "START_TIME", time.strftime(pattern)
    )
    return time.strptime(agreed, pattern)


def _now(pattern: str) -> str:
    """The time at which the run was started, the same in all of its processes."""
    return time.strftime(pattern, _start_time())
