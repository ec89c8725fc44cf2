"""What the documentation says exists: links, commands, decisions, and the test behind each equality."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from nemo_like.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "collections").rglob("*.md")]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def place(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(page: Path) -> list[str]:
    """The lines of a page's bash blocks; a line that ends in a backslash goes on."""
    blocks = [text for kind, text in FENCE.findall(page.read_text("utf-8")) if kind == "bash"]
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip() and line[0] != "#"]


def anchors(page: Path) -> set[str]:
    """Names of the headings, as the usual Markdown viewers make them."""
    text = FENCE.sub("", page.read_text("utf-8"))
    titles = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", it.lower()).strip().replace(" ", "-") for it in titles}


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        text = FENCE.sub("", page.read_text("utf-8"))
        yield from ((page, it[0] or it[1]) for it in LINK.findall(text))


@cache
def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text("utf-8"))
    return {it.name for it in ast.walk(tree) if isinstance(it, ast.FunctionDef)}


def test_pages_are_found() -> None:
    assert {"README.md", "docs/index.md", "collections/llm/README.md"} <= set(map(place, PAGES))


def test_links_lead_somewhere() -> None:
    found = list(links())
    assert found
    dead = []
    for page, link in found:
        if re.match(r"https?://|mailto:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(f"{place(page)}: {link}")
    assert dead == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = {
            (it.parent / link.partition("#")[0]).resolve() for it, link in links() if it == page
        }
        waiting += [it for it in targets if it.suffix == ".md" and it.is_file()]
    assert [place(it) for it in PAGES if it not in reached] == []


def test_readme_begins_with_the_two_commands() -> None:
    first, second = commands(ROOT / "README.md")[:2]
    assert (first.split("#")[0].strip(), second.split("#")[0].strip()) == (
        "make pretrain",
        "make test",
    )


def fault(command: str, page: Path) -> str:
    """What a command names and does not exist, or nothing."""
    words = [it for it in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", it)]
    match words:
        case ["make", target, *_]:
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
            return "" if target in targets else f"no target {target}"
        case ["python", script, *_] if not script.startswith("-"):
            if not (ROOT / script).is_file():
                return f"no script {script}"
        case ["nemo-like", command, *rest]:
            if command not in COMMANDS and not command.startswith("-"):
                return f"no command {command}"
            if command == "run" and rest and not (ROOT / "conf" / f"{rest[0]}.yaml").is_file():
                return f"no primary config {rest[0]}"
        case ["tools/check" | ".ci/run" | "pip" | "cd" | "." | "export" | "pre-commit", *_]:
            pass
        case ["while" | "until" | "done" | "[[" | "grep" | "touch" | "kill" | "curl", *_]:
            pass  # around commands of ours; tests/strategies/test_preemptible_script.py runs the loops
        case _:
            return "a command that no test knows"
    runs = [it.removeprefix("+conf=") for it in words if it.startswith("+conf=")]
    text = page.read_text("utf-8")  # a page may make a run of its own
    missing = [it for it in runs if not (ROOT / f"conf/{it}.yaml").is_file()]
    return "".join(f"no run {it}" for it in missing if f"conf/{it}.yaml" not in text)


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_commands_name_what_there_is(page: Path) -> None:
    faults = {it: fault(it, page) for it in commands(page)}
    assert {it: what for it, what in faults.items() if what} == {}


def test_a_command_with_a_typo_would_be_found() -> None:
    readme = ROOT / "README.md"
    assert fault("make pretrian", readme) == "no target pretrian"
    assert fault("python examples/llm/pretrian.py", readme) == "no script examples/llm/pretrian.py"
    assert fault("nemo-like lz", readme) == "no command lz"
    assert fault("nemo-like run pretrian", readme) == "no primary config pretrian"
    assert fault("nemo-like validate +conf=llm/none", readme) == "no run llm/none"
    assert fault("python examples/llm/pretrain.py +conf=llm/none", readme) == "no run llm/none"


def test_decisions_are_numbered_without_gaps_and_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = sorted(folder.glob("[0-9]*.md"))
    assert [int(it.name[:4]) for it in pages] == list(range(1, len(pages) + 1))
    listed = (folder / "README.md").read_text("utf-8")
    assert [it.name for it in pages if f"({it.name})" not in listed] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs/decisions").glob("[0-9]*.md")), ids=place)
def test_a_decision_has_its_three_parts(page: Path) -> None:
    titles = re.findall(r"^## (.*)$", page.read_text("utf-8"), re.MULTILINE)
    assert titles == ["Question", "Choice", "What was given up"]


def test_each_equality_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "equalities.md").read_text("utf-8")
    rows = [it for it in text.splitlines() if it.startswith("| ")]
    rows = [it for it in rows if not it.startswith(("| ---", "| this"))]
    assert rows
    without = [row for row in rows if not TEST.search(row)]
    assert without == []
    dead = [
        f"{file}::{name}"
        for file, name in TEST.findall(text)
        if not (ROOT / file).is_file() or name not in functions_of(ROOT / file)
    ]
    assert dead == []
