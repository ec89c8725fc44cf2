"""What lies in the run folder when a run is done, and what was said about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from nemo_like.callbacks import MetricsWriter, Report
from nemo_like.callbacks.config import MetricsWriterConfig, ProgressBarConfig
from nemo_like.core.summary import Section, Table
from nemo_like.tracking.logger import JsonlLogger

# Said by Lightning about the toy, which has no loader workers, and about its own use of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval.*"),
]


class Toy(pl.LightningModule):
    unit = "tokens"

    def __init__(self, *, fail_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.fail_at = fail_at
        self.step_metrics: dict[str, Tensor | float] = {}
        self.val_metrics = {"val/loss": 1.25}
        self.seen: dict[str, bool] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.fail_at:
            raise KeyboardInterrupt
        loss = self.layer(batch).square().mean()
        self.step_metrics |= {"train/loss": loss.detach(), "train/units": torch.tensor(100)}
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def summarize(self) -> list[Section]:
        self.seen = {"training": self.training, "gradients": torch.is_grad_enabled()}
        return [
            Section(
                title="Held-out text",
                table=Table(
                    columns=["subset", "bits per byte"],
                    rows=[["novels", 1.5], ["bad", float("nan")]],
                ),
            ),
            Section(title="A generated sample", text="[bold]Call me <Ishmael>[/bold]"),
        ]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2)

    def describe(self) -> list[Section]:
        return [Section(title="Composition", text="all novels")]


def run(model: Toy, folder: Path, *callbacks: pl.Callback) -> None:
    trainer = pl.Trainer(
        max_steps=4,
        max_epochs=-1,
        accelerator="cpu",
        callbacks=[MetricsWriter(every_n_steps=1), *callbacks],
        default_root_dir=folder,
        logger=JsonlLogger(folder=folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=Data())


def test_a_run_leaves_picture_page_summary_and_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: tiny\nseed: 7\n")
    model = Toy()
    run(model, folder, Report())

    names = {path.name for path in folder.iterdir()}
    assert names == {
        *(
            "config.yaml",
            "metrics.jsonl",
            "loss.png",
            "report.html",
            "summary.json",
            "environment.json",
        ),
    }
    page = (folder / "report.html").read_text()
    for part in (
        "Held-out text",
        "Call me &lt;Ishmael&gt;",
        "Composition",
        ">seed</span>",
        "train/units",
        "Environment",
    ):
        assert (part in page) == (part != "train/units"), part

    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["name"], summary["steps"], summary["val_loss"]) == ("tiny", 4, 1.25)
    assert summary["num_parameters"] == 8
    assert summary["units_per_s"] > 0
    assert summary["sections"][0]["table"]["rows"] == [["novels", 1.5], ["bad", None]]
    assert "torch" in json.loads((folder / "environment.json").read_text())["packages"]

    said = capsys.readouterr().out
    for part in (
        "Held-out text",
        "1.5000",
        "[bold]Call me <Ishmael>[/bold]",
        "all novels",
        "4 steps in 0:00",
    ):
        assert part in said
    assert model.seen == {"training": False, "gradients": False}
    assert model.training


def test_folder_and_name_can_be_given(tmp_path: Path) -> None:
    run(Toy(), tmp_path / "logs", Report(run_dir=tmp_path / "out", name="my run"))
    assert (tmp_path / "out" / "report.html").is_file()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["name"] == "my run"


def test_an_interrupted_run_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(Toy(fail_at=2), tmp_path, Report())
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_all_ranks_summarize_and_rank_zero_alone_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pl.Trainer, "is_global_zero", property(lambda self: False))
    model = Toy()
    run(model, tmp_path, Report())
    assert model.seen == {"training": False, "gradients": False}
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("config", "faults"),
    [
        (ProgressBarConfig(), []),
        (ProgressBarConfig(refresh_s=-1, line_every_s=-2), ["refresh_s=-1", "line_every_s=-2"]),
        (MetricsWriterConfig(), []),
        (MetricsWriterConfig(every_n_steps=0, window=0), ["every_n_steps=0", "window=0"]),
    ],
)
def test_every_value_out_of_range_is_named(config: Any, faults: list[str]) -> None:
    assert [fault.partition(":")[0] for fault in config.check()] == faults
