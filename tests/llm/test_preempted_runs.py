"""The real command, told to stop: by signals, at every stage, on one rank of two, by SLURM."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.core import run
from nemo_like.core.checkpoint import find_checkpoints
from nemo_like.testing.corpus import write_corpus

ROOT = Path(__file__).resolve().parents[2]
SLURM = ROOT / "examples" / "slurm"
SMALL = [
    "+conf=llm/quickstart", "data.tokenizer.train_vocab_size=300", "data.seq_len=32", "data.global_batch_size=4",
    "data.held_out_fraction=0.2", "strategy.micro_batch_size=1", "model.network.vocab_size=300",
    "model.network.hidden_size=32", "model.network.num_layers=2", "model.network.num_heads=2",
    "model.network.intermediate_size=64", "model.network.max_positions=32", "model.network.dropout=0.1",
    "model.sample_tokens=5", "trainer.max_steps=6", "trainer.val_every_n_steps=3", "trainer.val_batches=4",
    "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "schedule.warmup_steps=2", "callbacks.report=null",
]  # fmt: skip
# A callback that sends signals to its own process, at a step and on a rank.
HIT = """
import os, signal, sys, time
import lightning.pytorch as pl

class Hit(pl.Callback):
    def __init__(self, *, step, names, rank=0, pause_s=0.0, at_once=False, to_group=False):
        self.step, self.names, self.rank, self.pause_s = step, names, rank, pause_s
        self.pid = 0 if to_group else os.getpid()
        if at_once:
            self.send()

    def on_train_batch_start(self, trainer, *arguments):
        # A run that goes on does not come by again.
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            self.send()

    def send(self):
        for name in self.names:
            os.kill(self.pid, signal.Signals[name])
            time.sleep(self.pause_s)

class Fail(pl.Callback):
    def __init__(self, *, rank=0):
        self.rank = rank

    def on_train_batch_start(self, trainer, *arguments):
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            raise OSError("broken here")
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    write_corpus(tmp_path / "corpus")
    (tmp_path / "hit.py").write_text(HIT)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("hit", None)
    return [
        *SMALL,
        f"data.corpus={tmp_path}/corpus/*.jsonl.zst",
        f"data.cache_dir={tmp_path}/cache",
        "allow_targets=[hit.]",
    ]


def hit(step: int, *names: str, **options: Any) -> list[str]:
    keys = {"step": step, "names": f"[{','.join(names)}]", **options}
    return [
        "+callbacks.hit._target_=hit.Hit",
        *(f"+callbacks.hit.{k}={v}" for k, v in keys.items()),
    ]


def start(words: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        run.main("pretrain", words)
    return int(end.value.code or 0)


def environment(folder: Path, *first: Path) -> dict[str, str]:
    foreign = ("SLURM_", "TORCHELASTIC_", "MASTER_", "NEMO_LIKE_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(foreign) and not name.endswith(("RANK", "WORLD_SIZE"))
    }
    path = [*first, Path(sys.executable).parent, os.environ["PATH"]]
    return kept | {
        "PATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
    }


def command(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """As a shell in the foreground starts it."""
    listening = "import os, signal as s, sys; s.signal(s.SIGINT, s.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    script = [sys.executable, str(ROOT / "examples/llm/pretrain.py"), *words]
    return subprocess.run(
        [sys.executable, "-c", listening, *script],
        env=environment(folder), capture_output=True, text=True, timeout=280, check=False, start_new_session=True,
    )  # fmt: skip


def status(run_dir: Path) -> tuple[str, int, str]:
    found = json.loads((run_dir / "status.json").read_text())
    return found["state"], found["step"], found["reason"]


def steps_saved(run_dir: Path) -> list[int]:
    return [int(it.name.rpartition("_")[2]) for it in find_checkpoints(run_dir / "checkpoints")]


def assert_same_weights(one: Path, other: Path) -> None:
    from nemo_like.collections.llm.decoder import DecoderModel

    weights = [
        DecoderModel.load(find_checkpoints(it / "checkpoints")[-1]).state_dict()
        for it in (one, other)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_interrupted_three_times_equals_uninterrupted(small: list[str], tmp_path: Path) -> None:
    words, folder = [*small, f"run_dir={tmp_path}/a"], tmp_path / "a"
    before = [signal.getsignal(it) for it in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    assert start([*words, *hit(0, "SIGTERM", at_once=True)]) == 75
    assert status(folder) == ("stopped", 0, "SIGTERM before the first step")
    assert not (folder / "checkpoints").exists()
    assert start([*words, *hit(1, "SIGUSR1")]) == 75
    assert status(folder) == ("stopped", 2, "SIGUSR1")
    assert start([*words, *hit(3, "SIGINT"), "trainer.max_time=99:00:00"]) == 130
    assert status(folder) == ("stopped", 4, "Ctrl-C (SIGINT)")
    assert [
        signal.getsignal(it) for it in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    ] == before
    assert start(words) == 0
    assert status(folder) == ("finished", 6, "")
    assert start([*words, *hit(0, "SIGTERM", at_once=True)]) == 0
    assert status(folder) == ("finished", 6, "")
    assert start([*small, f"run_dir={tmp_path}/b"]) == 0
    assert_same_weights(folder, tmp_path / "b")


def test_the_end_of_a_run_that_is_stopped_is_not_held(small: list[str], tmp_path: Path) -> None:
    words = [it for it in small if it != "callbacks.report=null"]
    folder = tmp_path / "a"
    assert start([*words, f"run_dir={folder}", *hit(1, "SIGTERM")]) == 75
    assert not (folder / "report.html").exists()
    assert steps_saved(folder) == [2]


def test_max_time_and_the_sentinel_of_the_run_folder(small: list[str], tmp_path: Path) -> None:
    words, folder = [*small, f"run_dir={tmp_path}/a"], tmp_path / "a"
    assert start([*words, "trainer.max_time=00:00:01"]) == 75  # this process is older
    assert status(folder) == ("stopped", 0, "max_time=00:00:01 is over")
    (folder / "STOP").touch()
    assert start(words) == 75
    assert not (folder / "STOP").exists()
    assert status(folder)[2] == f"{folder}/STOP is there"


def test_a_failure_is_noted(small: list[str], tmp_path: Path) -> None:
    words = [*small, f"run_dir={tmp_path}/a", "+callbacks.fail._target_=hit.Fail"]
    with pytest.raises(OSError, match="broken here"):
        run.main("pretrain", words)
    assert status(tmp_path / "a") == ("failed", 2, "OSError: broken here")


def test_without_the_callback_signals_keep_their_meaning(small: list[str], tmp_path: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    words = [*small, f"run_dir={tmp_path}/a", "callbacks.preemption=null", *hit(1, "SIGUSR1")]
    assert start(words) == 0
    assert heard == [signal.SIGUSR1]


def test_a_wrong_max_time_is_refused(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start([*small, f"run_dir={tmp_path}/a", "trainer.max_time=90"]) == 2
    assert "max_time" in (said := capsys.readouterr().err)
    assert "write HH:MM:SS or DD:HH:MM:SS" in said


@pytest.mark.dist
def test_ctrl_c_twice_ends_at_once_with_its_workers(small: list[str], tmp_path: Path) -> None:
    words = [
        *small,
        f"run_dir={tmp_path}/a",
        "data.num_workers=1",
        *hit(2, "SIGINT", "SIGINT", pause_s=0.5),
    ]
    started = time.monotonic()
    done = command(tmp_path, words)  # returns when nobody holds its output
    assert done.returncode == 130, done.stderr
    assert "SIGINT after the first notice; ended at once, unsaved" in done.stderr
    assert steps_saved(tmp_path / "a") == []
    assert time.monotonic() - started < 200


@pytest.mark.dist
def test_a_signal_to_one_rank_of_two_stops_both_and_the_same_command_goes_on(
    small: list[str], tmp_path: Path
) -> None:
    words = [*small, "trainer.devices=2"]
    done = command(tmp_path, [*words, f"run_dir={tmp_path}/a", *hit(1, "SIGTERM", rank=1)])
    assert done.returncode == 75, done.stderr
    assert not any(it in done.stderr for it in ("killed", "Traceback", "error", "the other ranks"))
    assert status(tmp_path / "a") == ("stopped", 3, "SIGTERM")
    assert steps_saved(tmp_path / "a") == [3]
    assert command(tmp_path, [*words, f"run_dir={tmp_path}/a"]).returncode == 0
    assert status(tmp_path / "a") == ("finished", 6, "")


@pytest.mark.slow
@pytest.mark.dist
def test_a_notice_to_all_processes_leaves_the_workers_at_work(
    small: list[str], tmp_path: Path
) -> None:
    words = [
        *small,
        f"run_dir={tmp_path}/a",
        "data.num_workers=1",
        *hit(2, "SIGTERM", to_group="true"),
    ]
    done = command(tmp_path, words)
    assert done.returncode == 75, done.stderr
    assert steps_saved(tmp_path / "a") == [3]
    assert "worker" not in done.stderr


@pytest.mark.slow
@pytest.mark.dist
def test_a_failure_of_another_rank_is_noted(small: list[str], tmp_path: Path) -> None:
    fail = ["+callbacks.fail._target_=hit.Fail", "+callbacks.fail.rank=1"]
    done = command(tmp_path, [*small, f"run_dir={tmp_path}/a", "trainer.devices=2", *fail])
    assert done.returncode == 1
    assert status(tmp_path / "a")[0] == "failed"


@pytest.mark.slow
@pytest.mark.dist
def test_two_tasks_of_slurm_end_with_75(small: list[str], tmp_path: Path) -> None:
    words = [
        *small,
        f"run_dir={tmp_path}/a",
        *hit(1, "SIGUSR1", rank=1),
        "callbacks.preemption.requeue=false",
    ]
    done = subprocess.run(
        ["bash", "-c", f"sbatch --nodes=2 --ntasks-per-node=1 {SLURM}/multi_node.sbatch {shlex.join(words)}"],
        cwd=ROOT, env=environment(tmp_path, SLURM / "rehearsal"),
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 75, done.stderr
    assert re.search(r"task 0: .* 75\n", done.stderr)
    assert "task 1: " not in done.stderr
    assert status(tmp_path / "a") == ("stopped", 3, "SIGUSR1")
