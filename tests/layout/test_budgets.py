"""Sizes and shapes that keep the code readable; an exception stands here with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("nemo_like", "collections", "examples", "tools", "conf")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_CLASSES_ABOVE_LIGHTNING = 2
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "base", "common"}

# "path" or "path::function" -> why it may be longer.
EXCEPTIONS: dict[str, str] = {}


# Path.rglob does not follow links, so each file is seen once, where it really lies.
SOURCES = sorted(it for folder in CODE for it in (ROOT / folder).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def classes(*rooms: str) -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in [it for it in SOURCES if not rooms or place(it).split("/")[0] in rooms]:
        yield from ((path, it) for it in ast.walk(parse(path)) if isinstance(it, ast.ClassDef))


def last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_sources_of_all_rooms_are_seen() -> None:
    seen = {place(it).split("/")[0] for it in SOURCES}
    assert {"nemo_like", "collections", "examples", "conf"} <= seen


def test_files_are_short() -> None:
    lines = {place(it): len(it.read_text(encoding="utf-8").splitlines()) for it in SOURCES}
    too_long = {name: n for name, n in lines.items() if n > MAX_FILE_LINES}
    assert {name: n for name, n in too_long.items() if name not in EXCEPTIONS} == {}


def count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, without the docstring."""
    first, text = function.body[0], ast.get_docstring(function, clean=False)
    docstring = 0 if text is None else (first.end_lineno or 0) - first.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_functions_are_short() -> None:
    lines = {
        f"{place(path)}::{it.name}": count_lines(it)
        for path in SOURCES
        for it in ast.walk(parse(path))
        if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    too_long = {name: n for name, n in lines.items() if n > MAX_FUNCTION_LINES}
    assert {name: n for name, n in too_long.items() if name not in EXCEPTIONS} == {}


def test_every_exception_is_still_needed() -> None:
    places = {place(it) for it in SOURCES}
    assert [it for it in EXCEPTIONS if it.split("::")[0] not in places] == []


def test_there_are_no_mixins() -> None:
    found = [
        f"{place(path)}::{it.name}"
        for path, it in classes()
        if it.name.endswith("Mixin") or any(last_name(one).endswith("Mixin") for one in it.bases)
    ]
    assert found == []


def test_nothing_is_imported_by_star() -> None:
    found = [
        f"{place(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and any(it.name == "*" for it in node.names)
    ]
    assert found == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    found = [place(it) for it in SOURCES if VAGUE_NAMES & set(it.relative_to(ROOT).parts)]
    found += [place(it) for it in SOURCES if it.stem in VAGUE_NAMES]
    assert found == []


def test_models_stand_close_to_lightning() -> None:
    """A user's model has at most two of our classes between itself and LightningModule."""
    bases: dict[str, list[str]] = {}
    # Strategies are called like Lightning's, which the names alone would take for a circle.
    rooms = ("nemo_like/core", "nemo_like/testing", "collections")
    for path, it in classes("nemo_like", "collections"):
        if not place(path).startswith(rooms):
            continue
        bases.setdefault(it.name, []).extend(last_name(one) for one in it.bases)

    def depth(name: str) -> int:  # our classes from here up to LightningModule; 0: never gets there
        if "LightningModule" in bases.get(name, ()):
            return 1
        above = [depth(it) for it in bases.get(name, ()) if it != name]
        return 1 + max(above) if any(above) else 0

    depths = {name: depth(name) for name in bases}
    assert depths["Model"] == 1
    assert {name: n for name, n in depths.items() if n > MAX_CLASSES_ABOVE_LIGHTNING} == {}


def test_examples_are_entry_points_only() -> None:
    # What stands in for SLURM is a program of its own.
    found = [f"{place(path)}::{it.name}" for path, it in classes("examples")]
    assert [it for it in found if not it.startswith("examples/slurm/rehearsal/")] == []
    imported = [
        f"{place(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] in ("examples", "tools", "tests")
    ]
    assert imported == []
