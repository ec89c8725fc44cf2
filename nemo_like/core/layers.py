"""YAML files and overrides, merged into one tree that remembers where each value came from."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_like.core.errors import ConfigError

KeyPath = tuple[str | int, ...]

MISSING = "???"
"""Hydra's mark for a value that somebody else must give."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(
    r"[-+]?((0|[1-9][0-9_]*)\.[0-9]*|\.[0-9]+|(0|[1-9][0-9_]*)(?=[eE]))([eE][-+]?[0-9]+)?"
)
_WORDS: dict[str, Any] = {"null": None, "~": None, "": None, "true": True, "false": False}
_SPECIAL_FLOATS = {
    ".inf": float("inf"),
    "+.inf": float("inf"),
    "-.inf": float("-inf"),
    ".nan": float("nan"),
}


@dataclass(frozen=True)
class Source:
    """Where a value came from."""

    place: str
    """``conf/llm/quickstart.yaml:7`` or ``override 'seed=3'``."""
    text: str | None = None
    """A scalar as it was written without quotes; None for quoted text, lists and mappings."""
    is_override: bool = False


def parse_plain(text: str) -> Any:
    """What unquoted text means: null, true, false, a decimal number, or else the text itself.

    YAML 1.1 also reads ``00012`` as octal 10, ``1:30`` as 90 and ``no`` as false; here they stay
    what was typed.
    """
    text = text.strip()
    lower = text.lower()
    if lower in _WORDS and text in (lower, lower.capitalize(), lower.upper()):
        return _WORDS[lower]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return _SPECIAL_FLOATS.get(lower, text)


def format_path(path: KeyPath) -> str:
    """``("data", "corpus", 0)`` as ``data.corpus[0]``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


@dataclass
class Tree:
    """Plain nested data and, beside it, the source of each node."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[KeyPath, Source] = field(default_factory=dict)

    def merge(self, other: Tree) -> None:
        """Lays ``other`` on top: mappings are joined, everything else is replaced."""
        _merge(self.values, other.values)
        self.sources |= other.sources

    def moved_to(self, package: KeyPath) -> Tree:
        """The same tree, hung under the keys of ``package``."""
        values = self.values
        for key in reversed(package):
            values = {str(key): values}
        return Tree(values, {package + path: source for path, source in self.sources.items()})

    def set(self, names: Sequence[str], value: Any, source: Source) -> str | None:
        """Sets one value by override; mappings on the way are made, one at the end is joined.

        Args:
            names: Keys from the top; where a list stands, an index.
            value: Plain data.
            source: The override.

        Returns:
            What is wrong, or None.
        """
        node: Any = self.values
        path: KeyPath = ()
        key: str | int = ""
        for number, name in enumerate(names, start=1):
            if isinstance(node, list) and not (name.isdigit() and int(name) < len(node)):
                hint = "give an index below that, or the whole list"
                return f"{format_path(path)} is a list of {len(node)}: {hint}"
            if not isinstance(node, dict | list):
                return f"{format_path(path)} is {node!r}, not a mapping"
            key = int(name) if isinstance(node, list) else name
            path = (*path, key)
            if number == len(names):
                break
            if isinstance(node, dict) and node.get(name) is None:
                node[name] = {}
                self.sources[path] = source
            node = node[key]
        before = node.get(key) if isinstance(node, dict) else None
        if isinstance(value, dict) and isinstance(before, dict):
            if before and not value:
                return f"an empty mapping changes nothing; delete with ~{format_path(path)}"
            _merge(before, value)
        else:
            node[key] = value
        for inner in _walk(value, path):
            self.sources[inner] = source
        return None

    def delete(self, names: Sequence[str]) -> bool:
        """Removes a key of a mapping; False where there is none."""
        node: Any = self.values
        for name in names[:-1]:
            node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict) or names[-1] not in node:
            return False
        del node[names[-1]]
        return True

    def place(self, path: KeyPath) -> str:
        """The place of the nearest node at or above ``path`` that somebody wrote."""
        while path and path not in self.sources:
            path = path[:-1]
        return self.sources[path].place if path in self.sources else "the defaults"


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value


def _walk(value: Any, path: KeyPath) -> list[KeyPath]:
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path] + [inner for key, child in children for inner in _walk(child, (*path, key))]


def _at(value: Any, path: KeyPath) -> Any:
    for key in path:
        value = value[key]
    return value


@functools.cache
def find_grammar_fault(text: str) -> str | None:
    """What is wrong with an interpolation, apart from what it refers to."""
    if "${" not in text:
        return None
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    try:
        OmegaConf.create({"probe": text})
    except GrammarParseError as error:
        return "is no interpolation: " + str(error).partition("\n")[0]
    return None


@functools.cache
def _parse_yaml(text: str) -> Any:
    """The nodes of a document; many runs share the files of the groups."""
    import yaml  # type: ignore[import-untyped]

    # Not the loader in C: it takes tabs that this one, which Hydra uses, refuses.
    return yaml.compose(text, Loader=yaml.SafeLoader)


def load_yaml(file: Path, shown: str) -> Tree:
    """Reads a YAML mapping, keeping the line of each value.

    Args:
        file: The file.
        shown: Its name in messages.

    Raises:
        ConfigError: The file is no YAML mapping, has a key twice, or a tag.
    """
    import yaml

    try:
        root = _parse_yaml(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError([f"{shown}: is not UTF-8 text (byte {error.start})"]) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError([f"{shown}:{line}: is not YAML: {error.problem}"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{shown}: is not YAML: {' '.join(str(error).split())}"]) from error
    tree = Tree({}, {(): Source(shown)})
    if root is None:
        return tree
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError([f"{shown}: must hold a mapping (key: value), not a {root.id}"])
    faults: list[str] = []
    try:
        tree.values = _construct(root, (), shown, tree.sources, faults)
    except RecursionError as error:
        raise ConfigError([f"{shown}: a part of it contains itself"]) from error
    tree.sources[()] = Source(shown)
    for path in _walk(tree.values, ()):
        value = _at(tree.values, path)
        fault = find_grammar_fault(value) if isinstance(value, str) else None
        if fault is not None:
            faults.append(f"{tree.place(path)}: {format_path(path)}: {fault}")
    if faults:
        raise ConfigError(faults)
    return tree


def _construct(
    node: Any, path: KeyPath, shown: str, sources: dict[KeyPath, Source], faults: list[str]
) -> Any:
    """Data of a YAML node; the node's own line goes into ``sources``."""
    place = f"{shown}:{node.start_mark.line + 1}"
    sources[path] = Source(place)
    if node.id == "sequence":
        return [
            _construct(item, (*path, i), shown, sources, faults)
            for i, item in enumerate(node.value)
        ]
    if node.id == "mapping":
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key_place = f"{shown}:{key_node.start_mark.line + 1}"
            if key_node.id != "scalar" or key_node.value in mapping:
                what = (
                    f"key {key_node.value!r} is given twice"
                    if key_node.id == "scalar"
                    else "a key must be text"
                )
                faults.append(f"{key_place}: {format_path(path) or 'top level'}: {what}")
                continue
            inner = (*path, key_node.value)
            mapping[key_node.value] = _construct(value_node, inner, shown, sources, faults)
            # A value may stand on the line below its key; people look for the key.
            sources[inner] = Source(key_place, sources[inner].text)
        return mapping
    if node.tag.startswith("!") or node.tag.startswith("tag:yaml.org,2002:python/"):
        faults.append(
            f"{place}: {format_path(path)}: tag {node.tag} is not allowed: a file holds plain data"
        )
        return None
    if node.style:  # quoted or a block
        return node.value
    sources[path] = Source(place, node.value)
    return parse_plain(node.value)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """YAML text that :func:`load_yaml` reads back as the very same data."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Quotes every text that would be read as something else."""

    def represent_text(dumper: Any, text: str) -> Any:
        is_ambiguous = parse_plain(text) != text or text[:1].isdigit()
        return dumper.represent_scalar(
            "tag:yaml.org,2002:str", text, style="'" if is_ambiguous else None
        )

    Dumper.add_representer(str, represent_text)
    Dumper.ignore_aliases = lambda *_: True
    text: str = yaml.dump(dict(values), Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return text
