"""``nemo-like plan`` as it is typed: the table, the choice, the errors, and what it must not load."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CLUSTER = [
    "+conf=llm/llama3_70b",
    "--devices=64",
    "--device-memory=80GiB",
    "--devices-per-node=8",
]


def plan(*arguments: str, code: int = 0) -> tuple[str, str]:
    command = [sys.executable, "-m", "nemo_like.cli.main", "plan", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_70b_on_64_gpus_is_planned_without_weights_and_the_answer_can_be_typed() -> None:
    out, err = plan(*CLUSTER)
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith(
        "70.6 G parameters, 1,024 samples of 8,192 tokens a step, bf16-mixed"
    )
    assert lines[1].startswith("64 x 80.0 GiB, 8 a node; 90% of it, 72.0 GiB")
    (chosen,) = [line for line in lines if line.startswith(">")]
    assert "megatron" in chosen
    for strategy in ("ddp", "fsdp shard=gradients"):
        (line, *_) = [line for line in lines if line.startswith(f"   {strategy} ")]
        assert "does not fit: " in line
    (select,) = [line for line in lines if line.startswith("select it: ")]
    overrides = select.removeprefix("select it: ").split()
    command = [sys.executable, "-m", "nemo_like.cli.main", "validate", CLUSTER[0]]
    subprocess.run([*command, "data.corpus=x", "data.tokenizer.path=y", *overrides], check=True)


def test_json_holds_every_plan_in_bytes() -> None:
    data = json.loads(plan(*CLUSTER, "--json")[0])
    assert data["devices"] == ["trainer.devices=8", "trainer.num_nodes=8"]
    (chosen,) = [it for it in data["plans"] if it["chosen"]]
    assert chosen["overrides"] == data["chosen"]
    assert chosen["fits"]
    for it in data["plans"]:
        memory = it["memory_bytes"]
        parts = sum(memory[name] for name in memory if name not in ("total", "host"))
        assert memory["total"] == parts
        assert it["fits"] == (parts <= 0.9 * 80 * 2**30)


def test_a_laptop_gets_one_process_with_the_largest_micro_batch() -> None:
    out, _ = plan("+conf=llm/quickstart")
    assert "select it: strategy=ddp strategy.micro_batch_size=8 trainer.devices=1" in out


def test_overrides_change_the_plan() -> None:
    small = json.loads(plan("+conf=llm/quickstart", "--json")[0])["plans"][0]
    long = json.loads(plan("+conf=llm/quickstart", "data.seq_len=384", "--json")[0])["plans"][0]
    assert long["memory_bytes"]["activations"] > 2 * small["memory_bytes"]["activations"] * 0.99


def test_what_is_asked_for_is_shown_as_it_is() -> None:
    asked = [
        "strategy=fsdp",
        "strategy.micro_batch_size=2",
        "strategy.activation_checkpointing=full",
    ]
    out, _ = plan("+conf=llm/quickstart", "--devices=2", *asked)
    (line,) = [line for line in out.splitlines() if line.startswith("?")]
    assert line.split()[:4] == ["?", "fsdp", "2", "full"]
    assert "select it: strategy=ddp" in out


def test_where_nothing_fits_it_says_what_is_missing_and_leaves_with_1() -> None:
    out, _ = plan("+conf=llm/llama3_70b", "--device-memory=80GiB", code=1)
    assert "no plan fits: the smallest, " in out
    assert "more than there is; take more devices, or a shorter data.seq_len" in out
    assert "select it" not in out


def test_mistakes_are_lines_with_code_2() -> None:
    out, err = plan("+conf=llm/quickstrat", code=2)
    assert (out, "did you mean 'llm/quickstart'" in err) == ("", True)
    _, err = plan("+conf=llm/quickstart", "--devices=6", "--devices-per-node=4", code=2)
    assert err == (
        "--devices-per-node 4: must divide --devices 6, all nodes are alike; the nearest possible are 3 and 6\n"
    )
    _, err = plan("+conf=llm/quickstart", "--devices=0", "--device-memory=much", code=2)
    assert err == (
        "--devices 0: must be at least 1\n"
        "--device-memory 'much': must be a size of memory above 0, such as 80GiB or 512MiB\n"
    )
    _, err = plan("+conf=llm/quickstart", "~model.network", "model.init_from=folder", code=2)
    assert "needs model.network (the shape of a decoder)" in err


def test_impossible_settings_are_refused_with_their_place() -> None:
    _, err = plan(
        "+conf=llm/llama3_8b",
        "--devices=8",
        "strategy=megatron",
        "strategy.tensor_parallel=3",
        code=2,
    )
    assert "override 'strategy.tensor_parallel=3': strategy.tensor_parallel=3: must divide" in err


@pytest.mark.parametrize("arguments", [["+conf=llm/llama3_8b", "--devices=8"]])
def test_nothing_heavy_is_loaded(arguments: list[str]) -> None:
    code = (
        "import json, sys; from nemo_like.cli.main import main; main(['plan', *sys.argv[1:]]); "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not loaded & {"torch", "lightning", "numpy", "deepspeed", "megatron"}
