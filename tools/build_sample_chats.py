"""Builds the chats that ship with the package, nemo_like/samples/chat and nemo_like/samples/preference.

    python tools/build_sample_chats.py [--out nemo_like/samples]

They are made by rule from the shipped text, nemo_like/samples/text: questions whose answers stand in it, words to
explain, passages to continue, and, as preferences, the right answer beside that of another country. The output is a
function of that text alone: the same bytes on every machine with the same libzstd.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from nemo_like.data.jsonl_zst import read_documents

# Key of the Factbook -> questions; the country stands for {}.
QUESTIONS = {
    "Location": ("Where is {}?", "Where on the map do I find {}?"),
    "Area - comparative": ("How large is {}?", "What can I compare the area of {} with?"),
    "Coastline": ("How long is the coast of {}?",),
    "Climate": ("What is the climate of {} like?", "What weather should I expect in {}?"),
    "Terrain": ("What does the land look like in {}?", "Describe the terrain of {}."),
    "Natural resources": ("Which natural resources does {} have?",),
    "Natural hazards": ("Which natural hazards threaten {}?",),
    "Languages": ("Which languages are spoken in {}?", "What do people speak in {}?"),
    "Religions": ("Which religions are there in {}?",),
    "Population": ("How many people live in {}?", "What is the population of {}?"),
    "Agriculture - products": ("What do farmers grow in {}?",),
    "Industries": ("Which industries does {} have?",),
}
SYSTEM = "You answer questions about countries, briefly and with figures where there are any."
WORD_QUESTIONS = (
    "What does the {kind} '{word}' mean?",
    "Define the {kind} '{word}'.",
    "Explain '{word}' ({kind}).",
)
ENTRY = re.compile(r"^([a-z][a-z -]{2,30})(?:, [^()]*)? \((noun|verb|adjective|adverb)\): (.+)$")
HEAD = re.compile(r"([A-Z][a-z][\w .'-]+): (?:Geography|Economy|People and Society)")
MAX_ANSWER_CHARS = 300
WORDS_KEPT, PASSAGES_KEPT = 900, 160

Record = dict[str, Any]


def choose(options: tuple[str, ...], key: str) -> str:
    """One of some wordings, always the same for a key."""
    return options[hashlib.sha256(key.encode()).digest()[0] % len(options)]


def thin(records: list[Record], number: int) -> list[Record]:
    """So many of some records, evenly."""
    step = max(len(records) / number, 1.0)
    return [records[int(place * step)] for place in range(min(number, len(records)))]


def read_facts(folder: Path) -> dict[str, dict[str, str]]:
    """Country -> key -> value, of values of one line."""
    facts: dict[str, dict[str, str]] = {}
    for document in read_documents(folder / "factbook.jsonl.zst"):
        head, _, rest = document.text.partition("\n")
        found = HEAD.fullmatch(head)
        if not found:
            continue
        country = found[1]
        for line in rest.split("\n"):
            key, _, value = line.partition(": ")
            value = value.partition(" ++ ")[0].strip()
            if key in QUESTIONS and 3 <= len(value) <= MAX_ANSWER_CHARS:
                facts.setdefault(country, {})[key] = value
    return facts


def write_sentence(text: str) -> str:
    """A value as an answer: with a capital letter and a full stop."""
    text = text[0].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def make_facts(facts: dict[str, dict[str, str]]) -> Iterator[Record]:
    """Chats of one to three questions about a country."""
    for country, values in facts.items():
        keys = sorted(values, key=lambda key: hashlib.sha256(f"{country}/{key}".encode()).digest())
        while keys:
            size = 1 + hashlib.sha256(f"{country}/{len(keys)}".encode()).digest()[0] % 3
            turns, keys = keys[:size], keys[size:]
            messages = [{"role": "system", "content": SYSTEM}] if size > 1 else []
            for key in turns:
                question = choose(QUESTIONS[key], f"{country}/{key}").format(country)
                messages += [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": write_sentence(values[key])},
                ]
            yield {"messages": messages, "meta": describe("factbook", "public domain")}


def make_preferences(facts: dict[str, dict[str, str]]) -> Iterator[Record]:
    """The answer for a country, and that of the next country that has another one."""
    countries = list(facts)
    for number, country in enumerate(countries):
        for key, value in sorted(facts[country].items())[:3]:
            others = (countries[(number + step) % len(countries)] for step in range(1, 20))
            wrong = next(
                (facts[it][key] for it in others if facts[it].get(key, value) != value), ""
            )
            if wrong:
                yield {
                    "prompt": choose(QUESTIONS[key], f"{country}/{key}").format(country),
                    "chosen": write_sentence(value),
                    "rejected": write_sentence(wrong),
                    "meta": describe("factbook", "public domain"),
                }


def make_words(folder: Path) -> Iterator[Record]:
    """Instruction pairs: a word of the dictionary, and its gloss."""
    for document in read_documents(folder / "dictionary.jsonl.zst"):
        for paragraph in document.text.split("\n\n"):
            found = ENTRY.match(paragraph)
            if not found:
                continue
            word, kind, gloss = found.groups()
            question = choose(WORD_QUESTIONS, word).format(word=word, kind=kind)
            answer, _, example = gloss.partition('; "')
            if example and len(answer) <= MAX_ANSWER_CHARS:
                answer = f'{write_sentence(answer)} For example: "{example.partition(chr(34))[0]}"'
                yield {
                    "instruction": question,
                    "input": "",
                    "output": answer,
                    "meta": describe("dictionary", "WordNet"),
                }


def make_passages(folder: Path) -> Iterator[Record]:
    """Chats that ask for the paragraph that follows."""
    for document in read_documents(folder / "novels.jsonl.zst"):
        paragraphs = [it for it in document.text.split("\n\n") if 80 <= len(it) <= 500]
        author = document.meta["source"].partition(":")[0]
        if len(paragraphs) >= 2:
            messages = [
                {
                    "role": "user",
                    "content": f"Continue this passage of {author}:\n\n{paragraphs[0]}",
                },
                {"role": "assistant", "content": paragraphs[1]},
            ]
            yield {"messages": messages, "meta": describe("novels", "public domain")}


def describe(subset: str, licence: str) -> dict[str, str]:
    """The metadata of a record."""
    return {"made from": subset, "licence": licence}


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes a file and says what is in it."""
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    content = "".join(f"{line}\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.ZstdCompressor(19, write_checksum=True).compress(content))
    print(f"{path}: {len(lines)} records, {len(content)} bytes, packed {path.stat().st_size}")


def main() -> None:
    """Writes all files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    samples = Path(__file__).resolve().parents[1] / "nemo_like" / "samples"
    parser.add_argument("--out", type=Path, default=samples, help="folder of the samples")
    out = parser.parse_args().out
    text = samples / "text"
    facts = read_facts(text)
    write(out / "chat" / "facts.jsonl.zst", make_facts(facts))
    write(out / "chat" / "words.jsonl.zst", thin(list(make_words(text)), WORDS_KEPT))
    write(out / "chat" / "passages.jsonl.zst", thin(list(make_passages(text)), PASSAGES_KEPT))
    write(out / "preference" / "facts.jsonl.zst", make_preferences(facts))


if __name__ == "__main__":
    main()
