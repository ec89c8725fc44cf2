"""Short runs of the toy model, with everything that happened in them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from nemo_like.callbacks.checkpointing import Checkpointing
from nemo_like.core.precision import PrecisionName, build_precision
from nemo_like.strategies.ddp import DDPStrategy
from nemo_like.testing.toy import ToyDataModule, ToyModel


class FusedAdamW:
    """Builds AdamW with one learning rate for everything."""

    def build(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)


class Recorder(pl.Callback):
    """Notes figures and sample ids of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.sample_ids: list[list[int]] = []

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Notes a step."""
        metrics: dict[str, Any] = pl_module.step_metrics  # type: ignore[assignment]
        self.steps.append({key: float(value) for key, value in metrics.items()})
        self.sample_ids.append(batch.sample_ids)


def fit_toy(
    *,
    micro_batch_size: int = 8,
    devices: int = 1,
    steps: int = 5,
    dropout: float = 0.0,
    folder: Path | None = None,
    resume: Path | None = None,
    num_samples: int = 20,
    every_n_steps: int = 2,
    precision: PrecisionName = "fp32",
    strategy: pl.strategies.Strategy | None = None,
    **trainer_options: Any,
) -> dict[str, Any]:
    """Trains :class:`ToyModel` for a few steps.

    Args:
        micro_batch_size: Of the default strategy.
        devices: Ranks; more than one only inside :func:`nemo_like.testing.world.run_world`.
        steps: ``max_steps`` of the trainer.
        dropout: Of the model.
        folder: Where to save every ``every_n_steps`` steps; None saves nothing.
        resume: Checkpoint folder to go on from.
        num_samples: Samples an epoch; 8 are a step.
        every_n_steps: See ``folder``.
        precision: Number format.
        strategy: Another than the data-parallel one.
        trainer_options: Of Lightning's Trainer.

    Returns:
        ``steps`` (figures of each), ``sample_ids``, ``weights``, ``gradients`` (of the last step), ``position``,
        ``val`` (figures of the last validation), ``global_step``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model, data, recorder = (
            ToyModel(dropout=dropout),
            ToyDataModule(num_samples=num_samples),
            Recorder(),
        )
        model.optim, model.seed, model.schedule = FusedAdamW(), 3, lambda step: 1 / (1 + step)
        model.gradient_clip_norm = 0.5
        callbacks: list[pl.Callback] = [recorder]
        if folder is not None:
            callbacks.append(
                Checkpointing(folder=folder, every_n_steps=every_n_steps, keep_last=100)
            )
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy or DDPStrategy(micro_batch_size=micro_batch_size),
            plugins=[build_precision(precision, "cpu")],
            max_steps=steps,
            max_epochs=-1,
            callbacks=callbacks,
            **{**QUIET, **trainer_options},
        )
        trainer.fit(model, datamodule=data, ckpt_path=resume)
    return {
        "steps": recorder.steps,
        "sample_ids": recorder.sample_ids,
        "weights": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "gradients": {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        },
        "position": data.position,
        "val": dict(model.val_metrics),
        "global_step": trainer.global_step,
    }


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "use_distributed_sampler": False,
    "check_val_every_n_epoch": None,
    "val_check_interval": 1000,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "default_root_dir": "/nonexistent",
}
"""Options of Lightning's Trainer: nothing but the steps."""
