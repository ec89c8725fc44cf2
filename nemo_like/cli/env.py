"""``nemo-like env``: versions and hardware, read without loading torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from nemo_like import __version__
from nemo_like.cli.parser import make_parser

_PACKAGES = (
    *(
        "torch",
        "lightning",
        "hydra-core",
        "omegaconf",
        "numpy",
        "tokenizers",
        "safetensors",
        "zstandard",
        "orjson",
    ),
    *("transformers", "tensorboard", "matplotlib", "rich", "megatron-core", "deepspeed"),
)
# What /proc/cpuinfo calls units that multiply BF16 matrices (x86, ARM).
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def main(arguments: list[str]) -> int:
    """Prints one fact a line."""
    make_parser("env", "Shows versions and hardware, for a bug report.").parse_args(arguments)
    rows = [("nemo-like", f"{__version__} in {Path(__file__).resolve().parents[1]}")]
    rows.append(("python", f"{platform.python_version()} on {platform.platform()}"))
    rows += [(name, version) for name in _PACKAGES if (version := _read_version(name))]
    rows += [
        ("cpu", _describe_cpu()),
        ("memory", _describe_memory()),
        ("threads", _describe_threads()),
    ]
    rows.append(("bf16", _describe_bf16()))
    rows += [("gpu", text) for text in _list_gpus() or ["none"]]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:{width}}  {text}")
    return 0


def _read_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _describe_cpu() -> str:
    model = re.search(r"(?m)^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = model[1].strip() if model else platform.machine()
    return f"{name}, {cores} of {os.cpu_count()} cores usable"


def _describe_memory() -> str:
    sizes_kib = dict(
        re.findall(r"(?m)^(MemTotal|MemAvailable):\s+(\d+) kB$", _read("/proc/meminfo"))
    )
    text = ", ".join(
        f"{int(kib) / 2**20:.1f} GiB {name[3:].lower()}" for name, kib in sizes_kib.items()
    )
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return (text or "unknown") + (
        f", limited to {int(limit) / 2**30:.1f} GiB" if limit.isdigit() else ""
    )


def _describe_threads() -> str:
    number = os.environ.get("OMP_NUM_THREADS")
    return (
        f"OMP_NUM_THREADS={number}"
        if number
        else "OMP_NUM_THREADS is not set: PyTorch takes all cores"
    )


def _describe_bf16() -> str:
    if _BF16_FLAGS & set(_read("/proc/cpuinfo").split()):
        return "the CPU has units for it"
    return "the CPU has no units for it: bf16-mixed is about ten times slower there than fp32"


def _list_gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else []
