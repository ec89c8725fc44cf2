"""The one place where a ``_target_`` becomes an object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_like.core.check import Checker
from nemo_like.core.config import Component
from nemo_like.core.errors import ConfigError, NemoLikeError
from nemo_like.core.layers import Source, Tree
from nemo_like.core.schema import ALLOWED_TARGETS, TargetError, check_allowed, load_class


def build(node: Mapping[str, Any], *, path: str = "component", allow: Sequence[str] = ()) -> Any:
    """Makes the object that a component describes; components inside of it come first.

    Args:
        node: A mapping with ``_target_``, the dotted path of a class, and keyword arguments of it.
            Where the schema asks for a dataclass, a mapping becomes one.
        path: Key path of the component, for messages.
        allow: Packages whose classes may be built, besides ``ALLOWED_TARGETS``. A class of another
            package that is merely imported there is refused.

    Raises:
        ConfigError: The component does not fit its schema, or the constructor refuses a value.
    """
    allow = (*ALLOWED_TARGETS, *allow)
    checker = Checker(Tree({path: dict(node)}, {(): Source("build()")}), allow=allow)
    checked = checker.check(dict[str, Component])
    if checker.faults:
        raise ConfigError(checker.faults)
    return _construct(checked[path], path, allow)


def _construct(value: Any, path: str, allow: Sequence[str]) -> Any:
    if isinstance(value, dict):
        built = {key: _construct(item, f"{path}.{key}", allow) for key, item in value.items()}
        return _instantiate(built, path, allow) if isinstance(value, Component) else built
    if isinstance(value, list | tuple):
        return type(value)(_construct(item, f"{path}[{i}]", allow) for i, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        after = {name: _construct(item, f"{path}.{name}", allow) for name, item in before.items()}
        return (
            dataclasses.replace(value, **after)
            if any(after[n] is not before[n] for n in before)
            else value
        )
    return value


def _instantiate(component: dict[str, Any], path: str, allow: Sequence[str]) -> Any:
    target = component.pop("_target_")
    try:
        cls = load_class(target)
        check_allowed(f"{cls.__module__}.{cls.__qualname__}", allow)
    except TargetError as error:
        raise ConfigError([f"{path}._target_={target!r}: {error}"]) from error
    try:
        return cls(**component)
    except NemoLikeError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError([f"{path}: {target}: {error}"]) from error
