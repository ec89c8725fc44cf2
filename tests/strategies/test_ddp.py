"""A step is the same however it is cut, and a run is the same however often it is interrupted."""

from __future__ import annotations

import itertools
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.testing import assert_close

from nemo_like.core.errors import CheckpointError
from nemo_like.strategies import DDPStrategy, register
from nemo_like.testing.fit import fit_toy as fit
from nemo_like.testing.numerics import TOLERANCE
from nemo_like.testing.toy import ToyDataModule, ToyModel
from nemo_like.testing.world import run_world

# 8 = 4 x 2 = 2 ranks x 4, as the run promises.
EXACT = {"rtol": 1e-6, "atol": 1e-7}


def fit_rank(options: dict[str, Any]) -> dict[str, Any]:
    return fit(**options)


def assert_same_run(
    run: dict[str, Any], reference: dict[str, Any], tolerance: dict[str, float] = EXACT
) -> None:
    assert len(run["steps"]) == len(reference["steps"]) > 0
    for step, expected in zip(run["steps"], reference["steps"], strict=True):
        assert step["train/lr"] == expected["train/lr"]
        for key in ("train/loss", "train/grad_norm"):
            assert_close(torch.tensor(step[key]), torch.tensor(expected[key]), **tolerance)
    for part in ("weights", "gradients"):
        for name, tensor in reference[part].items():
            assert_close(run[part][name], tensor, **tolerance)
    assert run["position"] == reference["position"]


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_micro_batches_do_not_change_a_step(micro_batch_size: int) -> None:
    # 20 samples, 8 a step: the third step is short, so its mean is over fewer targets.
    assert_same_run(fit(micro_batch_size=micro_batch_size), fit(micro_batch_size=8))


def test_the_loss_is_the_mean_over_all_targets_of_the_step() -> None:
    run = fit(steps=3)
    torch.manual_seed(0)
    model, data = ToyModel(), ToyDataModule()
    batch = data.make_batch(list(range(8)))
    expected = (model.compute_loss_sum(batch).detach() / batch.is_target_BT.sum()).item()
    assert run["steps"][0]["train/loss"] == pytest.approx(expected, rel=1e-6)
    assert [step["train/units"] for step in run["steps"]] == [40, 40, 20]


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "micro_batch_size"), [(2, 4), (2, 1), (3, 2)])
def test_ranks_do_not_change_a_step(ranks: int, micro_batch_size: int) -> None:
    # With 3 ranks the shares are uneven and one rank fills up with a blank micro-batch.
    options = {"micro_batch_size": micro_batch_size, "devices": ranks}
    runs = run_world(ranks, fit_rank, options)
    reference = fit(micro_batch_size=8)
    for run in runs:
        assert_same_run(run, reference)
    ids = [
        sorted(itertools.chain(*step))
        for step in zip(*(run["sample_ids"] for run in runs), strict=True)
    ]
    assert ids == [sorted(step) for step in reference["sample_ids"]]


@pytest.mark.dist
def test_two_ranks_in_bf16_are_close_to_one_in_bf16() -> None:
    # The mean over ranks of gradients that were rounded is rounded in other places.
    options = {"micro_batch_size": 4, "devices": 2, "precision": "bf16-mixed"}
    reference = fit(micro_batch_size=8, precision="bf16-mixed")
    for run in run_world(2, fit_rank, options):
        for step, expected in zip(run["steps"], reference["steps"], strict=True):
            for key in ("train/loss", "train/grad_norm"):
                assert step[key] == pytest.approx(expected[key], rel=TOLERANCE[torch.bfloat16])


@pytest.mark.dist
def test_a_rank_without_samples_takes_part_in_the_step() -> None:
    # 9 samples, 8 a step: the second step has one sample for two ranks.
    options = {"micro_batch_size": 4, "devices": 2, "num_samples": 9}
    reference = fit(num_samples=9)
    for run in run_world(2, fit_rank, options):
        assert_same_run(run, reference)


def test_dropout_differs_from_step_to_step_and_repeats_from_run_to_run() -> None:
    one, two = fit(dropout=0.5), fit(dropout=0.5)
    assert one["steps"] == two["steps"]
    assert fit(dropout=0.0)["steps"] != one["steps"]


@pytest.mark.parametrize("interrupted_at", [1, 2, 3, 5, 6, 9])
def test_resumed_is_uninterrupted_bit_for_bit(interrupted_at: int, tmp_path: Path) -> None:
    # Three steps an epoch: 3, 6 and 9 are the last steps of epochs.
    options = {
        "micro_batch_size": 2,
        "dropout": 0.3,
        "val_check_interval": 2,
        "limit_val_batches": 1.0,
    }
    whole = fit(steps=10, folder=tmp_path, every_n_steps=1, **options)
    resumed = fit(steps=10, resume=tmp_path / f"step_{interrupted_at:08d}", **options)
    assert resumed["global_step"] == 10
    assert resumed["sample_ids"] == whole["sample_ids"][interrupted_at:]
    assert resumed["steps"] == whole["steps"][interrupted_at:]
    assert resumed["val"] == whole["val"]
    for name, tensor in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor), name


@pytest.mark.dist
def test_another_number_of_ranks_goes_on_at_the_exact_sample(tmp_path: Path) -> None:
    whole = fit(steps=12)
    fit(steps=3, folder=tmp_path)
    runs = []
    for size, first in ((2, 3), (3, 6)):
        options = {"devices": size, "micro_batch_size": 4, "folder": tmp_path, "steps": first + 3}
        options["resume"] = tmp_path / f"step_{first:08d}"
        ranks = run_world(size, fit_rank, options)
        ids = zip(*(rank["sample_ids"] for rank in ranks), strict=True)
        # Each rank has a contiguous share of the step.
        assert [list(chain(*step)) for step in ids] == whole["sample_ids"][first : first + 3]
        runs.append((ranks[0], whole["steps"][first : first + 3]))
    back = fit(steps=12, resume=tmp_path / "step_00000009")
    assert back["sample_ids"] == whole["sample_ids"][9:]
    for run, expected in (*runs, (back, whole["steps"][9:])):
        losses = torch.tensor([step["train/loss"] for step in run["steps"]])
        assert_close(losses, torch.tensor([step["train/loss"] for step in expected]), **EXACT)


def test_a_checkpoint_of_another_model_lists_all_names(tmp_path: Path) -> None:
    fit(steps=2, folder=tmp_path)

    class Wider(ToyModel):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.extra = torch.nn.Linear(2, 2)

    from nemo_like.core.checkpoint import open_checkpoint

    with pytest.raises(CheckpointError, match="2 missing, 0 unexpected") as caught:
        open_checkpoint(tmp_path / "step_00000002").load_tensors("model", Wider().state_dict())
    assert caught.value.missing == ["extra.bias", "extra.weight"]


def test_other_modules_are_refused_by_name() -> None:
    class Foreign(pl.LightningModule):
        pass

    with pytest.raises(TypeError, match="Foreign is no nemo_like"):
        DDPStrategy().connect(Foreign())


def test_a_model_refuses_strategies_that_know_no_steps() -> None:
    with pytest.raises(RuntimeError, match=r"ToyModel\.training_step .*strategy='nemo_ddp'"):
        ToyModel().training_step(None, 0)


def test_micro_batch_size_is_checked() -> None:
    with pytest.raises(ValueError, match="micro_batch_size=0"):
        DDPStrategy(micro_batch_size=0)


def test_strategies_are_known_to_lightning_by_name() -> None:
    register()
    register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            strategy="nemo_ddp", accelerator="cpu", devices=1, logger=False, barebones=True
        )
    assert isinstance(trainer.strategy, DDPStrategy)


def test_a_checkpoint_knows_the_figures_of_its_own_step_only(tmp_path: Path) -> None:
    from nemo_like.core.checkpoint import open_checkpoint

    options = {"val_check_interval": 2, "limit_val_batches": 1.0, "every_n_steps": 1}
    run = fit(steps=4, folder=tmp_path, **options)
    metrics = [open_checkpoint(path).state["metrics"] for path in sorted(tmp_path.iterdir())]
    assert [list(step) for step in metrics] == [[], ["val/loss"], [], ["val/loss"]]
    assert metrics[3] == run["val"]
