"""What a run ran on: versions, machine, code state. Enough to explain a figure, nothing secret."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch",
    "lightning",
    "numpy",
    "hydra-core",
    "tokenizers",
    "transformers",
    "safetensors",
    "zstandard",
)
# An argument whose name says that its value is nobody's business.
_SECRET = re.compile(
    r"(?i)(token(?![a-z])|secret|passw|credential|api_?key|access_?key|auth(?![a-z])|authorization)"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def collect_environment(folder: str | Path = ".") -> dict[str, Any]:
    """Gathers versions, processor, memory, devices, code state and command line.

    Environment variables hold secrets and are not read; names of machine and user are left out.

    Args:
        folder: Somewhere in the working tree whose commit is wanted.

    Returns:
        Plain values that JSON can hold.
    """
    import torch

    import nemo_like

    packages = {"nemo_like": nemo_like.__version__}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        )
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cpu": {
            "model": _read_cpu_model(),
            "cores": os.cpu_count(),
            "cores_usable": _count_usable_cores(),
            "torch_threads": torch.get_num_threads(),
        },
        "memory_gib": _read_memory_gib(),
        "devices": devices,
        "cuda": torch.version.cuda if devices else None,
        "git": read_git_state(folder),
        "command": hide_secrets(sys.argv),
    }


def hide_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line without the values of passwords and keys, nor logins in addresses."""
    shown: list[str] = []
    value_is_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if value_is_secret and not argument.startswith("-"):
            shown.append("***")
        elif equals and _SECRET.search(name):
            shown.append(f"{name}=***")
        else:
            shown.append(_URL_LOGIN.sub("***@", argument))
        value_is_secret = not equals and argument.startswith("-") and bool(_SECRET.search(name))
    return shown


def read_git_state(folder: str | Path) -> dict[str, Any] | None:
    """Commit and whether files differ from it; None outside a working tree or without git."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _run_git(folder, "status", "--porcelain")
    return {
        "commit": commit,
        "dirty": bool(changes),
        "changed_files": len((changes or "").splitlines()),
    }


def _run_git(folder: str | Path, *arguments: str) -> str | None:
    # Asking for the state must not write the index of somebody's working tree.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _read_cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"(?m)^(?:model name|Model)\s*:\s*(.+)$", text)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _count_usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
