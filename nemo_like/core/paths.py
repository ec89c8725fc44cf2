"""Data paths of a configuration: files, globs, and files inside installed packages."""

from __future__ import annotations

import glob
import importlib.resources
from pathlib import Path

from nemo_like.core.errors import DataError, suggest

PACKAGE_SCHEME = "pkg://"


def resolve(spec: str) -> list[Path]:
    """Every file or folder that a path or glob means, sorted.

    Args:
        spec: A path or glob (``**`` crosses folders), relative to the current directory; ``~`` is
            the home folder. ``pkg://nemo_like.samples/text/*.jsonl.zst`` looks inside a package.

    Raises:
        DataError: Nothing is there, or there is no such package.
    """
    pattern = _locate(spec)
    if pattern.exists():  # also a name with brackets, which a glob would not find
        return [pattern]
    found = sorted(Path(name) for name in glob.glob(str(pattern), recursive=True))
    if not found:
        raise DataError(f"{spec!r}: no such file or folder{_explain(pattern)}")
    return found


def _locate(spec: str) -> Path:
    if not spec.startswith(PACKAGE_SCHEME):
        return Path(spec).expanduser()
    package, _, inner = spec.removeprefix(PACKAGE_SCHEME).partition("/")
    try:
        root = importlib.resources.files(package)
    except (ModuleNotFoundError, ValueError) as error:
        raise DataError(f"{spec!r}: there is no package {package!r}") from error
    return Path(str(root)) / inner


def _explain(pattern: Path) -> str:
    """Where the path goes wrong, and what is there instead."""
    folder = pattern
    while not folder.is_dir():
        missing, folder = folder, folder.parent
    names = sorted(path.name for path in folder.iterdir())
    hint = suggest(missing.name, names)
    if hint:
        return f"; in {folder} there is no {missing.name!r}{hint}"
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"; {folder} holds: {shown or 'nothing'}"
