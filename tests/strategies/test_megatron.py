"""What the Megatron strategy refuses, and that its rehearsal on a CPU leaves no trace."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.overrides import _get_current_function_mode

from nemo_like.collections.llm.decoder import DecoderModel
from nemo_like.collections.llm.decoder.config import DecoderConfig
from nemo_like.collections.llm.testing import TinyTextDataModule, rehearse
from nemo_like.core.checkpoint import open_checkpoint
from nemo_like.core.errors import CheckpointError, ConfigError, MissingExtraError
from nemo_like.core.float8 import Float8Precision
from nemo_like.core.seed import derive_seed, seed_all
from nemo_like.optim import AdamW
from nemo_like.strategies import MegatronStrategy
from nemo_like.strategies.megatron.cuda_on_cpu import cuda_on_cpu
from nemo_like.testing.fit import fit_toy
from nemo_like.testing.toy import ToyModel

RANDOM = "megatron.core.tensor_parallel.random"


def cuda_functions() -> dict[str, object]:
    MegatronStrategy()  # imports Megatron-Core
    random = sys.modules[RANDOM]
    found = {f"torch.cuda.{name}": getattr(torch.cuda, name) for name in dir(torch.cuda)}
    linear = sys.modules["megatron.core.tensor_parallel.layers"]
    found["warned"] = linear.linear_with_grad_accumulation_and_async_allreduce.warned
    return {**found, **{name: getattr(random, name) for name in dir(random) if "cuda" in name}}


def act_as_megatron() -> None:
    with cuda_on_cpu():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
        tensor = torch.ones(2)
        assert tensor.cuda() is tensor
        assert tensor.to("cuda:0").device.type == "cpu"
        assert tensor.to(torch.device("cuda")).device.type == "cpu"
        torch.cuda.synchronize()
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        drawn = torch.rand(3)
        sys.modules[RANDOM]._set_cuda_rng_state(state)
        assert torch.equal(torch.rand(3), drawn)
        raise KeyError("inside")


def test_the_cpu_answers_for_cuda_inside_the_context_only() -> None:
    before, level = cuda_functions(), logging.getLogger(RANDOM).level
    with pytest.raises(KeyError, match="inside"):
        act_as_megatron()
    assert cuda_functions() == before
    assert logging.getLogger(RANDOM).level == level
    assert _get_current_function_mode() is None


def test_a_model_without_a_megatron_form_is_refused() -> None:
    with pytest.raises(TypeError, match=r"ToyModel has no Megatron form .*strategy=fsdp"):
        fit_toy(strategy=MegatronStrategy())
    assert not dist.is_initialized()
    assert not hasattr(ToyModel, "build_megatron")


def test_settings_that_contradict_each_other_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="virtual_pipeline=2: chunks are interleaved") as caught:
        MegatronStrategy(virtual_pipeline=2, sequence_parallel=True)
    assert "strategy.sequence_parallel=true: cuts the sequence" in caught.value.faults[1]


def test_ranks_must_make_whole_replicas() -> None:
    strategy = MegatronStrategy(tensor_parallel=2, pipeline_parallel=2)
    with pytest.raises(ConfigError, match=r"multiple of 4 ranks, .* is 1"):
        rehearse(strategy)


def test_fp16_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"fp16-mixed: .* bf16-mixed or fp32"):
        rehearse(MegatronStrategy(), precision="fp16-mixed")
    assert not dist.is_initialized()


SHAPE = DecoderConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, max_positions=16
)


def fit(model: DecoderModel, *parts: Any) -> None:
    """One step; parts are callbacks and plugins."""
    model.optim, model.seed = AdamW(lr=1e-3), 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=MegatronStrategy(),
            callbacks=[it for it in parts if isinstance(it, pl.Callback)],
            plugins=[it for it in parts if not isinstance(it, pl.Callback)],
            max_steps=1,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
        ).fit(model, datamodule=TinyTextDataModule())


def test_fp8_is_refused_where_transformer_engine_is_not() -> None:
    with pytest.raises(ConfigError, match=r"fp8-mixed: with strategy=megatron needs"):
        fit(DecoderModel(network=SHAPE), Float8Precision("cpu", emulate=True))
    assert not dist.is_initialized()


class StartTaker(pl.Callback):
    """Takes the weights that training starts from."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.weights = {name: it.clone() for name, it in strategy.gather_weights().items()}


def test_a_model_made_without_weights_gets_those_that_its_constructor_draws() -> None:
    with torch.device("meta"):
        model = DecoderModel(network=SHAPE)
    taker = StartTaker()
    fit(model, taker)
    seed_all(derive_seed(7, 0))
    expected = DecoderModel(network=SHAPE).state_dict()
    assert taker.weights.keys() == expected.keys()
    assert all(torch.equal(taker.weights[name], it) for name, it in expected.items())


def test_a_failure_before_there_are_weights_is_what_one_sees() -> None:
    with torch.device("meta"):
        model = DecoderModel(network=SHAPE)
    with pytest.raises(ConfigError, match="scaling"):
        fit(model, MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")))


class NotInstalled:
    """An import path on which there is no Megatron-Core."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "megatron":
            raise ModuleNotFoundError("No module named 'megatron'", name="megatron")


def test_a_missing_megatron_core_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(), *sys.meta_path])
    with pytest.raises(MissingExtraError, match=r"nemo-like\[megatron\]"):
        MegatronStrategy()


def test_names_that_other_stages_read_must_be_in_the_checkpoint_too(tmp_path: Path) -> None:
    fit_toy(steps=2, folder=tmp_path)
    checkpoint = open_checkpoint(tmp_path / "step_00000002")
    weights = {name: torch.zeros_like(it) for name, it in ToyModel().state_dict().items()}
    name, others = min(weights), set(weights) - {min(weights)}
    checkpoint.load_tensors("model", {name: weights[name]}, elsewhere=others)
    assert weights[name].any()
    with pytest.raises(CheckpointError, match="1 missing, 0 unexpected") as caught:
        checkpoint.load_tensors("model", {name: weights[name]}, elsewhere={*others, "other"})
    assert caught.value.missing == ["other"]
