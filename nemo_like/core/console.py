"""What a run says while it works: one logging set-up for every command."""

from __future__ import annotations

import logging
import os
import sys
import warnings

SHELL_NAMES = ("bash", "interactive")
"""Names under which Lightning takes a SLURM job for a shell, whose tasks are none of its ranks."""


def is_slurm_run() -> bool:
    """Whether the tasks of SLURM are the ranks of this run; Lightning judges by the same two variables."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in SHELL_NAMES


def process_rank() -> int:
    """Global rank of this process as its launcher told it; 0 when nobody did."""
    # Set by torchrun, SLURM, and Lightning's launcher. A shell on a node has a SLURM_PROCID too and hands it down.
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK") if is_slurm_run() else ("RANK", "LOCAL_RANK")
    for name in names:
        if (value := os.environ.get(name, "")).isdigit():
            return int(value)
    return 0


class _RankZeroFilter(logging.Filter):
    """Lets rank zero speak, and everybody's errors."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or process_rank() == 0


def setup_logging(level: int = logging.INFO) -> None:
    """Sends the log of ``nemo_like`` to standard error, and keeps that of the libraries down to warnings."""
    root = logging.getLogger("nemo_like")
    # One, and on the standard error of now, which may not be that of an earlier call.
    root.handlers[:] = [it for it in root.handlers if not getattr(it, "is_console", False)]
    handler = logging.StreamHandler(sys.stderr)
    handler.is_console = True  # type: ignore[attr-defined]
    handler.setFormatter(
        logging.Formatter("%(levelname).1s %(asctime)s %(message)s", datefmt="%H:%M:%S")
    )
    handler.addFilter(_RankZeroFilter())
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False
    quiet_lightning()
    # Said by Lightning 2.6 about its own use of torch 2.14.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    # A run counts steps and logs on its own account.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings("ignore", message=".*Checkpoint directory.*exists and is not empty.*")


def quiet_lightning() -> None:
    """Keeps Lightning's log down to warnings; its import sets the level anew, so this is called after it, too."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
