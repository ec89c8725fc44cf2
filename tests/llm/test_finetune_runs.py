"""Fine-tuning through the command that users type: the runs, their adapters, merging, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nemo_like.collections.llm.decoder import DecoderModel
from nemo_like.collections.llm.decoder.model import open_source
from nemo_like.collections.llm.held_out_samples import HeldOutSamples, find_prompts
from nemo_like.collections.llm.loading import TextBatch
from nemo_like.core import run
from nemo_like.core.checkpoint import find_checkpoints, open_checkpoint
from nemo_like.core.errors import ConfigError
from nemo_like.testing.corpus import write_corpus

ROOT = Path(__file__).resolve().parents[2]
BASE = [
    "+conf=llm/quickstart", "data.tokenizer.train_vocab_size=300", "data.seq_len=32", "data.global_batch_size=4",
    "data.held_out_fraction=0.2", "strategy.micro_batch_size=2", "model.network.vocab_size=300",
    "model.network.hidden_size=32", "model.network.num_layers=2", "model.network.num_heads=2",
    "model.network.intermediate_size=64", "model.network.max_positions=64", "model.sample_tokens=0",
    "trainer.max_steps=2", "trainer.val_every_n_steps=null", "checkpoint.every_n_steps=null",
    "schedule.warmup_steps=0", "callbacks.report=null", "trainer.devices=1", "run_dir=base",
]  # fmt: skip
SMALL = [
    "model.init_from=base", "data.seq_len=64", "data.global_batch_size=4", "data.cache_dir=cache",
    "strategy.micro_batch_size=2", "trainer.max_steps=4", "trainer.val_every_n_steps=2", "trainer.devices=1",
    "trainer.log_every_n_steps=1", "checkpoint.every_n_steps=2", "checkpoint.keep_last=10", "schedule.warmup_steps=0",
    "callbacks.samples.num_prompts=2", "callbacks.samples.max_tokens=4", "optim.lr=1e-2",
]  # fmt: skip
CHATS = ["data.files=chats.jsonl", "data.held_out_fraction=0.2"]


def start(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        run.main("pretrain", arguments)
    return int(caught.value.code or 0)


def write_chats(path: Path) -> None:
    chats = [
        [
            {"role": "user", "content": f"say {number}"},
            {"role": "assistant", "content": f"it is {number}"},
        ]
        for number in range(40)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny pre-trained run, and chats."""
    path = tmp_path_factory.mktemp("finetune")
    write_corpus(path / "corpus")
    write_chats(path / "chats.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        data = [f"data.corpus={path}/corpus/*.jsonl.zst", "data.cache_dir=cache"]
        before = dict(os.environ)
        assert start([*BASE, *data]) == 0
        # A run tells its children by the environment what they belong to; later tests start children of their own.
        os.environ.clear()
        os.environ.update(before)
    return path


@pytest.fixture
def small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(folder)

    def finetune(name: str, *options: str) -> int:
        data = CHATS if name.startswith("sft") else ["data.corpus=corpus/*.jsonl.zst"]
        return start([f"+conf=llm/{name}", *SMALL, *data, *options])

    return finetune


def read_metrics(run_dir: str, key: str) -> list[float]:
    lines = [json.loads(it) for it in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


@pytest.mark.parametrize("name", ["sft_full", "sft_lora", "sft_qlora", "continue_pretraining"])
def test_every_run_learns_and_resumes_bit_for_bit(small: Callable[..., int], name: str) -> None:
    assert small(name, f"run_dir={name}") == 0
    losses = read_metrics(name, "train/loss")
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert len(read_metrics(name, "val/exact_match")) == 2
    cut = ["trainer.max_steps=2", "schedule.total_steps=4", "callbacks.report=null"]
    assert small(name, f"run_dir={name}_cut", *cut) == 0
    assert small(name, f"run_dir={name}_cut", "callbacks.report=null") == 0
    whole, resumed = (
        open_checkpoint(find_checkpoints(f"{path}/checkpoints")[-1])
        for path in (name, f"{name}_cut")
    )
    names = whole.tensor_names("model")
    assert all(".lora_" in it for it in names) == ("lora" in name)
    for tensor, other in zip(
        whole.read_tensors("model", names).values(),
        resumed.read_tensors("model", names).values(),
        strict=True,
    ):
        assert torch.equal(tensor, other)


def test_validation_writes_answers_to_the_same_prompts(small: Callable[..., int]) -> None:
    assert small("sft_lora", "run_dir=samples") == 0
    lines = [json.loads(line) for line in Path("samples/samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 2, 4, 4]
    assert [line["prompt"] for line in lines[:2]] == [line["prompt"] for line in lines[2:]]
    for line in lines:
        number = line["prompt"].split("say ")[1].split("<")[0].strip()
        assert line["reference"].strip().startswith(f"it is {number}")
        assert "it is" not in line["prompt"]
    assert "Answers to held-out prompts at step 4" in Path("samples/report.html").read_text()


def test_a_run_is_merged_and_its_adapter_is_written_for_peft(small: Callable[..., int]) -> None:
    assert small("sft_qlora", "run_dir=merging", "trainer.max_steps=2") == 0
    script = str(ROOT / "examples/llm/merge_adapter.py")

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    done = call("merging", "merged")
    assert done.returncode == 0, done.stderr
    expected = DecoderModel.load("merging")
    merged = DecoderModel.load("merged")
    for name, tensor in expected.network.state_dict().items():
        assert torch.equal(merged.network.state_dict()[name], tensor), name
    assert merged.tokenizer is not None
    # The base of peft's folder is the checkpoint, so it opens here without transformers.
    done = call("merging", "adapter", "--adapter-only")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in Path("adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert open_source(Path("adapter")).shape == expected.shape
    assert "error: merged: exists already" in call("merging", "merged").stderr
    assert "is no adapter" in call("base", "other").stderr
    refused = call("adapter", "other", "--base", "nowhere")
    assert "which is no folder here" in refused.stderr


def test_a_run_without_a_base_says_what_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert start(["+conf=llm/sft_lora"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "model.init_from: is for you to give: model.init_from=" in lines[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["strategy=megatron"], "strategy._target_=MegatronStrategy: splits matrices"),
        (["strategy=deepspeed"], "strategy._target_=DeepSpeedStrategy: is not supported with adapters"),
        (["trainer.precision=fp8-mixed"], "trainer.precision=fp8-mixed: is for matrices"),
        (["optim=adamw_8bit", "strategy=fsdp"], "with optim=adamw_8bit its state cannot be cut"),
        (["model.adapter.rank=0"], "model.adapter.rank=0: must be at least 1"),
        (["model.neftune_alpha=-1"], "model.neftune_alpha=-1.0: must be"),
        (["callbacks.samples.num_prompts=0"], "num_prompts=0: must be at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(
    small: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert small("sft_lora", *options, "run_dir=refused") == 2
    assert message in capsys.readouterr().err
    assert not Path("refused").exists()


@pytest.mark.slow
@pytest.mark.dist
def test_a_model_that_starts_empty_gives_the_run_of_one_process(
    small: Callable[..., int], folder: Path
) -> None:
    command = [
        sys.executable,
        str(ROOT / "examples/llm/finetune.py"),
        "+conf=llm/sft_qlora",
        *SMALL,
    ]
    command += [
        *CHATS,
        "run_dir=two",
        "strategy=fsdp",
        "trainer.devices=2",
        "callbacks.report=null",
    ]
    command += ["strategy.micro_batch_size=1"]
    done = subprocess.run(
        [it for it in command if it != "strategy.micro_batch_size=2" and it != "trainer.devices=1"],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert small("sft_qlora", "run_dir=one", "callbacks.report=null") == 0
    for key in ("train/loss", "val/loss", "val/exact_match"):
        assert read_metrics("two", key) == pytest.approx(read_metrics("one", key), rel=2e-5)


# Prompts.


def make_batch() -> TextBatch:
    ignored = -100
    tokens_BT = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]])
    targets_BT = torch.tensor(
        [[2, 3, 4, 5, 6, 7, 8, 9], [ignored, ignored, 14, 15, ignored, ignored, 18, ignored]]
    )
    segments_BT = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1], [0] * 8])
    return TextBatch(tokens_BT, targets_BT, segments_BT)


def test_prompts_end_where_answers_begin() -> None:
    text, short, chat = find_prompts(make_batch(), 10)
    assert (text.prompt, text.reference) == ([1, 2, 3, 4], [5, 6, 7])
    assert (short.prompt, short.reference) == ([7, 8], [9])
    assert (chat.prompt, chat.reference) == ([11, 12, 13], [14, 15])
    assert find_prompts(make_batch(), 2) == [text, short]


def test_samples_refuse_numbers_out_of_range() -> None:
    with pytest.raises(ConfigError, match="max_tokens=0"):
        HeldOutSamples(max_tokens=0)
