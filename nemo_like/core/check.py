"""Checks a merged configuration against its schema and collects every fault."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_like.core.annotation import Wanted, to_plain
from nemo_like.core.config import Component, RunConfig
from nemo_like.core.errors import suggest
from nemo_like.core.interpolation import BROKEN, find_references, resolve_interpolations
from nemo_like.core.layers import MISSING, KeyPath, Tree, format_path
from nemo_like.core.schema import (
    ALLOWED_TARGETS,
    REQUIRED,
    Field,
    Schema,
    TargetError,
    check_allowed,
    schema_of_dataclass,
    schema_of_target,
)

_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")


class Checker:
    """One pass over a tree: defaults, interpolations, types, ranges.

    Args:
        tree: What files and overrides say. Its values are completed in place.
        allow: Packages whose classes may be named.
        is_partial: Whether layers are missing, so that an absent value is no fault.
        is_template: Whether a value that a file leaves open with ``???`` is no fault.
    """

    def __init__(
        self,
        tree: Tree,
        *,
        allow: Sequence[str] = ALLOWED_TARGETS,
        is_partial: bool = False,
        is_template: bool = False,
    ) -> None:
        self.tree, self.allow = tree, allow
        self.is_partial, self.is_template = is_partial, is_template
        self._faults: list[tuple[KeyPath, str]] = []
        self._references: dict[str, set[str]] = {}
        self._components: list[tuple[KeyPath, Any]] = []

    @property
    def faults(self) -> list[str]:
        """One line each; of a wrong value and those that were taken from it, only the first."""
        wrong = {format_path(path) for path, _ in self._faults}
        # A cycle leads back to each of its members; then no one of them is the cause.
        copied = {
            key
            for key in wrong
            if any(key not in self._reach(it) for it in wrong & self._reach(key))
        }
        told = [line for path, line in self._faults if format_path(path) not in copied]
        return list(dict.fromkeys(told))

    def _reach(self, key: str) -> set[str]:
        """Every key that a value is taken from, over any number of interpolations."""
        found: set[str] = set()
        ahead = [key]
        while ahead:
            new = self._references.get(ahead.pop(), set()) - found
            found |= new
            ahead += new
        return found

    def check(self, root: Any) -> Any:
        """The tree as an instance of ``root``; worth something only if there are no faults.

        Where every value is right by itself, each component whose config has a method ``check_run(run_config)`` is
        asked what does not fit the rest of the run.
        """
        self.tree.values = self._fill(self.tree.values, root, ())
        self._references = find_references(self.tree.values)
        for path, text in resolve_interpolations(self.tree.values):
            if not self.is_partial or not text.startswith("there is no key"):
                self._report(path, text)
        config = self._convert(self.tree.values, root, ())
        # A component by itself has no run that it could contradict.
        if isinstance(config, RunConfig) and not (self._faults or self.is_partial):
            for path, component in self._components:
                own = schema_of_dataclass(component.__class__).fields
                for text in component.check_run(config):
                    is_elsewhere = re.split(r"[.=:]", text)[0] not in own
                    home = () if is_elsewhere and _names_key(text, self.tree.values) else path
                    self._tell(text, home, own if home else schema_of_dataclass(root).fields)
        return config

    def _report(self, path: KeyPath, text: str, value: Any = BROKEN) -> Any:
        shown = "" if value is BROKEN else f"={_show(value)}"
        self._faults.append((path, f"{self.tree.place(path)}: {format_path(path)}{shown}: {text}"))
        return BROKEN

    # First walk: what nobody wrote, and text that was typed without quotes.

    def _fill(self, value: Any, annotation: Any, path: KeyPath) -> Any:
        wanted = Wanted(annotation)
        if isinstance(value, list | tuple):
            return [self._fill(item, wanted.item, (*path, i)) for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return self._fill_scalar(value, wanted, path)
        schema = self._find_schema(value, wanted)
        if schema is None:
            return {key: self._fill(it, wanted.value, (*path, key)) for key, it in value.items()}
        unknown = Field(Any)
        filled = {
            key: self._fill(item, schema.fields.get(key, unknown).annotation, (*path, key))
            for key, item in value.items()
        }
        for name in schema.fields.keys() - filled.keys():
            default = self._make_default(schema.fields[name], (*path, name))
            if default is not BROKEN:
                filled[name] = default
        order = [*schema.fields, *(key for key in filled if key not in schema.fields)]
        if "_target_" in filled:
            order.insert(0, "_target_")
        return {key: filled[key] for key in dict.fromkeys(order) if key in filled}

    def _fill_scalar(self, value: Any, wanted: Wanted, path: KeyPath) -> Any:
        """A value; if it was typed in an override where text is wanted, as it was typed."""
        source = self.tree.sources.get(path)
        if source is None or not source.is_override or source.text is None or value is None:
            return value
        return source.text if wanted.has(str) and not wanted.has(type(value)) else value

    def _make_default(self, field: Field, path: KeyPath) -> Any:
        if field.make_default is not REQUIRED:
            return to_plain(field.make_default())
        wanted = Wanted(field.annotation)
        if wanted.record is None or wanted.has(type(None)):
            return MISSING
        return self._fill({}, wanted.record, path)  # so that the fault is about what it lacks

    def _find_schema(self, value: Mapping[str, Any], wanted: Wanted) -> Schema | None:
        """The schema of a mapping; None for a free one, and for a target that will be reported."""
        if wanted.record is not None:
            return schema_of_dataclass(wanted.record)
        try:
            is_component = "_target_" in value and wanted.takes_component
            return self._schema_of(value["_target_"]) if is_component else None
        except TargetError:
            return None

    def _schema_of(self, target: Any) -> Schema:
        if not isinstance(target, str):
            raise TargetError("must be the dotted path of a class: package.Class")
        check_allowed(target, self.allow)
        return schema_of_target(target)

    # Second walk: is it what it should be?

    def _convert(self, value: Any, annotation: Any, path: KeyPath) -> Any:
        wanted = Wanted(annotation)
        if value is BROKEN:
            return BROKEN
        if isinstance(value, str) and value == MISSING:
            return self._miss(wanted, path)
        if isinstance(value, dict):
            return self._convert_mapping(value, wanted, path)
        if isinstance(value, list):
            return self._convert_list(value, wanted, path)
        return self._convert_scalar(value, wanted, path)

    def _miss(self, wanted: Wanted, path: KeyPath) -> Any:
        is_left_open = path in self.tree.sources
        if self.is_partial or (self.is_template and is_left_open):
            return BROKEN
        if is_left_open:
            return self._report(path, f"is for you to give: {format_path(path)}=<{wanted}>")
        return self._report(path, f"is required: {wanted}")

    def _convert_scalar(self, value: Any, wanted: Wanted, path: KeyPath) -> Any:
        if any(type(value) is type(option) and value == option for option in wanted.literals):
            return value
        source = self.tree.sources.get(path)
        is_plain_in_file = source is not None and source.text == value and not source.is_override
        if is_plain_in_file and wanted.has(str) and _LEADING_ZERO.fullmatch(value):
            hint = f"is a number to most readers of YAML; quote it: '{value}'"
            return self._report(path, hint, value)
        if wanted.has(type(value)) or wanted.is_open:
            return value
        if type(value) is int and wanted.has(float):
            return float(value)
        return self._report(path, f"must be {wanted}{self._hint(value, wanted, path)}", value)

    def _hint(self, value: Any, wanted: Wanted, path: KeyPath) -> str:
        """What to do about a scalar of the wrong type."""
        source = self.tree.sources.get(path)
        if isinstance(value, str):
            if wanted.has(int) and _LEADING_ZERO.fullmatch(value):
                return f", without leading zeros: {int(value)}"
            is_quoted = source is not None and source.text is None
            if is_quoted and any(wanted.has(kind) for kind in (int, float, bool)):
                return " without quotes"
            return suggest(value, map(str, wanted.literals))
        if source is None or source.text is None or "${" in source.text or not wanted.has(str):
            return ""
        quoted = f"'{source.text}'"
        if source.is_override:
            quoted = f'{format_path(path)}="{quoted}"'
        return f"; quote it: {quoted}"

    def _convert_list(self, value: list[Any], wanted: Wanted, path: KeyPath) -> Any:
        if not wanted.takes_list or wanted.length not in (None, len(value)):
            return self._report(path, f"must be {wanted}", value)
        items = [self._convert(item, wanted.item, (*path, i)) for i, item in enumerate(value)]
        if any(item is BROKEN for item in items):
            return BROKEN
        return tuple(items) if wanted.is_tuple else items

    def _convert_mapping(self, value: dict[str, Any], wanted: Wanted, path: KeyPath) -> Any:
        if wanted.record is not None:
            schema = schema_of_dataclass(wanted.record)
            return self._make_config(self._convert_fields(value, schema, path), schema, path)
        if not wanted.takes_mapping:
            return self._report(path, f"must be {wanted}, not a mapping")
        if "_target_" in value and wanted.takes_component:
            return self._convert_component(value, path)
        if wanted.has(Component):
            return self._convert_without_target(value, path)
        items = {key: self._convert(it, wanted.value, (*path, key)) for key, it in value.items()}
        return BROKEN if any(item is BROKEN for item in items.values()) else items

    def _convert_component(self, value: dict[str, Any], path: KeyPath) -> Any:
        target = value["_target_"]
        keys = {key: item for key, item in value.items() if key != "_target_"}
        try:
            schema = self._schema_of(target)
        except TargetError as error:
            for key, item in keys.items():
                self._convert(item, Any, (*path, key))
            return self._report((*path, "_target_"), str(error), target)
        fields = self._convert_fields(keys, schema, path)
        config = self._make_config(fields, schema, path)
        if hasattr(config, "check_run"):
            self._components.append((path, config))
        return Component({"_target_": target, **fields})

    def _convert_without_target(self, value: dict[str, Any], path: KeyPath) -> Any:
        if self.is_partial:
            return value
        return self._report((*path, "_target_"), "is required: the class to build")

    def _convert_fields(
        self, value: dict[str, Any], schema: Schema, path: KeyPath
    ) -> dict[str, Any]:
        fields = {}
        for key, item in value.items():
            if key in schema.fields:
                fields[key] = self._convert(item, schema.fields[key].annotation, (*path, key))
            else:
                self._report((*path, key), self._explain_unknown(key, schema, path))
        return fields

    def _explain_unknown(self, key: str, schema: Schema, path: KeyPath) -> str:
        if not path and key == "conf":
            return "a run is chosen with +conf=<domain>/<run>; in a file, with a defaults list"
        hint = suggest(key, schema.fields)
        if not hint:
            values = self.tree.values
            homes = [it for it in self.tree.sources if it != path and key in _mapping(values, it)]
            hint = f"; did you mean {format_path((*homes[0], key))!r}" if homes else ""
        if key.startswith("_"):
            hint = "; besides _target_, a component has only the keys of its class"
        return f"no such key{hint}; there are: {', '.join(schema.fields) or 'none'}"

    def _make_config(self, fields: dict[str, Any], schema: Schema, path: KeyPath) -> Any:
        """Makes the config object and asks its rules; one about a wrong value is not heard."""
        if schema.config_class is None:
            return None
        own = schema_of_dataclass(schema.config_class).fields
        wrong = {name for name in own if fields.get(name, BROKEN) is BROKEN}
        given = {name: fields[name] for name in own if name not in wrong}
        stand_ins = {name: BROKEN for name in wrong if own[name].make_default is REQUIRED}
        texts: list[str] = []
        config = None
        try:
            config = schema.config_class(**given, **stand_ins)
            for text in config.check() if hasattr(config, "check") else ():
                texts.append(text)
        except ValueError as error:
            texts += str(error).splitlines()
        except (TypeError, AttributeError):
            if not stand_ins:
                raise
        for text in texts:
            if repr(BROKEN) in text or any(re.search(rf"\b{name}\b", text) for name in wrong):
                continue
            self._tell(text, path, own)
        return BROKEN if config is None or wrong else config

    def _tell(self, text: str, path: KeyPath, fields: Mapping[str, Field]) -> None:
        """Adds what a rule of a config says, with the place of the key that its text begins with."""
        name = text.partition("=")[0]
        inner = (*path, *name.split(".")) if name.partition(".")[0] in fields else path
        if self.is_partial and inner not in self.tree.sources:
            return  # it may be another layer's to give what the rule asks for
        prefix = f"{format_path(path)}." if path else ""
        self._faults.append((inner, f"{self.tree.place(inner)}: {prefix}{text}"))


def _names_key(text: str, values: Mapping[str, Any]) -> bool:
    """Whether a rule's text begins with a key of another part of the run: ``trainer.devices=3: ...``."""
    name = text.partition("=")[0]
    return "." in name and name.partition(".")[0] in values


def _mapping(values: Any, path: KeyPath) -> dict[str, Any]:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
