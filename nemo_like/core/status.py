"""How a run stands, in a file: what a script reads where the exit code is lost (torchrun turns every code into 1)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

STATUS_FILE = "status.json"

State = Literal["running", "finished", "stopped", "failed"]


def write_status(path: Path, state: State, *, step: int, reason: str = "") -> None:
    """Replaces the file in one step; to be called by rank zero.

    Args:
        path: ``<run folder>/status.json``.
        state: A run that was killed says ``running`` for ever.
        step: Optimizer steps done.
        reason: Why it is no longer running.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.new")
    hidden.write_text(json.dumps({"state": state, "step": step, "reason": reason}) + "\n", "utf-8")
    os.replace(hidden, path)
