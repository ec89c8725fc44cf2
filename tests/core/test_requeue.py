"""What is asked of SLURM, and what is said when it does not answer as hoped."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.core import requeue
from nemo_like.core.requeue import ask_for_time, requeue_job

JOB = """JobId=77 JobName=odd Requeue=0 JobState=PENDING
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   JobState={state} Reason=None Dependency=(null)
   Requeue={requeue} Restarts={restarts} BatchFlag={batch} Reboot=0 ExitCode=0:0
   RunTime=00:58:00 TimeLimit={limit} TimeMin=N/A
   StartTime=2026-01-01T10:00:00 EndTime=2026-01-01T11:00:00 Deadline=N/A
   Command=/home/me/train.sbatch JobState=FAILED Requeue=0
"""

Slurm = Callable[..., Path]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Slurm:
    """A job 77, and a ``scontrol`` that notes its calls in the file that is given."""
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setattr(requeue, "_was_asked", False)

    def install(answer: str = "", *, show: str = "", **facts: object) -> Path:
        usual = {
            "state": "RUNNING",
            "requeue": 1,
            "restarts": 0,
            "batch": 1,
            "limit": "01:00:00",
        }
        (tmp_path / "job").write_text(JOB.format(**{**usual, **facts}))
        script = tmp_path / "bin" / "scontrol"
        script.parent.mkdir(exist_ok=True)
        script.write_text(
            f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\n'
            f'if [ "$1" = show ]; then {show or "cat"} "{tmp_path}/job"; exit; fi\n{answer}\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
        return tmp_path / "calls"

    return install


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """The last line of the log, with its level."""
    monkeypatch.setattr(logging.getLogger("nemo_like"), "propagate", True)
    caplog.set_level(logging.INFO, "nemo_like")
    return lambda: f"{caplog.records[-1].levelname} {caplog.records[-1].getMessage()}"


def read_calls(calls: Path) -> list[str]:
    return calls.read_text().splitlines() if calls.exists() else []


def test_a_job_is_requeued_once_in_the_life_of_a_process(
    slurm: Slurm, said: Callable[[], str]
) -> None:
    calls = slurm()
    assert requeue_job() == "job 77 is requeued and goes on from this checkpoint"
    assert said() == "INFO job 77 is requeued and goes on from this checkpoint"
    assert "was asked to be requeued before" in requeue_job()
    assert said().startswith("INFO the job was asked")
    assert read_calls(calls) == ["show job 77", "requeue 77"]


def test_outside_of_slurm_nobody_is_asked(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = slurm()
    monkeypatch.delenv("SLURM_JOB_ID")
    assert requeue_job() == ""
    assert ask_for_time(5) is False
    assert read_calls(calls) == []


def test_the_last_element_of_an_array_does_not_requeue_the_whole_array(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    calls = slurm()
    assert requeue_job().startswith("job 77_3 is requeued")
    assert read_calls(calls) == ["show job 77_3", "requeue 77_3"]


@pytest.mark.parametrize("name", ["interactive", "bash"])
def test_an_interactive_job_is_not_requeued(
    slurm: Slurm, name: str, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NAME", name)
    calls = slurm()
    assert f"job 77 is not requeued: it is an interactive one ({name})" in requeue_job()
    assert said().startswith("WARNING")
    assert read_calls(calls) == []


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"batch": 0}, "it has no batch script to start"),
        ({"requeue": 0}, "it was submitted with --no-requeue"),
        ({"restarts": 1}, r"it was requeued already \(restart 1\)"),
        ({"state": "PENDING"}, r"it waits for its next start already \(PENDING\)"),
        ({"state": "REQUEUED"}, r"it waits for its next start already \(REQUEUED\)"),
        ({"state": "COMPLETING"}, r"it is being taken down .* already \(COMPLETING\)"),
        ({"state": "PREEMPTED"}, r"it is being taken down .* by requeueing \(PREEMPTED\)"),
    ],
)  # fmt: skip
def test_what_cannot_or_need_not_be_requeued_is_said(
    slurm: Slurm, facts: dict[str, object], reason: str, said: Callable[[], str]
) -> None:
    calls = slurm(**facts)
    requeue_job()
    assert re.search(f"WARNING job 77 is not requeued: {reason}", said()), said()
    assert read_calls(calls) == ["show job 77"]


def test_a_second_start_may_be_requeued_again(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    slurm(restarts=1)
    assert requeue_job().startswith("job 77 is requeued")


def test_a_job_whose_facts_cannot_be_read_is_requeued_all_the_same(slurm: Slurm) -> None:
    calls = slurm(show="false")
    assert requeue_job().startswith("job 77 is requeued")
    assert read_calls(calls) == ["show job 77", "requeue 77"]


def test_a_refusal_is_quoted(slurm: Slurm, said: Callable[[], str]) -> None:
    slurm('echo "Requested operation is presently disabled\nfor job 77" >&2; exit 1')
    assert requeue_job() == (
        "the job is not requeued: scontrol requeue 77 failed with exit code 1 and said: Requested operation is "
        "presently disabled for job 77; the checkpoint is whole, submit the same command again to go on"
    )
    assert said().startswith("WARNING the job is not requeued")
    assert "was asked to be requeued before" in requeue_job()


def test_without_scontrol_the_remedy_is_said(
    slurm: Slurm, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "let the batch script requeue on exit code 75" in requeue_job()
    assert said().startswith("WARNING the job is not requeued: there is no scontrol here")
    assert ask_for_time(5) is False
    assert said().startswith("WARNING 5 min more were not granted: there is no scontrol here")


def test_a_scontrol_that_cannot_be_run_is_no_trace_back(slurm: Slurm) -> None:
    slurm()
    script = Path(os.environ["PATH"].split(os.pathsep)[0]) / "scontrol"
    script.write_bytes(b"\x7fELF, for another machine")
    assert "scontrol show job 77 cannot be run: " in requeue_job()


def test_a_scheduler_that_does_not_answer_is_not_waited_for(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requeue, "TIMEOUT_S", 0.3)
    slurm("exec sleep 30")
    started = time.monotonic()
    assert "scontrol requeue 77 did not answer in 0.3 s" in requeue_job()
    slurm(show="exec sleep 30;")
    assert ask_for_time(5) is False
    assert time.monotonic() - started < 10


def test_a_scontrol_that_goes_down_with_the_job_is_said(slurm: Slurm) -> None:
    slurm("kill -TERM $$")
    assert "scontrol requeue 77 was ended by SIGTERM, probably because SLURM takes" in requeue_job()


@pytest.mark.parametrize("job", ["77; rm -rf x", "", "-h", "\u0667"])
def test_what_is_no_job_id_reaches_no_command(
    slurm: Slurm, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    calls = slurm()
    assert f"SLURM_JOB_ID={job!r} is no job id" in requeue_job()
    assert ask_for_time(5) is False
    assert read_calls(calls) == []


def test_more_time_is_asked_for_and_the_new_end_is_said(
    slurm: Slurm, said: Callable[[], str]
) -> None:
    calls = slurm()
    assert ask_for_time(30) is True
    assert said() == "INFO job 77 may run 30 min longer; its end is now 2026-01-01T11:00:00"
    assert "update JobId=77 TimeLimit=+30" in read_calls(calls)


def test_more_time_that_is_refused_is_said_with_the_words_of_slurm(
    slurm: Slurm, said: Callable[[], str]
) -> None:
    slurm("echo 'Access/permission denied for job 77' >&2; exit 1")
    assert ask_for_time(30) is False
    assert said() == (
        "WARNING 30 min more were not granted: scontrol update JobId=77 TimeLimit=+30 failed with exit code 1 and "
        "said: Access/permission denied for job 77"
    )


@pytest.mark.parametrize(
    ("limit", "asked"), [("01:00:00", "90"), ("2-00:00:01", "2911"), ("Partition_Limit", "+30")]
)
def test_the_limit_of_an_element_of_an_array_is_set_as_a_whole(
    slurm: Slurm, limit: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    calls = slurm(limit=limit)
    assert ask_for_time(30) is True
    assert f"update JobId=70_7 TimeLimit={asked}" in read_calls(calls)


def test_a_job_without_a_limit_asks_for_nothing(slurm: Slurm, said: Callable[[], str]) -> None:
    calls = slurm(limit="UNLIMITED")
    assert ask_for_time(30) is False
    assert said() == "WARNING 30 min more were not asked for: job 77 has no time limit"
    assert read_calls(calls) == ["show job 77"]


@pytest.mark.parametrize("minutes", [0, -5])
def test_less_time_is_not_asked_for(minutes: int) -> None:
    with pytest.raises(ValueError, match=rf"ask_for_time\({minutes}\): minutes must be at least 1"):
        ask_for_time(minutes)
