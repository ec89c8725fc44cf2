"""The main job, through the command that users type: trains, reports, resumes, refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemo_like.core import run
from nemo_like.core.checkpoint import find_checkpoints, open_checkpoint
from nemo_like.testing.corpus import write_corpus

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "llm" / "pretrain.py"
SMALL = [
    "+conf=llm/quickstart", "data.tokenizer.train_vocab_size=300", "data.seq_len=32", "data.global_batch_size=4",
    "data.held_out_fraction=0.2", "strategy.micro_batch_size=2", "model.network.vocab_size=300",
    "model.network.hidden_size=32", "model.network.num_layers=2", "model.network.num_heads=2",
    "model.network.intermediate_size=64", "model.network.max_positions=32", "model.network.dropout=0.1",
    "model.sample_tokens=5", "trainer.max_steps=6", "trainer.val_every_n_steps=3", "trainer.val_batches=2",
    "trainer.log_every_n_steps=1", "trainer.devices=1", "checkpoint.every_n_steps=2", "checkpoint.keep_last=10",
    "schedule.warmup_steps=2",
]  # fmt: skip


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    return [
        *SMALL,
        f"data.corpus={tmp_path}/corpus/*.jsonl.zst",
        f"data.cache_dir={tmp_path}/cache",
    ]


def pretrain(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        run.main("pretrain", arguments)
    return int(caught.value.code or 0)


def read_losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    opened = open_checkpoint(checkpoint)
    from nemo_like.collections.llm.decoder import DecoderModel

    return DecoderModel.load(opened.folder).state_dict()


def test_a_run_leaves_a_folder_that_explains_itself(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain(small) == 0
    folder = Path("runs/quickstart")
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "loss.png",
        "report.html",
    } <= names
    assert [step for step, _ in read_losses(folder)] == [1, 2, 3, 4, 5, 6]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    report = (folder / "report.html").read_text()
    assert "http://" not in report.replace("http://www.w3.org", "")
    shown = capsys.readouterr().out
    for text in ("gzip -9", "zstd -19", "pooled", "plain mean"):
        assert text in shown, text
    last = find_checkpoints(folder / "checkpoints")[-1]
    assert {"tokenizer.json", "network.json", "config.yaml"} <= {
        path.name for path in last.rglob("*")
    }
    assert "val/loss" in open_checkpoint(last).state["metrics"]


def test_the_same_command_continues_and_never_starts_anew(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain([*small, "run_dir=whole"]) == 0
    assert pretrain([*small, "run_dir=cut", "trainer.max_steps=4", "schedule.total_steps=6"]) == 0
    assert pretrain([*small, "run_dir=cut"]) == 0
    assert "continuing cut from step_00000004" in capsys.readouterr().err
    assert read_losses(Path("cut")) == read_losses(Path("whole"))
    for name, tensor in load_weights(Path("whole/checkpoints/step_00000006")).items():
        assert torch.equal(load_weights(Path("cut/checkpoints/step_00000006"))[name], tensor), name
    assert pretrain([*small, "run_dir=cut"]) == 0
    assert "cut is finished at step 6" in capsys.readouterr().err
    assert (
        pretrain(
            [*small, "run_dir=cut", "resume=never", "trainer.max_steps=1", "callbacks.report=null"]
        )
        == 0
    )
    assert [path.name for path in find_checkpoints(Path("cut-2/checkpoints"))] == ["step_00000001"]


@pytest.mark.parametrize("options", [["data.num_workers=2"], ["optim=adamw", "optim.lr=1e-3"]])
def test_resumed_is_uninterrupted_in_other_settings_too(
    small: list[str], options: list[str]
) -> None:
    small = [*small, *options, "callbacks.report=null", "schedule.total_steps=6"]
    assert pretrain([*small, "run_dir=whole"]) == 0
    assert pretrain([*small, "run_dir=cut", "trainer.max_steps=3"]) == 0
    assert pretrain([*small, "run_dir=cut"]) == 0
    weights = load_weights(Path("cut/checkpoints/step_00000006"))
    for name, tensor in load_weights(Path("whole/checkpoints/step_00000006")).items():
        assert torch.equal(weights[name], tensor), name


def test_a_run_is_exported_and_trained_further(small: list[str]) -> None:
    from nemo_like.collections.llm.decoder import DecoderModel
    from nemo_like.collections.llm.hf_folder import save_hf_folder

    small = [*small, "callbacks.report=null"]
    assert pretrain([*small, "run_dir=first", "trainer.max_steps=2"]) == 0
    model = DecoderModel.load("first")
    assert model.tokenizer is not None
    # Dropout is no part of what transformers knows of a shape.
    save_hf_folder(
        Path("hf"), dataclasses.replace(model.shape, dropout=0.0), model.network.state_dict(),
        tokenizer_files=model.tokenizer.to_bytes(), eos_token_id=model.tokenizer.eos_id,
    )  # fmt: skip
    further = [
        argument
        for argument in small
        if not argument.startswith(("model.network", "data.tokenizer"))
    ]
    further += ["model.network=null", "model.init_from=hf", "~data.tokenizer.train_vocab_size",
                "data.tokenizer.path=hf", "trainer.max_steps=1", "optim.lr=0", "optim.adamw_lr=0",
                "run_dir=second"]  # fmt: skip
    assert pretrain(further) == 0
    for name, tensor in load_weights(Path("second/checkpoints/step_00000001")).items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_tokenizer_too_large_for_the_network_is_refused(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain([*small, "model.network.vocab_size=290"]) == 2
    assert "model.network.vocab_size=290: the tokenizer has 300 tokens" in capsys.readouterr().err


def test_a_faulty_configuration_starts_nothing(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain([*small, "trainer.max_stepz=3", "data.seq_len=many"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)
    assert not Path("runs").exists()


@pytest.mark.dist
def test_two_ranks_share_one_folder_and_the_losses_of_one(small: list[str]) -> None:
    arguments = [*small, "model.network.dropout=0", "callbacks.report=null", "run_dir=two_${now:%f}",
                 "trainer.devices=2", "strategy.micro_batch_size=1"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folders = [path for path in Path().iterdir() if path.name.startswith("two_")]
    assert len(folders) == 1
    assert (
        pretrain([*small, "model.network.dropout=0", "callbacks.report=null", "run_dir=one"]) == 0
    )
    two, one = read_losses(folders[0]), read_losses(Path("one"))
    assert [step for step, _ in two] == [step for step, _ in one]
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-6)


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
def test_a_run_goes_on_under_one_strategy_after_the_other(small: list[str]) -> None:
    small = [*small, "optim=adamw", "optim.lr=1e-3", "schedule.total_steps=6"]
    small += ["model.network.dropout=0", "callbacks.report=null"]
    assert pretrain([*small, "run_dir=whole"]) == 0
    relay = ["ddp", "fsdp", "megatron", "deepspeed", "fsdp", "ddp"]
    for step, strategy in enumerate(relay, start=1):
        arguments = [f"strategy={strategy}", f"trainer.max_steps={step}", "run_dir=relay"]
        assert pretrain([*small, *arguments, "trainer.val_every_n_steps=null"]) == 0
    whole, parts = read_losses(Path("whole")), read_losses(Path("relay"))
    assert [step for step, _ in parts] == [1, 2, 3, 4, 5, 6]
    assert [loss for _, loss in parts] == pytest.approx([loss for _, loss in whole], rel=2e-5)
