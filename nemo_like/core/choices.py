"""Which files make up a configuration, and in which order they are merged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_like.core.defaults import order_files
from nemo_like.core.errors import ConfigError, suggest
from nemo_like.core.layers import Tree, load_yaml
from nemo_like.core.library import SHIPPED, Library, shown
from nemo_like.core.overrides import Override, parse_value


class Chooser:
    """Looks up what a command line and the defaults lists of files choose, and has Hydra order it.

    Hydra stops at the first name that it does not find; here every one is reported.

    Args:
        config_name: The primary config.
        primary: Its content.
        library: Where files are looked for.

    Attributes:
        faults: One line each.
    """

    def __init__(self, config_name: str, primary: Tree, library: Library) -> None:
        self.faults: list[str] = []
        self._config_name, self._library = config_name, library
        self._files: dict[str, Tree | None] = {config_name: primary}
        entries = primary.values.get("defaults", [])
        self._groups = [group for entry in entries if isinstance(entry, dict) for group in entry]
        self._seen: set[str] = set()

    def load(self, name: str) -> Tree | None:
        """The content of a file; None if it cannot be read, which is reported once."""
        if name not in self._files:
            file, *hidden = self._library.files(name)
            if hidden and file.is_relative_to(SHIPPED):
                place = f"{shown(hidden[0])}: is never read, because {shown(file)} ships"
                self.faults.append(f"{place} under this name: rename it")
            try:
                self._files[name] = load_yaml(file, shown(file))
            except ConfigError as error:
                self.faults += error.faults
                self._files[name] = None
        return self._files[name]

    def is_choice(self, override: Override) -> bool:
        """Whether an override chooses a file, rather than setting a value."""
        is_value = override.prefix == "~" or (override.text or "").lstrip().startswith("{")
        if is_value or "." in override.key:
            return False
        return override.group == "conf" or self._library.is_group(override.group)

    def choose(self, overrides: Sequence[Override]) -> list[tuple[str, str]]:
        """Name and package of each file to merge, lowest first.

        A run whose defaults list names something that is not there comes last, without its list: so its own faults
        are found, too.
        """
        sound: list[Override] = []
        alone: list[tuple[str, str]] = []
        for override in overrides:
            try:
                value = parse_value(override.text or "")
            except ValueError as error:
                self.faults.append(f"{override.source.place}: {error}")
                continue
            options = value if isinstance(value, list) else [] if value is None else [value]
            names = [f"{override.group}/{option}" for option in options]
            if self._check(override, names):
                sound.append(override)
            elif override.group == "conf":
                alone += [(name, "") for name in names if self._library.files(name)]
        return self._order(sound) + alone

    def _check(self, override: Override, names: Sequence[str]) -> bool:
        place, group = override.source.place, override.group
        if group == "conf" and override.prefix != "+":
            self.faults.append(f"{place}: a run is added: write +conf={override.text}")
            return False
        return all([self._check_file(place, group, name, group) for name in names])

    def _check_file(self, place: str, group: str, name: str, base: str) -> bool:
        """Whether a file is there and can be read, and so on for all that its defaults name.

        Args:
            place: Where it is chosen.
            group: What it is chosen from.
            name: Its own, with the group.
            base: What relative names in its defaults list are relative to.
        """
        if "${" in name or name in self._seen:
            return True
        self._seen.add(name)
        if not self._library.files(name):
            option = name.removeprefix(f"{group}/")
            options = self._library.runs() if group == "conf" else self._library.options(group)
            what = "run" if group == "conf" else f"option of {group}"
            found = f"{suggest(option, options)}; there are: {', '.join(options) or 'none'}"
            self.faults.append(f"{place}: there is no {what} {option!r}{found}")
            return False
        tree = self.load(name)
        if tree is None:
            return False
        is_sound = True
        for entry in _read_defaults(tree, base):
            if not entry.is_override and entry.group in self._groups:
                line = f"- override /{entry.group}: {entry.option}"
                self.faults.append(f"{entry.place}: {entry.group} is chosen already: write {line}")
                is_sound = False
            if not entry.is_optional or self._library.files(entry.name):
                is_sound &= self._check_file(entry.place, entry.group, entry.name, entry.base)
        return is_sound

    def _order(self, overrides: Sequence[Override]) -> list[tuple[str, str]]:
        """What Hydra's rules for defaults lists make of the choices."""
        lines = []
        for override in overrides:
            prefix = "" if override.group in self._groups else "+"
            lines.append(f"{prefix}{override.key}={override.text}")
        try:
            return order_files(self._config_name, lines, self._library, self.load)
        except ValueError as error:
            text = re.split(r"\n\s*(?:Config )?[Ss]earch path", str(error))[0]
            self.faults.append(" ".join(text.split()))
            return [(self._config_name, "")]


@dataclass(frozen=True)
class _Entry:
    """One file in a defaults list."""

    place: str
    group: str
    option: str
    base: str
    """What relative names in the defaults list of that file are relative to."""
    is_override: bool
    is_optional: bool

    @property
    def name(self) -> str:
        """The file's."""
        return f"{self.group}/{self.option}" if self.group else self.option


def _read_defaults(tree: Tree, base: str) -> Iterator[_Entry]:
    """The files that a defaults list names, except the file itself.

    ``- optim: adamw`` is a choice from the group ``optim`` inside the group ``base``, ``- /optim: adamw`` from the
    outermost, ``- tiny`` the file ``tiny`` in ``base``.
    """
    entries: Any = tree.values.get("defaults")
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        for key, value in entry.items() if isinstance(entry, dict) else [(str(entry), None)]:
            *words, name = key.split()
            name = name.partition("@")[0]
            full = name[1:] if name.startswith("/") else f"{base}/{name}" if base else name
            place = tree.place(("defaults", index, key))
            flags = {"is_override": "override" in words, "is_optional": "optional" in words}
            if isinstance(entry, dict):
                options = value if isinstance(value, list) else [] if value is None else [value]
                yield from (_Entry(place, full, str(it), full, **flags) for it in options)
            elif name != "_self_":
                group, _, option = full.rpartition("/")
                yield _Entry(place, group, option, group, **flags)
