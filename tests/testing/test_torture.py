"""A run that is killed again and again ends as if nobody had touched it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TORTURE = Path(__file__).resolve().parents[2] / "tools" / "torture.py"


def torture(folder: Path, *words: str, timeout_s: float = 280) -> str:
    done = subprocess.run(
        [sys.executable, str(TORTURE), "--folder", str(folder), *words],
        capture_output=True, text=True, timeout=timeout_s, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    logs = "".join(path.read_text("utf-8")[-3000:] for path in folder.glob("job*.log"))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs}"
    return done.stdout


@pytest.mark.dist
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    assert "20 kills" in torture(tmp_path, "--kills", "20")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_kills_of_one_of_two_ranks_change_nothing(tmp_path: Path) -> None:
    assert "12 kills" in torture(tmp_path, "--kills", "12", "--ranks", "2", timeout_s=850)
