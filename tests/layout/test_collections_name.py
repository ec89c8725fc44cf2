"""The folder `collections` must never hide the standard library's package of that name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOMAINS = sorted(
    it.name for it in (ROOT / "collections").iterdir() if it.is_dir() and it.name[0] not in "._"
)
LINKS = ["conf", *(f"collections/{name}" for name in DOMAINS)]


def test_there_are_domains() -> None:
    assert "llm" in DOMAINS


def test_collections_folder_is_no_regular_package() -> None:
    hides = ROOT / "collections" / "__init__.py"
    assert not hides.exists(), "it would hide the stdlib from every `python -m ...` run here"


@pytest.mark.parametrize("name", LINKS)
def test_every_domain_is_linked_into_the_package(name: str) -> None:
    link = ROOT / "nemo_like" / name
    assert link.is_symlink(), f"nemo_like/{name} must be a link (git with core.symlinks=false?)"
    assert not link.readlink().is_absolute(), f"nemo_like/{name} must be a relative link"
    assert link.resolve() == ROOT / name, f"nemo_like/{name} must lead to {name}/"


def test_every_link_in_the_package_leads_somewhere() -> None:
    links = [it for it in (ROOT / "nemo_like").rglob("*") if it.is_symlink()]
    assert [str(it) for it in links if not it.exists()] == []


@pytest.mark.parametrize("flag", ["-c", "-m"])
def test_stdlib_imports_from_the_repo_root(flag: str) -> None:
    # -S: without site, no .pth file has imported collections already and hidden the fault.
    what = {"-c": ["import collections, json; collections.OrderedDict"], "-m": ["json.tool", "-h"]}
    subprocess.run(
        [sys.executable, "-S", flag, *what[flag]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )


def test_no_script_is_named_like_a_stdlib_module() -> None:
    # The folder of a script is the first entry of sys.path.
    scripts = [it for folder in ("examples", "tools") for it in (ROOT / folder).rglob("*.py")]
    assert [str(it) for it in scripts if it.stem in sys.stdlib_module_names] == []


def test_tests_are_no_packages_and_none_is_called_collections() -> None:
    tests = ROOT / "tests"
    assert not list(tests.rglob("__init__.py"))
    assert not [it for it in tests.rglob("collections") if it.is_dir()]
