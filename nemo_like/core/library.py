"""The configuration files that can be chosen: shipped ones, and those of the user's folders."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nemo_like.core.schema import find_module

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = PACKAGE / "conf"
"""Primary configs, groups, and the runs that ship with the package."""

RUN_HEADER = "# @package _global_"
"""First line of a run file."""


@dataclass(frozen=True)
class Library:
    """Folders that are searched, in order.

    A run ``llm/quickstart`` is the file ``conf/llm/quickstart.yaml`` in one of them, the option
    ``ddp`` of the group ``strategy`` the file ``strategy/ddp.yaml``.
    """

    roots: tuple[Path, ...] = (SHIPPED, PACKAGE)

    def files(self, name: str) -> list[Path]:
        """All files of this name; the first is the one that is read."""
        paths = [root / f"{name}.yaml" for root in self.roots]
        return [path for path in paths if os.path.isfile(path)]  # False for names that cannot be

    def options(self, group: str) -> list[str]:
        """Names that can be chosen from a group, ``llm/llama_1b`` for a file in a subfolder."""
        folders = [root / group for root in self.roots]
        found = {
            file.relative_to(folder).with_suffix("")
            for folder in folders
            for file in folder.rglob("*.yaml")
        }
        return sorted(path.as_posix() for path in found)

    def is_group(self, name: str) -> bool:
        """Whether there is anything to choose under this name."""
        folders = [root / name for root in self.roots if os.path.isdir(root / name)]
        return any(next(folder.rglob("*.yaml"), None) is not None for folder in folders)

    def runs(self) -> list[str]:
        """Names for ``+conf=``."""
        return [name for name in self.options("conf") if is_run(self.files(f"conf/{name}")[0])]

    def groups(self) -> list[str]:
        """Groups that a run chooses from."""
        folders = [
            folder
            for root in self.roots
            if root != PACKAGE
            for folder in root.glob("[!_.]*/")
            if folder.is_dir()
        ]
        names = {folder.name for folder in folders if folder.name != "conf"}
        return sorted(
            name
            for name in names
            if any(not is_run(self.files(f"{name}/{o}")[0]) for o in self.options(name))
        )

    def primaries(self) -> list[str]:
        """What can be done with a run: the primary configs."""
        return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def is_run(file: Path) -> bool:
    """Whether a file is a run and not an option of a group."""
    return RUN_HEADER in file.read_text(encoding="utf-8", errors="replace")


def summary(file: Path) -> str:
    """The first comment of a file, which says what it is for."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("#") and not line.startswith("# @"):
            return line.lstrip("# ").rstrip()
    return ""


def shown(file: Path) -> str:
    """A file's name in messages: ``conf/...`` for a shipped one, else as short as it can be."""
    for folder, prefix in ((SHIPPED.resolve(), Path("conf")), (Path.cwd(), Path())):
        if file.resolve().is_relative_to(folder):
            return str(prefix / file.resolve().relative_to(folder))
    return str(file)


def open_library(
    search_path: Iterable[str], config_dirs: Iterable[str]
) -> tuple[Library, list[str]]:
    """Finds the folders of Hydra's search path and of ``--config-dir``.

    The user's own folders come before the shipped runs, so that a copied run can keep its name.

    Returns:
        The library, and what is wrong with the folders.
    """
    faults: list[str] = []
    own: list[Path] = []
    for text in config_dirs:
        own.append(Path(text).expanduser().absolute())
        if not own[-1].is_dir():
            faults.append(f"--config-dir {text}: there is no such folder")
    later: list[Path] = []
    for entry in search_path:
        scheme, _, location = entry.partition("://")
        if scheme == "file":
            later.append(Path(location).expanduser().absolute())
            if not later[-1].is_dir():
                faults.append(f"hydra.searchpath: {entry}: there is no such folder")
        elif scheme == "pkg":
            spec = find_module(location.replace("/", "."))
            if spec is None or not spec.submodule_search_locations:
                faults.append(f"hydra.searchpath: {entry}: there is no such package")
            else:
                later.append(Path(spec.submodule_search_locations[0]))
        else:
            faults.append(f"hydra.searchpath: {entry}: must begin with pkg:// or file://")
    roots = [SHIPPED, *own, *later]
    if PACKAGE not in [root.resolve() for root in roots]:
        roots.append(PACKAGE)
    return Library(tuple(root for root in roots if root.is_dir())), faults
