"""FP8: emulated it stays near fp32, and hardware without it is refused before anything starts."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from nemo_like.collections.llm.decoder import DecoderModel
from nemo_like.collections.llm.decoder.config import DecoderConfig
from nemo_like.collections.llm.testing import TinyTextDataModule, rehearse
from nemo_like.core.errors import ConfigError, MissingExtraError
from nemo_like.core.extras import require
from nemo_like.core.float8 import Float8Precision
from nemo_like.core.precision import build_precision
from nemo_like.optim import AdamW
from nemo_like.strategies import DDPStrategy, FSDPStrategy
from nemo_like.testing.numerics import assert_close
from nemo_like.testing.toy import ToyModel

SHAPE = {"num_layers": 2, "num_heads": 4, "intermediate_size": 48, "max_positions": 16}


def emulate(build: Any) -> Any:
    """A strategy whose model computes in emulated FP8; without autocast, which cannot be emulated on a CPU."""

    class Emulating(build):  # type: ignore[misc]
        def wrap_model(self) -> None:
            Float8Precision("cpu", emulate=True).convert_module(self.module)
            super().wrap_model()

    return Emulating(micro_batch_size=2)


def losses(run: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([step["train/loss"] for step in run["steps"]])


@pytest.mark.parametrize("build", [DDPStrategy, FSDPStrategy])
def test_emulated_fp8_stays_within_three_percent_of_fp32(build: Any) -> None:
    fp8, fp32 = rehearse(emulate(build)), rehearse(DDPStrategy(micro_batch_size=2))
    assert not torch.equal(losses(fp8)[:1], losses(fp32)[:1])
    # E4M3 has three bits of mantissa: a rounding error of 6 % an element, of which most averages out.
    assert_close(losses(fp8), losses(fp32), tolerance=3e-2)
    assert fp8["weights"].keys() == fp32["weights"].keys()
    assert all(tensor.dtype is torch.float32 for tensor in fp8["weights"].values())


def test_lightning_converts_the_model_by_the_plugin() -> None:
    model = DecoderModel(network=DecoderConfig(vocab_size=64, hidden_size=32, **SHAPE))
    model.optim = AdamW(lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=DDPStrategy(micro_batch_size=8), max_steps=2,
            plugins=[Float8Precision("cpu", emulate=True)], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(model, datamodule=TinyTextDataModule())
    assert type(model.network.layers[1].mlp.up).__name__ == "Float8Linear"
    assert torch.isfinite(torch.as_tensor(model.step_metrics["train/loss"]))


class Blocks(ToyModel):
    """Two blocks with layers that fit and one that does not, and an output that is in no block."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Linear(width, 24)) for _ in range(2)
        )
        self.output = nn.Linear(32, 64)


def test_layers_of_blocks_are_converted_where_sizes_fit() -> None:
    model = Blocks()
    weight = model.layers[0][0].weight  # type: ignore[index]
    Float8Precision("cpu", emulate=True).convert_module(model)
    kinds = {name: type(it).__name__ for name, it in model.named_modules() if hasattr(it, "weight")}
    assert kinds["layers.0.0"] == kinds["layers.1.0"] == "Float8Linear"
    assert kinds["layers.0.1"] == kinds["output"] == kinds["network.0"] == "Linear"
    assert model.layers[0][0].weight is weight  # type: ignore[index]


def test_a_converted_model_draws_the_same_weights() -> None:
    model = DecoderModel(network=DecoderConfig(vocab_size=64, hidden_size=32, **SHAPE))
    model.seed = 5
    expected = dict(model.draw_weights())
    Float8Precision("cpu", emulate=True).convert_module(model)
    for name, tensor in model.draw_weights():
        assert torch.equal(tensor, expected.pop(name)), name
    assert not expected


def test_a_model_without_layers_that_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="none of the 4 linear layers in the blocks of Blocks"):
        Float8Precision("cpu", emulate=True).convert_module(Blocks(width=20))


def test_a_cpu_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"8\.9 or above, the device is cpu; use bf16-mixed or fp32"
    ):
        build_precision("fp8-mixed", "cpu")


def test_an_older_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    with pytest.raises(ConfigError, match=r"A100 has 8\.0; use bf16-mixed or fp32"):
        build_precision("fp8-mixed", "cuda")


def test_torchao_comes_with_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'nemo-like\[fp8\]'"):
        require("torchao")


@pytest.mark.gpu
def test_fp8_on_a_gpu_follows_bf16() -> None:
    shape = DecoderConfig(vocab_size=64, hidden_size=256, **SHAPE)
    sums = {}
    for name in ("bf16-mixed", "fp8-mixed"):
        torch.manual_seed(0)
        plugin, model = build_precision(name, "cuda"), DecoderModel(network=shape)  # type: ignore[arg-type]
        plugin.convert_module(model)
        model.cuda()
        batch = TinyTextDataModule().make_batch([0, 1, 2])
        tokens, targets = batch.tokens_BT.cuda(), batch.targets_BT.cuda()
        with plugin.train_step_context():
            loss = model.compute_loss_sum(type(batch)(tokens, targets, None))
        loss.backward()
        sums[name] = loss.detach(), model.network.layers[0].mlp.up.weight.grad.norm()
    assert sums["fp8-mixed"][0] != sums["bf16-mixed"][0]
    for fp8, bf16 in zip(*sums.values(), strict=True):
        assert_close(fp8, bf16, tolerance=5e-2)
