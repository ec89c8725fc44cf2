"""Every file of the repository: ends as it should, and is not too large to live in git."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 500_000
TEXT = {".py", ".md", ".yaml", ".toml", ".txt", ".sbatch", ".sh", ""}

# What git knows or would take in; the links under nemo_like stand for files that are listed elsewhere.
LISTING = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
).stdout
FILES = [ROOT / it for it in LISTING.split("\0") if it]
FILES = sorted(it for it in FILES if it.is_file() and not it.is_symlink())


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_text_ends_with_one_newline_and_has_no_spaces_at_line_ends() -> None:
    faults = []
    for path in FILES:
        if path.suffix not in TEXT:
            continue
        text = path.read_bytes()
        if text and (not text.endswith(b"\n") or text.endswith(b"\n\n")):
            faults.append(f"{place(path)}: end of file")
        faults += [
            f"{place(path)}:{number}: space at the end"
            for number, line in enumerate(text.split(b"\n"), start=1)
            if line.endswith((b" ", b"\t", b"\r"))
        ]
    assert faults == []


def test_no_file_is_large() -> None:
    assert [place(it) for it in FILES if it.stat().st_size > MAX_BYTES] == []


def test_no_pickle_is_kept() -> None:
    assert [place(it) for it in FILES if it.suffix in {".pkl", ".pt", ".pth", ".ckpt"}] == []


def test_shell_scripts_can_be_run_and_stop_at_the_first_fault() -> None:
    scripts = [it for it in FILES if it.read_bytes()[:20].startswith(b"#!/usr/bin/env bash")]
    assert scripts or not FILES
    for it in scripts:
        assert it.stat().st_mode & 0o111, f"{place(it)} is not executable"
        assert "set -euo pipefail" in it.read_text("utf-8"), place(it)
