"""Training on preferences: one network is policy and reference, and no way to cut or interrupt a run changes it."""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from nemo_like.callbacks.checkpointing import Checkpointing
from nemo_like.collections.llm.adapters import Lora
from nemo_like.collections.llm.config import TokenizerConfig
from nemo_like.collections.llm.decoder import DecoderConfig, DecoderModel, DecoderNetwork
from nemo_like.collections.llm.hf_folder import save_hf_folder
from nemo_like.collections.llm.preference import Dpo, PreferenceDataModule
from nemo_like.collections.llm.preference.batch import compute_log_probs
from nemo_like.collections.llm.preference.reference import FILE_PAIRS, compute_once
from nemo_like.collections.llm.testing import TinyTextDataModule
from nemo_like.core import run
from nemo_like.core.checkpoint import find_checkpoints, open_checkpoint
from nemo_like.core.errors import ConfigError
from nemo_like.core.precision import build_precision
from nemo_like.core.seed import seed_all
from nemo_like.optim import AdamW
from nemo_like.strategies import DDPStrategy, FSDPStrategy
from nemo_like.testing.fit import QUIET, Recorder
from nemo_like.testing.world import run_world
from nemo_like.text.tokenizer import train_bpe

LOG_2 = float(torch.tensor(2.0).log())
FIGURES = ("dpo_reward_chosen", "dpo_reward_rejected", "dpo_margin", "dpo_accuracy")
SHAPE = DecoderConfig(
    vocab_size=330, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    intermediate_size=48, max_positions=64, init_std=0.1,
)  # fmt: skip


@functools.cache
def make_folder() -> Path:
    """A base with its tokenizer, and pairs: yes is better than no."""
    folder = Path(tempfile.mkdtemp())
    tokenizer = train_bpe(["say yes no 1 2 3"] * 5, vocab_size=330)
    torch.manual_seed(0)
    weights = DecoderNetwork(SHAPE).state_dict()
    save_hf_folder(folder / "base", SHAPE, weights, tokenizer_files=tokenizer.to_bytes())
    records = [
        {"prompt": f"say {n}", "chosen": "yes " * (1 + n % 3) + str(n), "rejected": "no"}
        for n in range(24)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "pairs.jsonl").write_text(lines)
    return folder


@pytest.fixture
def folder() -> Path:
    return make_folder()


def make_data(folder: Path, **changes: Any) -> PreferenceDataModule:
    settings = {
        "files": str(folder / "pairs.jsonl"),
        "tokenizer": TokenizerConfig(path=str(folder / "base")),
        "seq_len": 48,
        "global_batch_size": 4,
        "held_out_fraction": 0.2,
        "cache_dir": str(folder / "cache"),
    } | changes
    return PreferenceDataModule(**settings)


class _GradientTaker(pl.Callback):
    """Names of the parameters that got a gradient."""

    names: frozenset[str] = frozenset()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.names = frozenset(
            name for name, it in pl_module.named_parameters() if it.grad is not None
        )


def learn(
    folder: Path,
    *,
    objective: dict[str, Any] | None = None,
    adapter: dict[str, Any] | None = None,
    strategy: Any = None,
    steps: int = 4,
    devices: int = 1,
    save: Path | None = None,
    resume: Path | None = None,
    precision: Any = "fp32",
    data: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A short run; without ``adapter`` all weights are trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_all(0)
        lora = None if adapter is None else Lora(**{"rank": 4, **adapter})
        options = {"init_from": str(folder / "base"), **(model or {})}
        made = DecoderModel(adapter=lora, objective=Dpo(**(objective or {})), **options)
        made.optim, made.seed = AdamW(lr=1e-2, weight_decay=0.0), 3
        recorder, taker = Recorder(), _GradientTaker()
        callbacks: list[pl.Callback] = [recorder, taker]
        if save is not None:
            callbacks.append(Checkpointing(folder=save, every_n_steps=2, keep_last=100))
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy or DDPStrategy(micro_batch_size=4),
            plugins=[build_precision(precision, "cpu")],
            max_steps=steps,
            max_epochs=-1,
            callbacks=callbacks,
            **{**QUIET, "val_check_interval": steps, "limit_val_batches": 1.0},
        )
        trainer.fit(made, datamodule=make_data(folder, **(data or {})), ckpt_path=resume)
        weights = trainer.strategy.gather_weights()  # type: ignore[attr-defined]
    return {
        "steps": recorder.steps,
        "val": dict(made.val_metrics),
        "weights": {name: it.detach().clone() for name, it in weights.items()},
        "gradients": taker.names,
        "modules": [name for name, _ in made.named_parameters()],
    }


def assert_same_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for step, other in zip(found["steps"], expected["steps"], strict=True):
        for name in ("train/loss", *(f"train/{it}" for it in FIGURES)):
            assert step[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    assert found["val"] == pytest.approx(expected["val"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("adapter", "precision"),
    [
        ({"dropout": 0.5}, "fp32"),
        ({"dora": True}, "fp32"),
        ({"quantize": "nf4"}, "fp32"),
        ({}, "bf16-mixed"),
    ],
)
def test_the_first_loss_is_log_2_exactly_and_adapters_alone_move(
    folder: Path, adapter: dict[str, Any], precision: str
) -> None:
    found = learn(folder, adapter=adapter, precision=precision, steps=3)
    first, *_, last = found["steps"]
    assert first["train/loss"] == LOG_2
    assert [first[f"train/{name}"] for name in FIGURES] == [0.0] * 4
    assert last["train/loss"] < LOG_2
    assert last["train/dpo_margin"] > 0
    assert found["val"]["val/dpo_accuracy"] == 1.0
    kinds = ("lora_a", "lora_b", "magnitude")
    assert found["gradients"] == {it for it in found["modules"] if it.endswith(kinds)}
    # One network: its parameters are those of the base and the adapters.
    assert len(found["modules"]) == len(
        list(DecoderModel(init_from=str(folder / "base"), adapter=Lora(rank=4, **adapter)).parameters())
    )  # fmt: skip


def test_the_reference_drops_nothing_adds_no_noise_and_leaves_the_model_as_it_was(
    folder: Path,
) -> None:
    data = make_data(folder)
    data.setup()
    batch = data.read_pairs([0, 1])
    base = str(folder / "base")
    model = DecoderModel(init_from=base, adapter=Lora(rank=4), neftune_alpha=5.0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.normal_()
    expected = compute_log_probs(DecoderModel(init_from=base).eval().network, batch).detach()
    assert torch.equal(Dpo()._find_reference(model, batch), expected)
    assert model.network.training
    adapted = compute_log_probs(model.eval().network, batch).detach()
    assert (adapted - expected).abs().min() > 1e-3


def test_figures_are_exact_over_micro_batches(folder: Path) -> None:
    # 4 pairs as 1 x 4, 2 x 2, and 3 + 1, with accumulation and blocks computed twice.
    expected = learn(folder, adapter={})
    for options in (
        {"micro_batch_size": 2},
        {"micro_batch_size": 3, "activation_checkpointing": "full"},
    ):
        assert_same_run(learn(folder, adapter={}, strategy=DDPStrategy(**options)), expected)


def test_margin_is_the_difference_of_rewards(folder: Path) -> None:
    for step in learn(folder, adapter={}, objective={"loss": "ipo", "beta": 0.3})["steps"]:
        chosen, rejected, margin, accuracy = (step[f"train/{name}"] for name in FIGURES)
        assert margin == pytest.approx(chosen - rejected, abs=1e-6)
        assert accuracy in (0.0, 0.25, 0.5, 0.75, 1.0)


def test_resumed_is_uninterrupted_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "adapter": {"dropout": 0.2, "dora": True},
        "objective": {"label_smoothing": 0.1},
    }
    whole = learn(folder, save=tmp_path, **options)
    saved = find_checkpoints(tmp_path)[0]
    resumed = learn(folder, resume=saved, **options)
    assert resumed["steps"] == whole["steps"][2:]
    assert resumed["val"] == whole["val"]
    for name, tensor in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor), name
    assert all(
        it.endswith(("lora_a", "lora_b", "magnitude"))
        for it in open_checkpoint(saved).tensor_names("model")
    )


# A reference that is cached.


def test_a_cached_reference_gives_the_run_of_adapters_off(folder: Path, tmp_path: Path) -> None:
    expected = learn(folder, adapter={})
    data = {"cache_dir": str(tmp_path)}
    found = learn(folder, adapter={}, objective={"reference": "cached"}, data=data)
    assert found["steps"][0]["train/loss"] == pytest.approx(LOG_2, abs=1e-6)
    assert_same_run(found, expected)


def test_full_fine_tuning_keeps_to_the_starting_weights_also_when_resumed(
    folder: Path, tmp_path: Path
) -> None:
    data = {"cache_dir": str(tmp_path / "cache")}
    whole = learn(folder, save=tmp_path / "run", data=data)
    assert whole["steps"][0]["train/loss"] == pytest.approx(LOG_2, abs=1e-6)
    assert whole["steps"][-1]["train/loss"] < LOG_2
    files = sorted((tmp_path / "cache/references").rglob("*"))
    stamps = [(it, it.stat().st_mtime_ns) for it in files]
    assert [it.suffix for it in files] == ["", ".safetensors"]
    resume = find_checkpoints(tmp_path / "run")[0]
    resumed = learn(folder, resume=resume, data=data)
    assert [(it, it.stat().st_mtime_ns) for it in files] == stamps
    assert resumed["steps"] == whole["steps"][2:]
    # Without the cache it is computed anew, of the starting weights and not of those that were saved.
    again = learn(folder, resume=resume, data={"cache_dir": str(tmp_path / "other")})
    assert again["steps"] == whole["steps"][2:]


def test_an_adapter_that_goes_on_is_its_own_reference(folder: Path, tmp_path: Path) -> None:
    learn(folder, adapter={}, save=tmp_path / "first")
    start = str(find_checkpoints(tmp_path / "first")[-1])
    data = {"cache_dir": str(tmp_path / "cache")}
    found = learn(folder, adapter={"init_from": start}, data=data, steps=1)
    assert found["steps"][0]["train/loss"] == pytest.approx(LOG_2, abs=1e-6)
    with pytest.raises(
        ConfigError, match=f"without the adapter that training starts from .*{start}"
    ):
        learn(folder, adapter={"init_from": start}, objective={"reference": "base"})


def test_without_a_reference_the_margin_is_that_of_the_policy(folder: Path) -> None:
    found = learn(folder, adapter={}, objective={"reference": "none", "beta": 0.5}, steps=1)
    first = found["steps"][0]
    assert first["train/loss"] != pytest.approx(LOG_2, abs=1e-3)
    assert first["train/dpo_reward_chosen"] < 0
    assert first["train/dpo_margin"] != 0


def test_what_is_there_is_not_computed_again_and_what_is_damaged_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[Sequence[int]] = []
    number = 2 * FILE_PAIRS + 3

    def compute(pair_ids: Sequence[int]) -> Tensor:
        done.append(pair_ids)
        if len(done) == 2:
            raise KeyboardInterrupt
        return torch.tensor([list(pair_ids), [-it for it in pair_ids]], dtype=torch.float64)

    with pytest.raises(KeyboardInterrupt):
        compute_once(tmp_path, num_pairs=number, make_compute=lambda: compute)
    assert [it.name for it in tmp_path.iterdir()] == ["00000000.safetensors"]
    found = compute_once(tmp_path, num_pairs=number, make_compute=lambda: compute)
    assert [len(it) for it in done] == [FILE_PAIRS, FILE_PAIRS, FILE_PAIRS, 3]
    assert torch.equal(found[0], torch.arange(number, dtype=torch.float64))
    assert torch.equal(found[1], -found[0])
    last = max(tmp_path.iterdir())
    last.write_bytes(last.read_bytes()[:20])
    again = compute_once(tmp_path, num_pairs=number, make_compute=lambda: compute)
    assert torch.equal(again, found)
    assert len(done) == 5
    assert f"{last}: is damaged and computed anew" in caplog.text

    def fail() -> Any:
        raise AssertionError("the model is opened for nothing")

    assert torch.equal(compute_once(tmp_path, num_pairs=number, make_compute=fail), found)


def test_ranks_share_the_work_and_do_what_they_cannot_see(tmp_path: Path) -> None:
    done: list[int] = []

    def compute(pair_ids: Sequence[int]) -> Tensor:
        done.append(pair_ids[0] // FILE_PAIRS)
        return torch.zeros(2, len(pair_ids))

    compute_once(
        tmp_path,
        num_pairs=4 * FILE_PAIRS,
        make_compute=lambda: compute,
        rank=1,
        size=2,
        barrier=lambda: done.append(-1),
    )
    assert done == [1, 3, -1, 0, 2, -1]


# Ranks.

PLANS: dict[str, tuple[type, dict[str, Any]]] = {
    "ddp lora": (DDPStrategy, {"adapter": {}}),
    "ddp cached": (DDPStrategy, {}),
    "fsdp lora": (FSDPStrategy, {"adapter": {}}),
    "fsdp cached": (FSDPStrategy, {}),
}


def run_plans(folder: Path) -> dict[str, dict[str, Any]]:
    # Three pairs of a step on two ranks: one has a pair more, and a step may end on a blank micro-batch.
    return {
        name: learn(
            folder,
            strategy=strategy(micro_batch_size=1),
            devices=2,
            data={"global_batch_size": 3, "cache_dir": str(folder / name)},
            **options,
        )
        for name, (strategy, options) in PLANS.items()
    }


@pytest.fixture(scope="module")
def two() -> dict[str, dict[str, Any]]:
    return run_world(2, run_plans, make_folder())[0]  # type: ignore[no-any-return]


@pytest.mark.dist
@pytest.mark.parametrize("plan", PLANS)
def test_two_ranks_give_the_run_of_one(folder: Path, two: Any, plan: str) -> None:
    expected = learn(folder, data={"global_batch_size": 3}, **PLANS[plan][1])
    assert_same_run(two[plan], expected)


# What cannot be.


def test_a_model_from_nowhere_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.init_from: is required with an objective"):
        learn(folder, model={"init_from": None, "network": SHAPE})


def test_adapters_off_needs_adapters(folder: Path) -> None:
    with pytest.raises(ConfigError, match="reference=base: needs an adapter to turn off"):
        learn(folder, objective={"reference": "base"})


def test_data_without_pairs_are_refused(folder: Path) -> None:
    model = DecoderModel(init_from=str(folder / "base"), adapter=Lora(rank=2), objective=Dpo())
    model.trainer = pl.Trainer(logger=False, accelerator="cpu")
    model.trainer.datamodule = TinyTextDataModule()  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match="data: is a TinyTextDataModule, the objective needs pairs"
    ):
        model.setup("fit")


# The command.

SMALL = [
    "+conf=llm/dpo_lora", "data.seq_len=64", "data.global_batch_size=4", "strategy.micro_batch_size=2",
    "trainer.max_steps=4", "trainer.val_every_n_steps=2", "trainer.log_every_n_steps=1", "trainer.devices=1",
    "checkpoint.every_n_steps=2", "schedule.warmup_steps=0", "optim.lr=1e-2", "data.held_out_fraction=0.2",
    "callbacks.samples.num_prompts=2", "callbacks.samples.max_tokens=4", "data.cache_dir=cache",
]  # fmt: skip


def start(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        run.main("pretrain", arguments)
    return int(caught.value.code or 0)


@pytest.fixture
def there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with the base in it; a run's own variables are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(folder / "base")
    for name in os.environ:
        monkeypatch.setenv(name, os.environ[name])
    return tmp_path


def test_the_command_learns_from_the_pairs_of_a_file(folder: Path, there: Path) -> None:
    files = f"data.files={folder}/pairs.jsonl"
    assert start([*SMALL, files, "model.init_from=base", "run_dir=run"]) == 0
    lines = [json.loads(it) for it in (there / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert steps[0]["train/dpo_accuracy"] == 0.0
    assert steps[0]["train/loss"] == LOG_2
    assert [line["val/dpo_accuracy"] for line in lines if "val/dpo_accuracy" in line][-1] == 1.0
    answers = [json.loads(it) for it in (there / "run/samples.jsonl").read_text().splitlines()]
    assert answers
    assert all("yes" in it["reference"] for it in answers)
    report = (there / "run/report.html").read_text()
    assert "Preferences" in report
    assert math.isfinite(steps[-1]["train/loss"])


def test_a_preview_shows_the_pairs_of_the_run(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nemo_like.cli.main import main

    run_line = ["+conf=llm/dpo_lora", "model.init_from=base", "data.cache_dir=cache"]
    assert main(["data", "preview", *run_line, "-n", "1"]) in (0, None)
    shown = capsys.readouterr().out
    assert "preference (chosen)" in shown
    assert "What do people speak in Algeria?" in shown


@pytest.mark.slow
def test_the_shipped_pairs_are_learnt(there: Path) -> None:
    # Some 40 pairs, seen a dozen times: which fact belongs to which country is a matter of memory.
    options = [
        "model.init_from=base", "data.held_out_fraction=0.9", "data.global_batch_size=8", "data.seq_len=128",
        "strategy.micro_batch_size=8", "trainer.max_steps=60", "trainer.val_every_n_steps=null",
        "checkpoint.every_n_steps=null", "callbacks.samples=null",
    ]  # fmt: skip
    assert start([*SMALL, *options, "run_dir=run"]) == 0
    lines = [json.loads(it) for it in (there / "run/metrics.jsonl").read_text().splitlines()]
    accuracies = [line["train/dpo_accuracy"] for line in lines if "train/dpo_accuracy" in line]
    assert accuracies[0] == 0.0
    assert sum(accuracies[-8:]) / 8 > 0.75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["strategy=megatron"], "strategy._target_=MegatronStrategy: computes its own loss"),
        (["model.adapter=null", "strategy=deepspeed"], "DeepSpeedStrategy: is not supported with an objective"),
        (["model.objective=null"], "model.objective: is required with preferences"),
        (["model.objective.reference=base", "model.adapter=null"], "reference=base: needs an adapter to turn off"),
        (["model.objective.reference=base", "model.adapter.init_from=x"], "without the adapter that training starts"),
        (["model.objective.beta=0"], "model.objective.beta=0.0: must be a finite number above 0"),
        (["data.seq_len=0"], "data.seq_len=0: must be at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(
    there: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert start([*SMALL, "model.init_from=base", *options, "run_dir=refused"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("refused").exists()


def test_a_run_without_a_base_says_what_is_missing(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(["+conf=llm/dpo_lora"]) == 2
    assert "model.init_from: is for you to give" in capsys.readouterr().err
