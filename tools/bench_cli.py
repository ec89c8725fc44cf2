"""CPU seconds of the commands that answer without starting anything, and of the imports of a run.

    python tools/bench_cli.py [--rounds 5]

Each is a fresh process, all in turn; printed are medians. The budgets: 0.3 s for ``--help``, 1 s for ``ls``, 0.9 s for
``validate``, and for the imports of a run those of Lightning and 1 s.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys

COMMAND = [sys.executable, "-m", "nemo_like.cli.main"]
RUN_IMPORTS = (
    "from nemo_like.core import run; import nemo_like.strategies.ddp, nemo_like.callbacks.report, "
    "nemo_like.callbacks.progress, nemo_like.callbacks.metrics, nemo_like.callbacks.checkpointing, "
    "nemo_like.collections.llm.data, nemo_like.collections.llm.decoder.model, nemo_like.optim.muon, "
    "nemo_like.tracking.logger, nemo_like.tracking.tensorboard"
)
PROCESSES = {
    "nemo-like --help": [*COMMAND, "--help"],
    "nemo-like ls": [*COMMAND, "ls"],
    "nemo-like validate +conf=llm/quickstart": [*COMMAND, "validate", "+conf=llm/quickstart"],
    "nemo-like validate (all that ships)": [*COMMAND, "validate"],
    "import lightning.pytorch": [sys.executable, "-c", "import lightning.pytorch"],
    "the imports of a run": [sys.executable, "-c", RUN_IMPORTS],
}


def measure(command: list[str]) -> float:
    """CPU seconds of a process, user and system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Runs all in turn and prints medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    measured = [
        {name: measure(command) for name, command in PROCESSES.items()} for _ in range(rounds)
    ]
    for name in PROCESSES:
        print(f"{statistics.median(row[name] for row in measured):6.2f} s  {name}")


if __name__ == "__main__":
    main()
