"""What a job asks of SLURM when it has to stop early: to be started again, or to stay a little longer.

Nothing here may cost a run what it has done: the checkpoint is whole when these functions are called, so whatever goes
wrong is said in one line and left to the batch script or to a person.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from signal import Signals

from nemo_like.core.console import SHELL_NAMES

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""How long one call of ``scontrol`` may take: it waits for a controller that may be busy or gone."""
_NOTICE_STATES = {
    "PENDING": "waits for its next start already",
    "REQUEUED": "waits for its next start already",
    "COMPLETING": "is being taken down by the scheduler already",
    "PREEMPTED": "is being taken down by the scheduler, which starts it again if it preempts by requeueing",
}
_was_asked = False


class _Refusal(Exception):
    """Why ``scontrol`` did not do what it was asked, in one line."""


def requeue_job() -> str:
    """Asks SLURM to start this job again, once in the life of a process; to be called by rank zero.

    SLURM ends the job as soon as it has accepted, so that this may be the last that the process does.

    Returns:
        What came of it, the line that was logged; empty outside of SLURM, where there is nothing to do.
    """
    global _was_asked
    if "SLURM_JOB_ID" not in os.environ:
        return ""
    if _was_asked:
        return _say(logging.INFO, "the job was asked to be requeued before; nothing is done again")
    try:
        job = _find_job_id()
        if reason := _find_obstacle(job):
            return _say(logging.WARNING, f"job {job} is not requeued: {reason}")
        _was_asked = True
        logger.info("asking SLURM to requeue job %s", job)
        _run_scontrol("requeue", job)
    except _Refusal as refusal:
        return _say(
            logging.WARNING,
            f"the job is not requeued: {refusal}; the checkpoint is whole, submit the same command again to go on",
        )
    return _say(logging.INFO, f"job {job} is requeued and goes on from this checkpoint")


def ask_for_time(minutes: int) -> bool:
    """Asks SLURM to let this job run longer; to be called by rank zero.

    On most clusters only an operator may lengthen a job that runs: expect a refusal.

    Args:
        minutes: How much longer, at least 1.

    Returns:
        Whether it was granted; False outside of SLURM.

    Raises:
        ValueError: ``minutes`` is not positive.
    """
    if minutes < 1:
        raise ValueError(f"ask_for_time({minutes}): minutes must be at least 1")
    if "SLURM_JOB_ID" not in os.environ:
        return False
    try:
        job = _find_job_id()
        before = _read_job(job).get("TimeLimit", "")
        if before == "UNLIMITED":
            # Then it is not the limit that has sent the notice.
            _say(
                logging.WARNING,
                f"{minutes} min more were not asked for: job {job} has no time limit",
            )
            return False
        _run_scontrol("update", f"JobId={job}", f"TimeLimit={_lengthen(before, minutes, job)}")
    except _Refusal as refusal:
        _say(logging.WARNING, f"{minutes} min more were not granted: {refusal}")
        return False
    try:
        end = _read_job(job).get("EndTime", "unknown")
    except _Refusal:
        end = "unknown"
    _say(logging.INFO, f"job {job} may run {minutes} min longer; its end is now {end}")
    return True


def _find_job_id() -> str:
    """The id by which ``scontrol`` knows this job alone.

    Raises:
        _Refusal: The variables of SLURM hold no number.
    """
    # SLURM_JOB_ID will not do for an element of an array: the last element carries the id of the whole array, and
    # what is asked for that id happens to all elements.
    names = ["SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"]
    if not all(name in os.environ for name in names):
        names = ["SLURM_JOB_ID"]
    for name in names:
        if not re.fullmatch(r"[0-9]+", os.environ[name]):
            raise _Refusal(f"{name}={os.environ[name]!r} is no job id")
    return "_".join(os.environ[name] for name in names)


def _find_obstacle(job: str) -> str:
    """Why asking for a requeue is of no use; empty where nothing speaks against it.

    Raises:
        _Refusal: ``scontrol`` is missing.
    """
    if (name := os.environ.get("SLURM_JOB_NAME", "")) in SHELL_NAMES:
        return f"it is an interactive one ({name}) without a batch script to start; type the same command again"
    facts = _read_job(job)
    if facts.get("BatchFlag") == "0":
        return "it has no batch script to start (salloc or srun); type the same command again"
    if facts.get("Requeue") == "0":
        return (
            "it was submitted with --no-requeue, or on a cluster that wants to be asked (JobRequeue=0); submit with "
            "--requeue"
        )
    # The number of this start; SLURM sets it from the second one on.
    start, restarts = os.environ.get("SLURM_RESTART_COUNT", "0"), facts.get("Restarts", "0")
    if restarts.isdigit() and start.isdigit() and int(restarts) > int(start):
        return f"it was requeued already (restart {restarts})"
    state = facts.get("JobState", "")
    return f"it {_NOTICE_STATES[state]} ({state})" if state in _NOTICE_STATES else ""


def _read_job(job: str) -> dict[str, str]:
    """What ``scontrol show job`` tells; nothing where it fails, since what comes after fails with better words.

    Raises:
        _Refusal: ``scontrol`` is missing or does not answer.
    """
    try:
        shown = _run_scontrol("show", "job", job)
    except _Failure:
        return {}
    # The first line has the name of the job, which may hold anything.
    _, _, facts = shown.partition("\n")
    return dict(reversed(re.findall(r"(\w+)=(\S+)", facts)))


class _Failure(_Refusal):
    """``scontrol`` answered with an error."""


def _run_scontrol(*words: str) -> str:
    """What ``scontrol`` writes.

    Raises:
        _Refusal: It is missing, does not answer in time, or fails.
    """
    command = " ".join(("scontrol", *words))
    try:
        done = subprocess.run(
            ["scontrol", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise _Refusal(
            "there is no scontrol here, as is usual inside a container: mount it together with the configuration of "
            "SLURM, or let the batch script requeue on exit code 75, as examples/slurm/preemptible.sbatch does"
        ) from None
    except subprocess.TimeoutExpired:
        raise _Refusal(f"{command} did not answer in {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise _Refusal(f"{command} cannot be run: {error}") from None
    if done.returncode < 0:
        # scontrol is one of the processes of the job, and goes down with it.
        raise _Failure(
            f"{command} was ended by {Signals(-done.returncode).name}, probably because SLURM takes the job down"
        )
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or "nothing"
        raise _Failure(f"{command} failed with exit code {done.returncode} and said: {said}")
    return done.stdout


def _lengthen(limit: str, minutes: int, job: str) -> str:
    """A time limit in the notation of ``scontrol update``, ``minutes`` more than ``limit``."""
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", limit)
    if "_" not in job or parts is None:
        return f"+{minutes}"
    # An element that runs cannot be lengthened by a difference: "only before the array has been split".
    days, hours, whole, seconds = (int(it or 0) for it in parts.groups())
    return str((days * 24 + hours) * 60 + whole + (seconds > 0) + minutes)


def _say(level: int, line: str) -> str:
    logger.log(level, "%s", line)
    return line
