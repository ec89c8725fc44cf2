"""A signal sets a flag; a second one ends the process; what was found is put back."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_like.core import notice
from nemo_like.core.units import parse_duration
from nemo_like.data.jsonl_zst import read_documents
from nemo_like.data.tokenize import TokenCorpus, tokenize_corpus
from nemo_like.testing.corpus import write_corpus
from nemo_like.text.tokenizer import train_bpe

DEFAULT = notice.DEFAULT_SIGNALS


def handlers() -> list[Any]:
    return [signal.getsignal(signal.Signals[name]) for name in DEFAULT]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("name", DEFAULT)
def test_a_signal_is_noticed_and_handlers_are_left_as_found(name: str) -> None:
    signal.signal(signal.SIGUSR2, lambda *_: None)
    before = handlers()
    with notice.listen():
        assert notice.find_signal() is None
        send(signal.Signals[name])
        assert notice.find_signal() == signal.Signals[name]
    assert notice.find_signal() is None
    assert handlers() == before


def test_handlers_are_left_as_found_after_a_failure() -> None:
    before = handlers()
    with pytest.raises(RuntimeError, match="broken"), notice.listen():
        raise RuntimeError("broken")
    assert handlers() == before


def test_the_outer_listener_is_the_one_that_ends() -> None:
    before = handlers()
    with notice.listen():
        with notice.listen(["SIGTERM"]):
            pass
        send(signal.SIGTERM)
        assert notice.find_signal() == signal.SIGTERM
        # Only these from now on; the others do again what they did.
        assert signal.getsignal(signal.SIGINT) is before[3]
    assert handlers() == before


def test_a_handler_that_was_put_over_ours_is_taken_off() -> None:
    with notice.listen():
        ours, foreign = signal.getsignal(signal.SIGTERM), lambda *_: None
        signal.signal(signal.SIGTERM, foreign)
        notice.reclaim()
        assert signal.getsignal(signal.SIGTERM) == ours


def test_ours_does_what_stood_there_if_somebody_puts_it_back_after_the_end() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    with notice.listen():
        ours = signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, ours)
    send(signal.SIGUSR2)
    assert heard == [signal.SIGUSR2]


def test_ctrl_c_stays_off_in_a_background_job() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with notice.listen():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_notice_that_is_settled_makes_room_for_the_next() -> None:
    with notice.listen():
        send(signal.SIGUSR1)
        notice.forget()
        assert notice.find_signal() is None
        send(signal.SIGTERM)
        assert notice.find_signal() == signal.SIGTERM


def test_another_thread_is_told_why_it_hears_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = handlers()

    def listen() -> None:
        with notice.listen():
            notice.reclaim()

    thread = threading.Thread(target=listen, name="aside")
    with caplog.at_level(logging.WARNING, "nemo_like"):
        thread.start()
        thread.join()
    assert "the run is in thread aside" in caplog.text
    assert handlers() == before


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    imports = "import os, signal, sys, time\nfrom nemo_like.core import notice\nme = os.getpid()\n"
    return subprocess.run(
        [sys.executable, "-c", imports + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("first", "second", "pause_s", "code"),
    [
        ("SIGTERM", "SIGTERM", 1.1, 143),
        ("SIGUSR1", "SIGTERM", 1.1, 143),
        ("SIGINT", "SIGINT", 0.4, 130),
        ("SIGINT", "SIGINT", 0.05, 9),
        ("SIGUSR1", "SIGTERM", 0.4, 9),
    ],
)
def test_a_second_signal_ends_at_once_and_an_echo_does_not(
    first: str, second: str, pause_s: float, code: int
) -> None:
    done = run_python(
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"with notice.listen():\n  os.kill(me, signal.{first}); time.sleep({pause_s})\n"
        f"  os.kill(me, signal.{second})\n  try: os._exit(9)\n  finally: print('never')"
    )
    assert done.returncode == code
    assert ("ended at once, unsaved" in done.stderr) == (code != 9)


def test_workers_do_not_survive_the_second_signal() -> None:
    started = time.monotonic()
    done = run_python(
        "import multiprocessing\n"
        "with notice.listen():\n"
        "  worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(50,))\n"
        "  worker.start()\n"
        "  os.kill(me, signal.SIGTERM); time.sleep(1.1); os.kill(me, signal.SIGTERM)"
    )
    assert done.returncode == 143
    # The worker holds the pipes as well, which would stay open for 50 s.
    assert time.monotonic() - started < 30


def test_once_all_is_saved_signals_change_nothing() -> None:
    done = run_python(
        "with notice.listen():\n  notice.ignore(); notice._current.first = (0, -99.0)\n"
        "  os.kill(me, signal.SIGTERM); os.kill(me, signal.SIGTERM)\nsys.exit(75)"
    )
    assert done.returncode == 75, done.stderr


def test_a_worker_works_on_after_a_notice_to_its_group() -> None:
    done = run_python(
        "def work():\n"
        "  notice.outlast_notice(0)\n"
        "  for number in (2, 10, 12, 15): os.kill(os.getpid(), number)\n"
        "  print('works', flush=True)\n"
        "  os.kill(os.getpid(), 15)\n"
        "  time.sleep(50)\n"
        "import multiprocessing\n"
        "with notice.listen():\n"
        "  worker = multiprocessing.get_context('fork').Process(target=work)\n"
        "  worker.start(); worker.join(); print(worker.exitcode)"
    )
    assert done.stdout.split() == ["works", "-15"]


def test_a_process_that_was_forked_is_ended_by_sigterm_alone() -> None:
    done = run_python(
        "def work():\n"
        "  for number in (2, 10, 12, 10): os.kill(os.getpid(), number)\n"
        "  print('works', flush=True)\n"
        "  time.sleep(50)\n"
        "import multiprocessing\n"
        "with notice.listen():\n"
        "  worker = multiprocessing.get_context('fork').Process(target=work)\n"
        "  worker.start(); time.sleep(0.5); worker.terminate(); worker.join(); print(worker.exitcode)"
    )
    assert done.stdout.split() == ["works", "-15"]


# Leaving while a run starts.


def clear_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_one_process_leaves_at_a_seam(
    name: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear_launch(monkeypatch)
    with notice.listen():
        notice.leave_if_asked()
        send(signal.Signals[name])
        with pytest.raises(notice.StopRun, match=str(code)) as stop:
            notice.leave_if_asked()
    assert stop.value.reason == f"{name} before the first step"
    assert not stop.value.is_settled


@pytest.mark.parametrize(
    "launch",
    [
        {"WORLD_SIZE": "2"},
        {"LOCAL_RANK": "1"},
        {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NAME": "train"},
    ],
)
def test_one_of_several_processes_does_not_leave_alone(
    launch: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clear_launch(monkeypatch)
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    with notice.listen():
        send(signal.SIGTERM)
        notice.leave_if_asked()
        assert not notice.is_alone()


def test_the_age_of_a_process_counts_from_its_start() -> None:
    first, began = notice.measure_age_s(), time.monotonic()
    time.sleep(0.1)
    assert notice.measure_age_s() - first == pytest.approx(time.monotonic() - began, abs=0.05)
    done = run_python("time.sleep(0.3); print(notice.measure_age_s())")
    assert 0.3 < float(done.stdout) < 30


def test_durations_are_read() -> None:
    assert parse_duration("03:45:01") == 3 * 3600 + 45 * 60 + 1
    assert parse_duration("02:00:00:30") == 2 * 86400 + 30
    for text in ("90", "1:2", "-1:00:00", "1:00:0x", "1:2:3:4:5", "²:00:00"):
        with pytest.raises(ValueError, match=f"'{text}' is no duration: write HH:MM:SS"):
            parse_duration(text)


def test_tokenizing_is_left_and_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear_launch(monkeypatch)
    paths = list(write_corpus(tmp_path / "corpus").values())
    tokenizer = train_bpe((it.text for it in read_documents(paths)), vocab_size=300)

    def tokenize() -> TokenCorpus:
        cache_dir = tmp_path / "cache"
        return tokenize_corpus(
            paths, tokenizer=tokenizer, cache_dir=cache_dir, held_out_fraction=0.1
        )

    with notice.listen():
        send(signal.SIGTERM)
        with pytest.raises(notice.StopRun, match="75"):
            tokenize()
    assert list((tmp_path / "cache" / "tokens").glob("*.part")) == []
    assert tokenize().subsets


def test_the_command_listens_before_torch_is_loaded() -> None:
    done = run_python("import nemo_like.core.run; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr
