"""What a record or a component accepts, found without importing the component if possible.

The schema of ``pkg.Class`` is the dataclass ``ClassConfig`` in the module ``config`` of the package
that the target names, or else of the package where the class is defined. Only without one is the
class imported and its constructor asked.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from nemo_like.core.errors import suggest

ALLOWED_TARGETS = ("nemo_like.", "torch.optim.", "lightning.pytorch.")
"""Packages whose classes a configuration may name; ``allow_targets`` of the run adds to them."""

REQUIRED: Any = object()
"""In place of a default: the value must be given."""


class TargetError(ValueError):
    """A ``_target_`` that names no class that may be built."""


@dataclass(frozen=True)
class Field:
    """One key of a schema."""

    annotation: Any
    """Its type."""
    make_default: Any = REQUIRED
    """Called without arguments for the default, or ``REQUIRED``."""


@dataclass(frozen=True)
class Schema:
    """The keys of a record or component."""

    fields: Mapping[str, Field]
    config_class: type | None
    """The dataclass that says what values make sense; a subclass may add fields to its own."""


@functools.cache
def schema_of_dataclass(cls: type) -> Schema:
    """The fields of a dataclass."""
    hints = typing.get_type_hints(cls)
    fields = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            make_default: Any = field.default_factory
        elif field.default is not dataclasses.MISSING:
            make_default = functools.partial(_identity, field.default)
        else:
            make_default = REQUIRED
        fields[field.name] = Field(hints[field.name], make_default)
    return Schema(fields, cls)


def _identity(value: Any) -> Any:
    return value


def check_allowed(target: str, allow: Iterable[str]) -> None:
    """Refuses a target outside the allow-list.

    Raises:
        TargetError: No package of ``allow`` holds it.
    """
    if "." not in target:
        raise TargetError("must be the dotted path of a class: package.Class")
    prefixes = [prefix.rstrip(".") + "." for prefix in allow]
    if not any(target.startswith(prefix) for prefix in prefixes):
        package = target.partition(".")[0]
        raise TargetError(
            f"outside of what may be built ({', '.join(prefixes)}); if you trust {package}, "
            f"add to the run: allow_targets: [{package}.]"
        )


@functools.cache
def schema_of_target(target: str) -> Schema:
    """What the class named by a dotted path accepts. The caller has checked the allow-list.

    Raises:
        TargetError: No such module or class.
    """
    module, _, name = target.rpartition(".")
    origin_module, origin_name = _find_definition(module, name)
    for package in (module, origin_module):
        config_class = _find_config_class(package, origin_name)
        if config_class is not None:
            return schema_of_dataclass(config_class)
    return _schema_of_constructor(load_class(target))


def load_class(target: str) -> type:
    """Imports a class.

    Raises:
        TargetError: It cannot be imported, or is no class.
    """
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TargetError(f"cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise TargetError(f"is a {type(found).__name__}, not a class: only classes can be built")
    return found


@functools.cache
def find_module(name: str) -> ModuleSpec | None:
    """Finds a module on the path as an import would, without running any of its parents."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ValueError, ImportError):  # __main__, and modules made at run time, have no spec
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


@dataclass(frozen=True)
class _Names:
    """What a module defines, read from its source."""

    defined: frozenset[str]
    imported: Mapping[str, tuple[str, str]]
    """Name -> (module, name there)."""
    is_complete: bool
    """Whether a name that is not listed cannot exist."""


@functools.cache
def _read_names(module: str) -> _Names | None:
    """None where there is no source to read."""
    spec = find_module(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    defined: set[str] = set()
    imported: dict[str, tuple[str, str]] = {}
    is_complete = True
    try:
        body = ast.parse(Path(spec.origin).read_text(encoding="utf-8"), spec.origin).body
    except SyntaxError as error:
        raise TargetError(f"cannot be read: {error}") from error
    for node in _walk_statements(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
            is_complete &= node.name != "__getattr__"
        elif isinstance(node, ast.Assign):
            targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
            defined |= targets
            if "__getattr__" in targets:
                table = _lazy_names(node.value, package)
                is_complete &= bool(table)
                imported |= table
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            is_complete &= all(alias.name != "*" for alias in node.names)
            imported |= {alias.asname or alias.name: (base, alias.name) for alias in node.names}
    return _Names(frozenset(defined), imported, is_complete)


def _walk_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at module level, looking into ``if`` and ``try``."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                yield from _walk_statements(getattr(node, part, ()))


def _lazy_names(call: ast.expr, package: str) -> dict[str, tuple[str, str]]:
    """The table in ``__getattr__ = lazy_names(__name__, {"AdamW": ".adamw"})``."""
    if not (
        isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "lazy_names"
        and len(call.args) == 2
    ):
        return {}
    try:
        table = ast.literal_eval(call.args[1])
    except ValueError:
        return {}
    return {
        name: (importlib.util.resolve_name(module, package), name) for name, module in table.items()
    }


def _find_definition(module: str, name: str) -> tuple[str, str]:
    """Follows imports through packages to the module that defines a name.

    Raises:
        TargetError: There is certainly no such module or name.
    """
    names = _read_names(module)
    if names is None:
        if find_module(module) is None and module not in sys.modules:
            raise TargetError(_no_module(module))
        return module, name
    if name in names.imported:
        return _find_definition(*names.imported[name])
    is_made_at_run_time = name in vars(sys.modules.get(module, object))
    if name not in names.defined and names.is_complete and not is_made_at_run_time:
        if find_module(f"{module}.{name}") is not None:
            raise TargetError("is a module, not a class")
        classes = [known for known in {*names.defined, *names.imported} if known[:1].isupper()]
        raise TargetError(f"no class {name!r} in {module}{suggest(name, classes)}")
    return module, name


def _no_module(module: str) -> str:
    """Says which part of a module path is wrong."""
    known, rest = "", module
    while rest:
        head, _, rest = rest.partition(".")
        path = f"{known}.{head}" if known else head
        spec = find_module(path)
        if spec is None:
            break
        known = path
    if not known:
        return f"no module {head!r}: install it, or put its folder on PYTHONPATH"
    parent = find_module(known)
    locations = parent.submodule_search_locations if parent is not None else None
    siblings = (
        [info.name for info in pkgutil.iter_modules(locations)] if locations is not None else []
    )
    return f"no module {head!r} in {known}{suggest(head, siblings)}"


def _find_config_class(module: str, name: str) -> type | None:
    """The dataclass ``<name>Config`` in the module ``config`` of a module's package."""
    spec = find_module(module)
    if spec is None:
        return None
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    names = _read_names(f"{package}.config")
    if names is None or f"{name}Config" not in {*names.defined, *names.imported}:
        return None
    found = getattr(importlib.import_module(f"{package}.config"), f"{name}Config")
    return found if dataclasses.is_dataclass(found) and isinstance(found, type) else None


def _schema_of_constructor(cls: type) -> Schema:
    """Parameters of ``cls(...)``; ``**kwargs`` goes on with the next class of the MRO."""
    fields: dict[str, Field] = {}
    for owner in cls.__mro__[:-1]:
        config_class = _find_config_class(owner.__module__, owner.__name__)
        if config_class is not None:
            return Schema({**schema_of_dataclass(config_class).fields, **fields}, config_class)
        if "__init__" not in vars(owner):
            continue
        init = vars(owner)["__init__"]
        try:
            hints = typing.get_type_hints(init)
        except (NameError, TypeError):  # names that exist for type checkers only
            hints = {}
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                given = parameter.default is not parameter.empty
                make_default = (
                    functools.partial(_identity, parameter.default) if given else REQUIRED
                )
                fields.setdefault(
                    parameter.name, Field(hints.get(parameter.name, Any), make_default)
                )
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return Schema(fields, None)
