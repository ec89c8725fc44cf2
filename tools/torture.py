"""Kills a training run at random moments until it is through, and compares it with one that was left alone.

    python tools/torture.py --kills 20
    python tools/torture.py --kills 300 --ranks 2 --seed 7

A small language model (packed mixture, dropout, validation, several epochs) trains with the command that a user types.
Again and again the run is ended by SIGKILL, SIGTERM, SIGUSR1 or SIGUSR2 (with several ranks: sent to one of them), by a
full disk, or its newest checkpoint is damaged while it is down; then the same command starts it again. At the end
weights, optimizer state, validation figures and the log of sample ids must be those of the undisturbed twin, bit for
bit. A job that finishes before all kills are used up begins anew in another folder.

Where this process may mount, checkpoints lie on a small tmpfs that is filled to the brim; elsewhere a limit on the size
of files stands in for it. With one rank a start is a fork of this process, which has imported everything: many more
kills an hour, and nothing is lost but kills within Python's imports (--start exec has them).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from nemo_like.core import run
from nemo_like.core.checkpoint import find_checkpoints, open_checkpoint
from nemo_like.core.errors import NemoLikeError
from nemo_like.testing.corpus import write_corpus
from nemo_like.testing.sample_log import read_sample_log

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "llm" / "pretrain.py"
STOPPED = 75
# Last n, best k, the one that was being written.
MOST_CHECKPOINTS = 2 + 1 + 1
DISK_MB = 24

RUN = [
    "+conf=llm/quickstart", "data.tokenizer.train_vocab_size=300", "data.seq_len=32", "data.global_batch_size=6",
    "data.held_out_fraction=0.2", "data.mixture.epochs.stories=1.5", "strategy.micro_batch_size=2",
    "model.network.vocab_size=300", "model.network.hidden_size=32", "model.network.num_layers=2",
    "model.network.num_heads=2",
    "model.network.intermediate_size=64", "model.network.max_positions=32", "model.network.dropout=0.1",
    "model.sample_tokens=5", "trainer.val_batches=2", "trainer.log_every_n_steps=5", "trainer.accelerator=cpu",
    "trainer.val_every_n_steps=20", "checkpoint.every_n_steps=8", "checkpoint.keep_last=2", "checkpoint.keep_best=1",
    "schedule.warmup_steps=2", "callbacks.report=null", "loggers.tensorboard=null",
    "+callbacks.samples._target_=nemo_like.testing.sample_log.SampleLog",
]  # fmt: skip


@dataclass
class Tally:
    """What happened."""

    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    damaged: int = 0
    starts: int = 0
    jobs: int = 0
    faults: list[str] = field(default_factory=list)


class Job:
    """A run in a folder of its own, and how it is started.

    Args:
        folder: Of the run.
        shared: Corpus and caches.
        arguments: Of this script.
    """

    def __init__(self, folder: Path, shared: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.arguments = folder, arguments
        self.checkpoints = folder / "checkpoints"
        self.log = folder.with_suffix(".log")
        self.rows_before = 0
        self.words = [
            *RUN,
            f"data.corpus={shared}/corpus/*.jsonl.zst",
            f"data.cache_dir={shared}/cache",
            f"run_dir={folder}",
            f"callbacks.samples.folder={folder}/samples",
            f"trainer.max_steps={arguments.steps}",
            f"trainer.devices={arguments.ranks}",
        ]

    def start(self, workers: int, *, file_limit: int | None = None) -> psutil.Process:
        """Starts or restarts the run.

        Args:
            workers: Of the data loader; must not matter.
            file_limit: Bytes that a file may have.
        """
        words = [*self.words, f"data.num_workers={workers}"]
        self.rows_before = len(self.read_rows())
        if self.arguments.start == "exec":
            # Rank zero's folder is agreed on through the environment of those it starts.
            with self.log.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, str(SCRIPT), *words],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=lambda: limit_files(file_limit),
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            return psutil.Process(process.pid)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            log_file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(log_file, stream)
            limit_files(file_limit)
            code = 1
            try:
                run.main("pretrain", words)
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                sys.stderr.flush()
                os._exit(code)
        return psutil.Process(pid)

    def steps_done(self) -> int:
        """The last step since the last start, as the log of samples has it."""
        rows = self.read_rows()[self.rows_before :]
        return max((json.loads(row)["step"] for row in rows), default=self.saved_step())

    def read_rows(self) -> list[str]:
        """Of rank zero's log of samples."""
        path = self.folder / "samples" / "samples-0.jsonl"
        return path.read_text("utf-8").splitlines() if path.exists() else []

    def saved_step(self) -> int:
        """Of the newest whole checkpoint."""
        saved = find_checkpoints(self.checkpoints)
        return int(saved[-1].name.removeprefix("step_")) if saved else 0


def limit_files(size: int | None) -> None:
    """Makes a write beyond a size fail as on a full disk."""
    if size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def wait(process: psutil.Process, timeout_s: float) -> int | None:
    """The exit code of a child, or None while it runs."""
    try:
        code = process.wait(timeout_s)
    except psutil.TimeoutExpired:
        return None
    return -1 if code is None else int(code)


def end_session(process: psutil.Process) -> None:
    """Ends whatever a run has left behind, so that the next start meets nobody."""
    for other in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(other.pid) == process.pid and other.status() != psutil.STATUS_ZOMBIE:
                other.kill()


def wait_for_save(job: Job, process: psutil.Process, timeout_s: float) -> None:
    """Returns when a checkpoint is being written."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.status() != psutil.STATUS_ZOMBIE:
        if any(job.checkpoints.glob(".step_*")):
            return
        time.sleep(0.0005)


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """Rank zero and those that it has started."""
    others = []
    with suppress(psutil.Error):  # one that has just ended
        others += [it for it in process.children() if SCRIPT.name in " ".join(it.cmdline())]
    return [process, *others]


class Torturer:
    """Starts a job again and again, and ends it in another way each time.

    Args:
        shared: Corpus and caches.
        arguments: Of this script.
    """

    def __init__(self, shared: Path, arguments: argparse.Namespace) -> None:
        self.shared, self.arguments = shared, arguments
        self.draw = random.Random(arguments.seed)
        self.tally = Tally()
        # Folders that this script has damaged itself, and that no run has looked at yet.
        self.spoilt: set[int] = set()
        self.ways: dict[str, Callable[[Job], None]] = {
            "SIGKILL": lambda job: self.kill(job, signal.SIGKILL),
            "SIGKILL while saving": lambda job: self.kill(job, signal.SIGKILL, in_save=True),
            "SIGTERM": lambda job: self.kill(job, signal.SIGTERM),
            "SIGUSR1": lambda job: self.kill(job, signal.SIGUSR1),
            "SIGUSR2 while saving": lambda job: self.kill(job, signal.SIGUSR2, in_save=True),
            "full disk": self.fill_disk,
            "damaged checkpoint": self.damage,
        }

    def torture(self, job: Job) -> None:
        """Until the job is through, or all kills are used up and it was left to finish."""
        self.tally.jobs += 1
        while True:
            used = self.tally.kills.total()
            if used >= self.arguments.kills:
                self.finish(job)
                return
            way = self.draw.choice(list(self.ways))
            self.ways[way](job)
            if self.tally.kills.total() == used:
                return  # it ended before
            self.inspect(job)

    def note(self, way: str, code: int | None, *allowed: int) -> None:
        """Counts a kill and checks how the run took it."""
        self.tally.kills[way] += 1
        self.tally.ends[f"{way}: exit code {code}"] += 1
        if code not in allowed:
            self.tally.faults.append(f"{way}: exit code {code}, expected {sorted(set(allowed))}")

    def start(self, job: Job, **options: int | None) -> psutil.Process:
        """Starts the job with any number of workers."""
        self.tally.starts += 1
        return job.start(self.draw.choice([0, 0, 2]), **options)

    def kill(self, job: Job, number: signal.Signals, *, in_save: bool = False) -> None:
        """Sends a signal to one rank, at any moment or while a checkpoint is being written."""
        process = self.start(job)
        if in_save:
            wait_for_save(job, process, 60)
        code = wait(process, self.draw.uniform(0, 0.02 if in_save else self.arguments.longest_s))
        if code is not None:
            self.end(job, process, code)
            return
        victim = self.draw.choice(ranks_of(process))
        with suppress(psutil.Error):
            victim.send_signal(number)
        code = wait(process, 120)
        end_session(process)
        name = f"{number.name} while saving" if in_save else number.name
        if number == signal.SIGKILL:
            # 0: it was through in the last moment.
            self.note(name, code, -number, 0, *([1] if self.arguments.ranks > 1 else []))
            return
        # Before Python has come to our first line, the signal does what it always did.
        early = [-number] if self.arguments.start == "exec" else []
        early += [1] if self.arguments.ranks > 1 else []
        self.note(name, code, STOPPED, 0, *early)
        if code == STOPPED and job.saved_step() != job.steps_done():
            self.tally.faults.append(
                f"{name}: step {job.steps_done()} was done, {job.saved_step()} is saved"
            )

    def fill_disk(self, job: Job) -> None:
        """Lets a save meet a full disk, then makes room."""
        filler = job.checkpoints / "filler"
        if os.path.ismount(job.checkpoints):
            process = self.start(job)
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            code = wait(process, 120)
            filler.unlink()
        else:
            process = self.start(job, file_limit=self.draw.randrange(1000, 60_000))
            code = wait(process, 120)
        if code == 0 and job.saved_step() >= self.arguments.steps:
            self.end(job, process, code)
            return
        end_session(process)
        self.note("full disk", code, 1)

    def damage(self, job: Job) -> None:
        """Changes, cuts or removes a file of the newest checkpoint while the run is down."""
        saved = find_checkpoints(job.checkpoints)
        if saved:
            files = sorted(path for path in saved[-1].rglob("*") if path.is_file())
            victim = self.draw.choice([path for path in files if path.name != "validation.json"])
            data = bytearray(victim.read_bytes())
            place = self.draw.randrange(len(data))
            what = self.draw.choice(["changed", "cut", "removed"])
            data[place] ^= 1 << self.draw.randrange(8)
            victim.write_bytes(data if what == "changed" else data[:place])
            if what == "removed":
                victim.unlink()
            self.tally.damaged += 1
            self.spoilt.add(saved[-1].stat().st_ino)
        self.kill(job, signal.SIGKILL)

    def end(self, job: Job, process: psutil.Process, code: int) -> None:
        """The run was through before it could be killed."""
        end_session(process)
        if code != 0:
            self.tally.faults.append(f"{job.folder.name}: ended by itself with exit code {code}")

    def finish(self, job: Job) -> None:
        """Lets the run come to its end."""
        process = self.start(job)
        code = wait(process, 600)
        if code is None:
            process.kill()
        self.end(job, process, -1 if code is None else code)

    def inspect(self, job: Job) -> None:
        """What lies on the disk between two starts."""
        saved = find_checkpoints(job.checkpoints)
        if len(saved) > MOST_CHECKPOINTS:
            self.tally.faults.append(f"{len(saved)} checkpoints: {[path.name for path in saved]}")
        for path in saved:
            if path.stat().st_ino in self.spoilt:
                continue
            try:
                open_checkpoint(path)
            except NemoLikeError as error:
                self.tally.faults.append(f"a checkpoint that is not whole: {error}")


def compare(job: Job, twin: Job) -> list[str]:
    """Where a tortured run is not its twin."""
    faults = []
    one, other = (open_checkpoint(find_checkpoints(it.checkpoints)[-1]) for it in (job, twin))
    if one.step != other.step:
        return [f"step {one.step} at the end, the twin's is {other.step}"]
    for part in ("model", "optimizer"):
        names = one.tensor_names(part)
        if names != other.tensor_names(part):
            faults.append(f"{part}: other names")
            continue
        ours, theirs = one.read_tensors(part, names), other.read_tensors(part, names)
        faults += [
            f"{part}: {name} differs" for name in names if not torch.equal(ours[name], theirs[name])
        ]
    mine, its = (read_sample_log(it.folder / "samples") for it in (job, twin))
    faults += [
        f"step {step}, rank {rank}: {mine.get((step, rank))}, the twin's {rows}"
        for (step, rank), rows in its.items()
        if mine.get((step, rank)) != rows
    ]
    figures = [read_validation(it.folder / "metrics.jsonl") for it in (job, twin)]
    if figures[0] != figures[1]:
        faults.append(f"validation: {figures[0]}, the twin's {figures[1]}")
    return faults


def read_validation(path: Path) -> dict[int, float]:
    """Step -> loss."""
    rows = [json.loads(row) for row in path.read_text("utf-8").splitlines()]
    return {row["step"]: row["val/loss"] for row in rows if "val/loss" in row}


def mount_small_disk(folder: Path) -> bool:
    """Puts a small disk in memory under a folder, if this process may."""
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    try:
        return subprocess.run(words, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The words of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of a job")
    parser.add_argument("--start", choices=["fork", "exec"], help="fork with one rank, else exec")
    parser.add_argument("--longest-s", type=float, help="latest moment of a kill after a start")
    parser.add_argument("--folder", type=Path, help="kept; a temporary one if not given")
    arguments = parser.parse_args(argv)
    arguments.start = arguments.start or ("fork" if arguments.ranks == 1 else "exec")
    if arguments.start == "fork" and arguments.ranks > 1:
        parser.error("--start fork: Lightning starts the other ranks by the command line")
    arguments.longest_s = arguments.longest_s or (4.0 if arguments.start == "fork" else 25.0)
    return arguments


def torture(arguments: argparse.Namespace, folder: Path) -> Tally:
    """Runs the twin and as many jobs as it takes; says what it saw."""
    write_corpus(folder / "corpus")
    twin = Job(folder / "twin", folder, arguments)
    began = time.monotonic()
    code = wait(twin.start(0), 600)
    if code != 0:
        raise SystemExit(f"the run fails when it is left alone, too: see {twin.log}")
    print(f"undisturbed: {arguments.steps} steps in {time.monotonic() - began:.1f} s", flush=True)
    torturer = Torturer(folder, arguments)
    tally = torturer.tally
    while tally.kills.total() < arguments.kills and not tally.faults:
        job = Job(folder / f"job{tally.jobs}", folder, arguments)
        is_mounted = mount_small_disk(job.checkpoints)
        try:
            torturer.torture(job)
            tally.faults += compare(job, twin)
        finally:
            if is_mounted:
                subprocess.run(["umount", "-l", str(job.checkpoints)], check=False)
        print(
            f"{job.folder.name}: {tally.kills.total()} kills, {tally.starts} starts, "
            f"{time.monotonic() - began:.0f} s, {'equal' if not tally.faults else 'NOT equal'}",
            flush=True,
        )
    return tally


def main() -> None:
    """Prints a table and leaves with 1 if anything was lost."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    arguments = parse()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="torture-"))
    folder.mkdir(parents=True, exist_ok=True)
    tally = torture(arguments, folder.resolve())
    for end, count in sorted(tally.ends.items()):
        print(f"{count:5d}  {end}")
    print(f"{tally.damaged:5d}  damaged checkpoint before a start")
    for fault in tally.faults:
        print(f"FAULT: {fault}")
    where = shlex.quote(str(folder))
    verdict = "nothing was lost" if not tally.faults else f"see {where}"
    print(
        f"{tally.kills.total()} kills, {tally.jobs} jobs of {arguments.steps} steps, {arguments.ranks} rank(s), "
        f"seed {arguments.seed}: {verdict}"
    )
    sys.exit(1 if tally.faults else 0)


if __name__ == "__main__":
    main()
