"""The chats that ship with the package: made from the shipped text by the tool, small, free, as the docs say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nemo_like.collections.llm.finetune.samples import (
    ChatSample,
    PreferenceSample,
    fingerprint,
    read_sample,
)
from nemo_like.collections.llm.finetune.sources import find_files, read_records

ROOT = Path(__file__).resolve().parents[2]
FILES = find_files(
    ["pkg://nemo_like.samples/chat/*.zst", "pkg://nemo_like.samples/preference/*.zst"]
)
MAX_BYTES = 300_000


def test_the_tool_makes_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "tools/build_sample_chats.py", f"--out={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    made = sorted(tmp_path.rglob("*.zst"))
    assert [it.read_bytes() for it in made] == [it.read_bytes() for it in FILES]


def test_records_are_good_and_free() -> None:
    assert sum(path.stat().st_size for path in FILES) < MAX_BYTES
    for record in read_records(FILES):
        sample = read_sample(record.values)
        expected = PreferenceSample if record.file.parent.name == "preference" else ChatSample
        assert type(sample) is expected
        licence = "WordNet" if record.file.name.startswith("words") else "public domain"
        assert record.values["meta"]["licence"] == licence


def test_no_sample_comes_twice() -> None:
    prints = [fingerprint(read_sample(record.values)) for record in read_records(FILES)]
    assert len(set(prints)) == len(prints)


def test_the_page_counts_them() -> None:
    page = (ROOT / "docs/sample_data.md").read_text()
    for path in FILES:
        number = sum(1 for _ in read_records([path]))
        name = f"{path.parent.name}/{path.name.partition('.')[0]}"
        assert f"| `{name}` | {number:,} | {path.stat().st_size:,} |" in page
