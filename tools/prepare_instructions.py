"""Makes instructions and answers out of a jsonl.zst corpus, by rules: something real to fine-tune on.

    python tools/prepare_instructions.py 'corpus/train-*.jsonl.zst' --to instructions

Three kinds, each a conversation (``messages``) with where it came from: what a term of computing means (entries of the
FOLDOC dictionary), the docstring of a Python function, and a line of a game in another language (files of dialogue that
have equally many lines). An answer is the text as its author wrote it, unwrapped. Held-out conversations are chosen by
the hash of the answer, so that no answer lies on both sides.
"""

from __future__ import annotations

import argparse
import ast
import collections
import inspect
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_like.core.paths import resolve
from nemo_like.data.corpus import read_corpus
from nemo_like.data.held_out import is_held_out

LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "nl": "Dutch"}
Conversation = tuple[str, str]


def read_terms(text: str) -> Iterator[Conversation]:
    """Entries of FOLDOC: a headword at the margin, then an indented explanation."""
    for entry in re.split(r"\n\n(?=\S)", text):
        head, _, body = entry.partition("\n\n")
        # A line of subjects in front, cross references in braces, and sources and a date behind.
        body = re.sub(r"^\s*(<[^>]*>\s*)+", "", body)
        body = re.split(r"\n\s*\[|\n\s*\(\d{4}-\d\d-\d\d\)|\n\s*\{Home", body)[0]
        paragraphs = [" ".join(it.split()) for it in body.split("\n\n")]
        answer = re.sub(r"[{}]", "", "\n\n".join(it for it in paragraphs if it))
        if 80 <= len(answer) <= 1200 and 1 < len(head) < 60 and "\n" not in head:
            yield f"What does the term {head.strip()} mean in computing?", answer


def read_docstrings(text: str) -> Iterator[Conversation]:
    """Functions of a Python file that say what they do."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if not docstring or not 40 <= len(docstring) <= 800 or len(node.body) < 2:
            continue
        node.body = node.body[1:]
        source = inspect.cleandoc(ast.unparse(node))
        if len(source) <= 1500:
            yield f"Write the docstring of this Python function.\n\n{source}", docstring


def read_translations(dialogues: dict[str, dict[str, list[str]]]) -> Iterator[Conversation]:
    """Lines that stand at the same place of two languages."""
    for by_language in dialogues.values():
        english = by_language.get("en")
        for code, name in LANGUAGES.items():
            lines = by_language.get(code)
            if english is None or lines is None or len(lines) != len(english):
                continue
            for line, translated in zip(english, lines, strict=True):
                if len(line) >= 20 and translated and translated != line:
                    yield f"Translate into {name}: {line}", translated


def collect(specs: list[str]) -> Iterator[tuple[str, Conversation]]:
    """Kind and conversation, over all files."""
    dialogues: dict[str, dict[str, list[str]]] = collections.defaultdict(dict)
    for document in read_corpus([path for spec in specs for path in resolve(spec)]):
        meta: Any = document.meta
        source, path = str(meta.get("source", "")), str(meta.get("path", ""))
        if source == "dict-foldoc":
            yield from zip(itertools.repeat("term"), read_terms(document.text))
        elif path.endswith(".py"):
            yield from zip(itertools.repeat("docstring"), read_docstrings(document.text))
        elif found := re.search(r"(.*)/dialogs_(\w+)\.lua$", path):
            dialogues[found[1]][found[2]] = document.text.splitlines()
    yield from zip(itertools.repeat("translation"), read_translations(dialogues))


def main() -> None:
    """Writes train.jsonl and val.jsonl."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("corpus", nargs="+")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--held-out-fraction", type=float, default=0.05)
    parser.add_argument("--most-of-a-kind", type=int, default=2000)
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    rows: dict[str, list[str]] = {"train": [], "val": []}
    for kind, (question, answer) in collect(arguments.corpus):
        if answer in seen:
            continue
        seen.add(answer)
        split = "val" if is_held_out(answer, arguments.held_out_fraction) else "train"
        if counts[split, kind] >= arguments.most_of_a_kind:
            continue
        counts[split, kind] += 1
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        rows[split].append(
            json.dumps({"messages": messages, "meta": {"kind": kind}}, ensure_ascii=False)
        )
    for split, lines in rows.items():
        path = arguments.to / f"{split}.jsonl"
        hidden = path.with_name(f".{path.name}.new")
        hidden.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        hidden.rename(path)
        kinds = ", ".join(f"{n} {kind}" for (of, kind), n in sorted(counts.items()) if of == split)
        print(f"{path}: {len(lines)} conversations ({kinds})")


if __name__ == "__main__":
    main()
