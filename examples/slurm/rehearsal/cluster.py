"""What the stand-ins for SLURM's commands know of each other: a folder for each job that runs on this machine."""

import json
import os
import re
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path(tempfile.gettempdir()) / f"slurm-rehearsal-{os.getuid()}"


class Job:
    """A job that runs; the folder holds its facts, its ranks, and what is asked of it."""

    def __init__(self, name: str) -> None:
        self.folder = FOLDER / name
        self.ranks = self.folder / "ranks"

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Makes the folder, and leaves in it what ``scontrol show job`` tells."""
        self.ranks.mkdir(parents=True, exist_ok=True)
        hidden = self.folder / "new"
        hidden.write_text(json.dumps(facts))
        hidden.rename(self.folder / "facts")

    def read_facts(self) -> dict[str, Any]:
        """What was left by ``write_facts``."""
        facts: dict[str, Any] = json.loads((self.folder / "facts").read_text())
        return facts

    def ask(self, what: str, value: str = "") -> None:
        """Leaves a wish (``requeue``, ``cancel``, ``limit``) for ``sbatch``, which looks ten times a second."""
        (self.folder / f"{what}.new").write_text(value)
        (self.folder / f"{what}.new").rename(self.folder / what)

    def read_wish(self, what: str) -> str | None:
        """What was asked for, None if it was not."""
        path = self.folder / what
        return path.read_text() if path.exists() else None

    def find_ranks(self) -> list[int]:
        """Process groups of the tasks that run."""
        return [int(it.name) for it in self.ranks.glob("*")]

    def signal_ranks(self, number: int) -> None:
        """As SLURM does it: to every process of every task, the workers of a data loader included."""
        for group in self.find_ranks():
            with suppress(ProcessLookupError):
                os.killpg(group, number)


def parse_signal(name: str) -> int:
    """``USR1``, ``SIGUSR1`` or ``10``."""
    return (
        int(name)
        if name.isdigit()
        else int(signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"])
    )


def parse_seconds(limit: str) -> int:
    """``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours``, ``days-hours:minutes[:seconds]``."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", limit):
        raise SystemExit(f"Invalid time limit specification: {limit}")
    days, _, rest = limit.rpartition("-")
    numbers = [int(it) for it in rest.split(":")]
    # With days the first number is hours; alone it is minutes.
    numbers = numbers + [0] * (3 - len(numbers)) if days else [0] * (3 - len(numbers)) + numbers
    if not days and ":" not in rest:
        numbers = [0, int(rest), 0]
    return ((int(days or 0) * 24 + numbers[0]) * 60 + numbers[1]) * 60 + numbers[2]


def format_seconds(seconds: float) -> str:
    """``days-hours:minutes:seconds``, without the days of a shorter time."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hour:02}:{minute:02}:{second:02}"
