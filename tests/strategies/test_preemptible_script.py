"""What becomes of a job of examples/slurm/preemptible.sbatch that has to stop, with stand-ins for SLURM's commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_like.core.compose import check_run
from nemo_like.core.notice import EXIT_INTERRUPTED, EXIT_STOPPED
from nemo_like.core.run import EXIT_CONFIG, EXIT_FAILED
from nemo_like.testing.corpus import write_corpus

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "preemptible.sbatch"
MANIFEST = ROOT / "examples" / "kubernetes" / "job.yaml"
PAGE = ROOT / "docs" / "howto" / "preemption.md"
REHEARSAL = ROOT / "examples" / "slurm" / "rehearsal"
ASK = f'{sys.executable} -c "from nemo_like.core.requeue import requeue_job as ask; print(ask())"'

Submit = Callable[..., "subprocess.Popen[str]"]


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """A shell outside any job, in which the ``python`` of ``folder`` and the stand-ins come before all else."""
    foreign = ("SLURM_", "TORCHELASTIC_", "MASTER_", "NEMO_LIKE_", "REHEARSAL_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(foreign) and not name.endswith(("RANK", "WORLD_SIZE"))
    }
    path = [folder / "bin", REHEARSAL, Path(sys.executable).parent, os.environ["PATH"]]
    ours = {
        "PATH": os.pathsep.join(map(str, path)),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "REHEARSAL_KILL_WAIT_S": "3",
    }
    return {**kept, **ours, **variables}


def write_python(folder: Path, task: str, *, name: str = "python") -> None:
    """A command that runs this bash; it knows its rank and which start of the job it is."""
    script = folder / "bin" / name
    script.parent.mkdir(exist_ok=True)
    head = "start=${SLURM_RESTART_COUNT:-0} rank=${SLURM_PROCID:-0}"
    script.write_text(f"#!/usr/bin/env bash\n{head}\n{task}\n")
    script.chmod(0o755)


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Submit]:
    """Submits the script; ``task`` is bash that stands for ``python``."""
    submitted = []

    def start(
        *options: str, task: str = "", words: list[str] | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        write_python(tmp_path, task or f'exec {sys.executable} "$@"')
        process = subprocess.Popen(
            ["sbatch", "--ntasks-per-node=1", *options, str(SCRIPT), *(words or [])],
            cwd=ROOT,
            env=environment(tmp_path, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        submitted.append(process)
        return process

    yield start
    for process in submitted:
        process.terminate()
        process.wait(timeout=30)


def say(process: subprocess.Popen[str], timeout_s: float = 60) -> str:
    return process.communicate(timeout=timeout_s)[0]


def test_a_rank_that_has_the_job_requeued_is_started_again_once(submit: Submit) -> None:
    task = f"echo start $start; ((start)) && exit 0; {ASK}; exit 75"
    job = submit(task=task)
    said = say(job)
    assert job.returncode == 0, said
    assert re.findall(r"start \d", said) == ["start 0", "start 1"]
    assert f"job {job.pid} is requeued and goes on from this checkpoint" in said
    assert "exit code 75: requeueing" not in said


def test_where_ranks_have_no_scontrol_the_script_requeues(submit: Submit) -> None:
    task = f"echo start $start; ((start)) && exit 0; PATH=/usr/bin:/bin; {ASK}; exit 75"
    job = submit(task=task)
    said = say(job)
    assert job.returncode == 0, said
    assert "the job is not requeued: there is no scontrol here" in said
    assert f"exit code 75: requeueing job {job.pid}" in said
    assert re.findall(r"start \d", said) == ["start 0", "start 1"]


def test_a_job_may_be_stopped_many_times(submit: Submit) -> None:
    said = say(submit(task="echo start $start; ((start < 4)) && exit 75; exit 0"))
    assert re.findall(r"start \d", said) == [f"start {it}" for it in range(5)]


@pytest.mark.parametrize("code", [1, 2, 130, 137])
def test_a_job_that_failed_is_not_requeued(submit: Submit, code: int) -> None:
    job = submit(task=f"echo start $start; exit {code}")
    said = say(job)
    assert job.returncode == code
    assert re.findall(r"start \d", said) == ["start 0"]


@pytest.mark.parametrize(
    ("option", "variables"), [("--no-requeue", {}), ("", {"REHEARSAL_REFUSE": "requeue"})]
)
def test_a_refusal_is_said_and_the_code_stays(
    submit: Submit, option: str, variables: dict[str, str]
) -> None:
    job = submit(*filter(None, [option]), task=f"{ASK}; exit 75", **variables)
    said = say(job)
    assert job.returncode == 75
    words = "was submitted with --no-requeue" if option else "and said: Requested operation is"
    assert re.search(f"not requeued: .*{words}", said), said
    assert f"Requested operation is presently disabled for job {job.pid}" in said
    assert "not requeued; the checkpoint is whole, submit the same command again" in said


def test_each_element_of_an_array_is_requeued_alone(submit: Submit) -> None:
    task = "echo is $SLURM_ARRAY_TASK_ID start $start; ((start)) && exit 0; exit 75"
    job = submit("--array=4-5%1", task=task)
    said = say(job)
    assert job.returncode == 0, said
    assert re.findall(r"is \d start \d", said) == [
        "is 4 start 0", "is 4 start 1", "is 5 start 0", "is 5 start 1"
    ]  # fmt: skip
    assert re.findall(r"requeueing job (\w+)", said) == [f"{job.pid}_4", f"{job.pid}_5"]


WAIT = "for i in {1..300}; do sleep 0.1; done"


def test_the_notice_goes_to_the_tasks_of_all_nodes_and_not_to_the_shell(submit: Submit) -> None:
    trap = "trap 'echo notice $rank; ((rank)) && exit 0; sleep 1; exit 75' USR1"
    task = f"((start)) && exit 0; {trap}; echo begin; {WAIT}"
    job = submit("--nodes=2", "--time=0:00:05", "--signal=USR1@4", task=task)
    said = say(job)
    assert job.returncode == 0, said
    assert sorted(re.findall(r"notice \d", said)) == ["notice 0", "notice 1"]
    assert "TIME LIMIT" not in said
    assert "exit code 75: requeueing" in said


def test_what_hears_nothing_is_killed_at_the_limit_and_not_started_again(submit: Submit) -> None:
    task = f"trap '' USR1 TERM; echo start $start; {WAIT}"
    job = submit("--time=0:00:01", "--signal=USR1@1", task=task, REHEARSAL_KILL_WAIT_S="0.5")
    said = say(job)
    assert job.returncode != 0
    assert f"JOB {job.pid} ON localhost CANCELLED DUE TO TIME LIMIT" in said
    assert re.findall(r"start \d", said) == ["start 0"]


def test_more_time_moves_the_end_of_the_job(submit: Submit) -> None:
    ask = f"{sys.executable} -c 'from nemo_like.core.requeue import ask_for_time as ask; print(ask(1))'"
    task = f"{ask}; scontrol show job $SLURM_JOB_ID"
    said = say(submit("--time=0:01:00", "--signal=USR1@1", task=task))
    assert said.startswith("True"), said
    assert "TimeLimit=00:02:00" in said
    said = say(submit("--time=0:01:00", "--signal=USR1@1", task=task, REHEARSAL_REFUSE="update"))
    assert "1 min more were not granted: scontrol update" in said
    assert "Access/permission denied" in said
    assert "TimeLimit=00:01:00" in said


def test_a_signal_of_scancel_reaches_the_tasks_and_its_word_ends_the_job(
    submit: Submit, tmp_path: Path
) -> None:
    job = submit(task=f"trap 'exit 75' USR1; touch $TMPDIR/ready.$start; {WAIT}")
    for start, words in enumerate([["--signal=USR1"], []]):
        wait_for((tmp_path / f"ready.{start}").exists, job)
        subprocess.run(["scancel", *words, str(job.pid)], env=environment(tmp_path), check=True)
    said = say(job)
    assert "exit code 75: requeueing" in said
    assert "CANCELLED BY THE USER" in said
    assert job.returncode == 128 + signal.SIGTERM
    gone = subprocess.run(
        ["scancel", str(job.pid)], env=environment(tmp_path), capture_output=True, text=True
    )
    assert f"Kill job error on job id {job.pid}: Invalid job id" in gone.stderr


def wait_for(
    condition: Callable[[], bool], job: subprocess.Popen[str], timeout_s: float = 120
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert job.poll() is None, say(job)
        assert time.monotonic() < deadline
        time.sleep(0.05)


# With real runs.

SMALL = [
    "+conf=llm/quickstart", "data.tokenizer.train_vocab_size=300", "data.seq_len=32", "data.global_batch_size=4",
    "data.held_out_fraction=0.2", "strategy.micro_batch_size=1", "model.network.vocab_size=300",
    "model.network.hidden_size=32", "model.network.num_layers=2", "model.network.num_heads=2",
    "model.network.intermediate_size=64", "model.network.max_positions=32", "model.sample_tokens=5",
    "trainer.max_steps=200", "trainer.val_every_n_steps=100", "trainer.val_batches=2", "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1", "checkpoint.every_n_steps=1000", "callbacks.report=null",
]  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """The words of a run that takes some seconds and saves nothing before its end."""
    write_corpus(tmp_path / "corpus")
    places = [f"data.corpus={tmp_path}/corpus/*.jsonl.zst", f"data.cache_dir={tmp_path}/cache"]
    return [*SMALL, *places, f"run_dir={tmp_path}/run"]


def has_trained(run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def assert_finished_once(run_dir: Path) -> None:
    """Every step was done, and none was done twice."""
    assert json.loads((run_dir / "status.json").read_text())["state"] == "finished"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [it["step"] for it in lines if "train/loss" in it] == list(range(1, 201))


@pytest.mark.dist
@pytest.mark.parametrize(
    "has_scontrol", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["slurm", "container"]
)
def test_a_job_whose_time_is_up_is_saved_requeued_once_and_goes_on(
    submit: Submit, small: list[str], tmp_path: Path, has_scontrol: bool
) -> None:
    where = "" if has_scontrol else "PATH=/usr/bin:/bin "
    job = submit("--nodes=2", task=f'{where}exec {sys.executable} "$@"', words=small)
    wait_for(lambda: has_trained(tmp_path / "run"), job)
    # A user may shorten a job: five minutes are what the script asks to be told before the end.
    subprocess.run(
        ["scontrol", "update", f"JobId={job.pid}", "TimeLimit=5"],
        env=environment(tmp_path),
        check=True,
    )
    said = say(job, timeout_s=200)
    assert job.returncode == 0, said
    (step,) = re.findall(r"stopped by SIGUSR1 at step (\d+): .* is saved", said)
    assert len(re.findall(rf"continuing .* from step_{int(step):08d}", said)) == 1
    assert ("is requeued and goes on from this checkpoint" in said) is has_scontrol
    assert ("exit code 75: requeueing job" in said) is not has_scontrol
    assert_finished_once(tmp_path / "run")


POD = next(it for it in yaml.safe_load_all(MANIFEST.read_text("utf-8")) if it["kind"] == "Job")[
    "spec"
]


def find_container() -> dict[str, Any]:
    (container,) = POD["template"]["spec"]["containers"]
    return container


def test_the_job_of_kubernetes_is_one_that_the_api_takes_and_that_composes() -> None:
    kinds = {it["kind"]: it for it in yaml.safe_load_all(MANIFEST.read_text("utf-8"))}
    name, pod = kinds["Job"]["metadata"]["name"], POD["template"]["spec"]
    assert kinds["Service"]["spec"]["selector"] == {"job-name": name}
    assert kinds["Service"]["metadata"]["name"] == pod["subdomain"]
    # What the API server asks for beside a podFailurePolicy.
    assert (pod["restartPolicy"], POD["podReplacementPolicy"]) == ("Never", "Failed")
    container = find_container()
    codes = {
        it["onExitCodes"]["values"][0]: it["action"]
        for it in POD["podFailurePolicy"]["rules"]
        if "onExitCodes" in it and it["onExitCodes"]["containerName"] == container["name"]
    }
    assert codes == {EXIT_STOPPED: "Ignore", EXIT_CONFIG: "FailJob"}
    variables = {it["name"]: it.get("value") for it in container["env"]}
    assert variables["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    args = container["args"]
    assert f"trainer.num_nodes={POD['completions']}" in args
    assert POD["parallelism"] == POD["completions"]
    assert f"trainer.devices={container['resources']['limits']['nvidia.com/gpu']}" in args
    assert (ROOT / container["command"][1]).is_file()
    assert check_run("pretrain", args) == []


@pytest.mark.slow
@pytest.mark.dist
def test_a_pod_that_is_evicted_takes_all_with_it_and_they_go_on(
    small: list[str], tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, *script = find_container()["command"]
    assert program == "python"
    words = [*small, "trainer.num_nodes=2", "trainer.devices=1"]
    for is_evicted in (True, False):
        pods = [
            subprocess.Popen(
                [sys.executable, *script, *words],
                cwd=ROOT,
                env=environment(
                    tmp_path, NODE_RANK=str(pod), MASTER_ADDR="localhost", MASTER_PORT=str(port)
                ),
                stderr=subprocess.PIPE,
                text=True,
            )
            for pod in (0, 1)
        ]
        if is_evicted:
            wait_for(lambda: has_trained(tmp_path / "run"), pods[0])
            pods[1].send_signal(signal.SIGTERM)
        said = [pod.communicate(timeout=200)[1] for pod in pods]
        codes = [pod.returncode for pod in pods]
        assert codes == ([EXIT_STOPPED] * 2 if is_evicted else [0, 0]), said
    assert_finished_once(tmp_path / "run")


# What docs/howto/preemption.md says.

BLOCKS = re.findall(r"^```(?:ba)?sh\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
LINES = [
    line for it in BLOCKS for line in it.splitlines() if re.search(r"^PATH=|^sbatch|^python", line)
]
LOOPS = [it for it in BLOCKS if it.startswith(("while", "until"))]


def test_the_page_has_its_lines_and_loops() -> None:
    assert [it.split()[0].partition("=")[0] for it in LINES].count("sbatch") == 5
    assert len(LINES) == 8
    assert [it.split()[0] for it in LOOPS] == ["while", "until"]


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_page_starts_a_run_that_composes(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = (
        f'printf "%s\\0" "$@" > "{tmp_path}/words.${{SLURM_ARRAY_TASK_ID:-0}}.${{SLURM_PROCID:-0}}"'
    )
    write_python(tmp_path, note)
    # The rehearsal is in front of all else here, and the python that notes its words before it.
    line = line.replace('PATH="$PWD/examples/slurm/rehearsal:$PATH" ', "")
    subprocess.run(["bash", "-ec", line], cwd=ROOT, env=environment(tmp_path), check=True)
    found = sorted(tmp_path.glob("words.*"))
    array = re.search(r"--array=1-(\d+)", line)
    elements = range(1, int(array[1]) + 1) if array else [0]
    tasks = int((re.search(r"--ntasks-per-node=(\d+)", line) or ["", "8"])[1])
    nodes = int((re.search(r"--nodes=(\d+)", line) or ["", "1"])[1])
    assert len(found) == (len(elements) * tasks * nodes if "sbatch" in line else 1)
    called = {(it.name.split(".")[1], it.read_text()) for it in found}
    assert len(called) == len(elements)
    for element, text in called:
        script, *words = text.split("\0")[:-1]
        assert (ROOT / script).is_file()
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", element)
        assert check_run("pretrain", words) == []


@pytest.mark.dist
@pytest.mark.parametrize(
    "loop", [LOOPS[0], pytest.param(LOOPS[1], marks=pytest.mark.slow)], ids=["python", "torchrun"]
)
def test_a_loop_of_the_page_goes_round_until_the_run_is_finished(
    loop: str, small: list[str], tmp_path: Path
) -> None:
    words = shlex.join(small[1:])
    for name in ("python", "torchrun"):
        command = shutil.which(name, path=str(Path(sys.executable).parent))
        write_python(
            tmp_path, f'echo $$ >> "{tmp_path}/pids"\nexec {command} "$@" {words}', name=name
        )
    # torchrun starts its ranks by the path of its own Python.
    loop = loop.replace("runs/quickstart", f"{tmp_path}/run")
    loop = loop.replace(
        "torchrun ", "torchrun --master-port=0 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 ", 1
    )
    process = subprocess.Popen(
        ["bash", "-c", loop],
        cwd=ROOT, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_for(lambda: has_trained(tmp_path / "run"), process)
    os.kill(int((tmp_path / "pids").read_text()), signal.SIGUSR1)
    said = say(process, timeout_s=250)
    assert process.returncode == 0, said
    assert len((tmp_path / "pids").read_text().split()) == 2
    assert len(re.findall(r"stopped by SIGUSR1 at step \d+: .* is saved", said)) == 1
    assert_finished_once(tmp_path / "run")


def test_the_loop_of_the_page_ends_at_any_other_code(tmp_path: Path) -> None:
    for code in (0, 1, 2, 130, 137):
        write_python(tmp_path, f'echo once >> "{tmp_path}/starts.{code}"; exit {code}')
        subprocess.run(["bash", "-c", LOOPS[0]], env=environment(tmp_path), timeout=30, check=False)
        assert (tmp_path / f"starts.{code}").read_text() == "once\n"


def test_the_page_names_the_codes_that_the_program_has() -> None:
    codes = re.findall(r"^\| (\d+) \|", PAGE.read_text("utf-8"), re.M)
    assert [int(it) for it in codes] == [
        0, EXIT_FAILED, EXIT_CONFIG, EXIT_STOPPED, EXIT_INTERRUPTED
    ]  # fmt: skip
