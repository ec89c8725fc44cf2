"""Number formats: close to fp32, loss scaling that skips and resumes, a word of warning."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from nemo_like.core.checkpoint import open_checkpoint
from nemo_like.core.precision import build_precision, has_fast_bf16
from nemo_like.testing.fit import fit_toy


def losses(run: dict) -> torch.Tensor:
    return torch.tensor([step["train/loss"] for step in run["steps"]])


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precision_follows_fp32(precision: str) -> None:
    mixed, exact = fit_toy(precision=precision), fit_toy()
    assert not torch.equal(losses(mixed), losses(exact))
    assert_close(losses(mixed), losses(exact), rtol=2e-2, atol=0)
    # Clipping sees unscaled gradients: with scaled ones the norms would be thousands.
    norms = [[step["train/grad_norm"] for step in run["steps"]] for run in (mixed, exact)]
    assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=5e-2, atol=0)
    assert all(tensor.dtype is torch.float32 for tensor in mixed["weights"].values())


def test_the_loss_scale_resumes(tmp_path: Path) -> None:
    options = {"precision": "fp16-mixed", "dropout": 0.2}
    whole = fit_toy(steps=6, folder=tmp_path, every_n_steps=1, **options)
    assert (
        open_checkpoint(tmp_path / "step_00000003").state["MixedPrecision"]["_growth_tracker"] == 3
    )
    resumed = fit_toy(steps=6, resume=tmp_path / "step_00000003", **options)
    for name, tensor in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor)


def test_a_cpu_without_bf16_units_says_so(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert not has_fast_bf16("cpu")
    with caplog.at_level(logging.WARNING, logger="nemo_like"):
        logging.getLogger("nemo_like").propagate = True
        build_precision("bf16-mixed", "cpu")
    assert "bf16-mixed on this CPU" in caplog.text
    assert "about ten times as long" in caplog.text
