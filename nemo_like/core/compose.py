"""From a command line to a checked configuration.

Hydra's rules say which files are merged; the merging and checking is done here, so that all faults are found.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_like.core.build import build
from nemo_like.core.check import Checker
from nemo_like.core.choices import Chooser
from nemo_like.core.errors import ConfigError, suggest
from nemo_like.core.layers import MISSING, Source, Tree, dump_yaml, load_yaml
from nemo_like.core.library import SHIPPED, Library, open_library, shown
from nemo_like.core.overrides import Override, parse_override, parse_value
from nemo_like.core.schema import ALLOWED_TARGETS

SCHEMA_KEY = "_schema_"
"""Key of a primary config that names the dataclass of the whole configuration."""


@dataclass(frozen=True)
class Composed:
    """A configuration without faults."""

    config: Any
    """Instance of the root dataclass (``RunConfig``), components as mappings with ``_target_``."""
    tree: dict[str, Any]
    """The same as plain data: complete, interpolations resolved."""
    _layers: Tree
    """What files and overrides said, before defaults and interpolations."""
    _root: str

    @property
    def yaml(self) -> str:
        """Text for the run folder; :func:`load_composed` reads it back."""
        return dump_yaml({SCHEMA_KEY: self._root, **self.tree})

    def replace_run_dir(self, run_dir: Path) -> Composed:
        """The same run in another folder, with everything that was derived from ``run_dir``."""
        return self._replace("run_dir", str(run_dir))

    def replace_strategy(self, component: dict[str, Any]) -> Composed:
        """The same run under another strategy.

        Raises:
            ConfigError: It does not fit the run.
        """
        return self._replace("strategy", component)

    def _replace(self, key: str, value: Any) -> Composed:
        values = {**self._layers.values, key: value}
        composed, faults = _check(Tree(values, self._layers.sources), self._root)
        if faults:
            raise ConfigError(faults)
        return composed

    def build(self, key: str) -> Any:
        """Builds the component at a key, ``"model"`` or ``"callbacks.report"``."""
        node: Any = self.tree
        for part in key.split("."):
            node = node[part]
        return build(node, path=key, allow=self.config.allow_targets)


def compose(config_name: str, arguments: Sequence[str] = ()) -> Composed:
    """Composes a primary config, a run and overrides, and checks the result.

    Args:
        config_name: Primary config, for example ``"pretrain"``.
        arguments: What stands on the command line: ``+conf=llm/quickstart``, ``strategy=ddp``,
            ``seed=3``, ``~callbacks.report``, ``--config-dir DIR``.

    Raises:
        ConfigError: All faults, one line each.
    """
    layers = _Layers(config_name, arguments)
    composed, faults = layers.check()
    if faults:
        raise ConfigError(faults)
    return composed


def compose_template(config_name: str, arguments: Sequence[str] = ()) -> Composed:
    """As :func:`compose`, where it is no fault that a file leaves a value open with ``???``.

    What is open is a mark in the configuration that nothing can be built of.

    Raises:
        ConfigError: All other faults.
    """
    composed, faults = _Layers(config_name, arguments).check(is_template=True)
    if faults:
        raise ConfigError(faults)
    return composed


def check_run(config_name: str, arguments: Sequence[str]) -> list[str]:
    """Faults of a command line, where it is no fault that a file leaves a value open with ``???``."""
    try:
        return _Layers(config_name, arguments).check(is_template=True)[1]
    except ConfigError as error:
        return error.faults


def load_composed(file: Path) -> Composed:
    """Reads the configuration that a run has saved.

    Raises:
        ConfigError: It does not fit the schema (any more), or is no saved configuration.
    """
    layers = load_yaml(file, shown(file))
    root = layers.values.pop(SCHEMA_KEY, None)
    if not isinstance(root, str):
        raise ConfigError([f"{shown(file)}: has no {SCHEMA_KEY}: no run has saved this file"])
    composed, faults = _check(layers, root)
    if faults:
        raise ConfigError(faults)
    return composed


def check_option(config_name: str, group: str, file: Path) -> list[str]:
    """Faults of one file of a group by itself; what other layers must bring is not missed."""
    try:
        layers = load_yaml(file, shown(file))
    except ConfigError as error:
        return error.faults
    layers.values.pop("defaults", None)
    root = _load_primary(config_name).values[SCHEMA_KEY]
    return _check(layers.moved_to((group,)), root, is_partial=True)[1]


def _check(layers: Tree, root: str, **leniency: bool) -> tuple[Composed, list[str]]:
    extra = layers.values.get("allow_targets")
    extra = [it for it in extra if isinstance(it, str)] if isinstance(extra, list) else []
    tree = Tree(copy.deepcopy(layers.values), layers.sources)
    checker = Checker(tree, allow=(*ALLOWED_TARGETS, *extra), **leniency)
    module, _, name = root.rpartition(".")
    config = checker.check(getattr(importlib.import_module(module), name))
    return Composed(config, tree.values, layers, root), checker.faults


def _load_primary(config_name: str) -> Tree:
    known = Library().primaries()
    if config_name not in known:
        listed = f"{suggest(config_name, known)}; there are: {', '.join(known)}"
        raise ConfigError([f"there is no primary config {config_name!r}{listed}"])
    return load_yaml(SHIPPED / f"{config_name}.yaml", f"conf/{config_name}.yaml")


class _Layers:
    """The merged files and overrides of one command line, as far as they can be read."""

    def __init__(self, config_name: str, arguments: Sequence[str]) -> None:
        self.faults: list[str] = []
        self._primary = _load_primary(config_name)
        self.root: str = self._primary.values[SCHEMA_KEY]
        self.tree = Tree({}, {(): Source(shown(SHIPPED / f"{config_name}.yaml"))})
        overrides, config_dirs = self._split(arguments)
        hydra = [it for it in overrides if it.key.startswith("hydra.")]
        library, faults = open_library(self._choose_search_path(hydra), config_dirs)
        self.faults += faults
        chooser = Chooser(config_name, self._primary, library)
        choices = [it for it in overrides if chooser.is_choice(it)]
        for name, package in chooser.choose(choices):
            self._merge(chooser.load(name), package)
        self.faults += chooser.faults
        for override in overrides:
            if override not in choices and override not in hydra:
                self._apply(override)
        if not any(it.group == "conf" for it in choices):
            self._require_run(library)

    def check(self, *, is_template: bool = False) -> tuple[Composed, list[str]]:
        """The configuration and all faults; without faults it is whole."""
        is_partial = bool(self.faults)
        composed, faults = _check(
            self.tree, self.root, is_partial=is_partial, is_template=is_template
        )
        return composed, list(dict.fromkeys([*self.faults, *faults]))

    def _split(self, arguments: Sequence[str]) -> tuple[list[Override], list[str]]:
        """Overrides, and the folders of ``--config-dir``."""
        overrides: list[Override] = []
        config_dirs: list[str] = []
        rest = list(arguments)
        while rest:
            argument = rest.pop(0)
            option, _, value = argument.partition("=")
            if option == "--config-dir":
                if value or rest:
                    config_dirs.append(value or rest.pop(0))
                else:
                    self.faults.append("--config-dir: must be followed by a folder")
            elif argument.startswith("-"):
                known = "there is --config-dir DIR, and key=value"
                self.faults.append(f"option {argument!r}: is unknown; {known}")
            else:
                try:
                    overrides.append(parse_override(argument))
                except ValueError as error:
                    self.faults.append(f"override {argument!r}: {error}")
        return overrides, config_dirs

    def _choose_search_path(self, overrides: Sequence[Override]) -> list[str]:
        path: list[str] = self._primary.values.get("hydra", {}).get("searchpath", [])
        for override in overrides:
            if override.key != "hydra.searchpath":
                hint = "of Hydra's own keys only hydra.searchpath can be set; the folder is run_dir"
                self._fault(override, hint)
                continue
            value = self._parse(override)
            if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
                path = value
            else:
                self._fault(override, "must be a list: [pkg://nemo_like,file:///your/folder]")
        return path

    def _merge(self, file: Tree | None, package: str) -> None:
        if file is None:
            return
        ours = {"defaults", "hydra", SCHEMA_KEY} if file is self._primary else {"defaults"}
        values = {key: value for key, value in file.values.items() if key not in ours}
        path = tuple(package.split(".")) if package else ()
        self.tree.merge(Tree(values, file.sources).moved_to(path))

    def _apply(self, override: Override) -> None:
        if override.prefix == "~":
            if not self.tree.delete(override.names):
                self._fault(override, f"there is nothing to delete: no file sets {override.key}")
            return
        before = len(self.faults)
        value = self._parse(override)
        if len(self.faults) == before:
            fault = self.tree.set(override.names, value, override.source)
            if fault is not None:
                self._fault(override, fault)

    def _require_run(self, library: Library) -> None:
        """Says that no run was chosen, unless overrides bring what only a run can bring."""
        if any(self.tree.values.get(key, MISSING) == MISSING for key in ("name", "model", "data")):
            runs = ", ".join(library.runs()) or "none"
            self.faults.append(f"no run chosen: add +conf=<domain>/<run>; there are: {runs}")

    def _parse(self, override: Override) -> Any:
        try:
            return parse_value(override.text or "")
        except ValueError as error:
            self._fault(override, str(error))
            return None

    def _fault(self, override: Override, text: str) -> None:
        self.faults.append(f"{override.source.place}: {text}")
