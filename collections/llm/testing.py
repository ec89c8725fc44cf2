"""A tiny language model and its run, to rehearse a strategy against the single process."""

# Shapes: N = samples, B = samples of a micro-batch, T = tokens.

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from nemo_like.callbacks.checkpointing import Checkpointing
from nemo_like.core.precision import PrecisionName, build_precision
from nemo_like.core.seed import seed_all
from nemo_like.optim import AdamW, Muon
from nemo_like.testing.fit import QUIET, Recorder
from nemo_like.testing.toy import ToyDataModule

from .data import IGNORE_INDEX, TextBatch
from .decoder import DecoderModel
from .decoder.config import DecoderConfig

_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 48,
    "max_positions": 16,
    "tie_embeddings": False,
}


class TinyTextDataModule(ToyDataModule):
    """Random tokens in order: samples of two documents, of which some tokens are no targets.

    Args:
        num_samples: Samples of an epoch.
        packed: Whether samples hold two documents, so that attention needs a mask.
        vocab_size: Number of tokens.
        seq_len: T.
    """

    def __init__(
        self,
        *,
        num_samples: int = 20,
        global_batch_size: int = 8,
        packed: bool = True,
        vocab_size: int = 64,
        seq_len: int = 16,
    ) -> None:
        super().__init__(num_samples=num_samples, global_batch_size=global_batch_size)
        generator = torch.Generator().manual_seed(11)
        self.packed = packed
        self.tokens_NT = torch.randint(vocab_size, (num_samples, seq_len + 1), generator=generator)
        # From nearly none to nearly all, so that means of means would be wrong.
        share_N1 = torch.linspace(0.1, 0.9, num_samples).unsqueeze(1)
        self.is_scored_NT = torch.rand(num_samples, seq_len, generator=generator) < share_N1
        starts_N1 = torch.randint(1, seq_len, (num_samples, 1), generator=generator)
        self.segments_NT = (torch.arange(seq_len) >= starts_N1).int()

    def make_batch(self, ids: list[int]) -> TextBatch:  # type: ignore[override]
        """A micro-batch of these samples; none gives a blank one."""
        index = torch.tensor(ids or [0])
        targets_BT = self.tokens_NT[index, 1:].clone()
        targets_BT[~self.is_scored_NT[index]] = IGNORE_INDEX
        if not ids:
            targets_BT.fill_(IGNORE_INDEX)
        return TextBatch(
            self.tokens_NT[index, :-1],
            targets_BT,
            self.segments_NT[index] if self.packed else None,
        )


class _WeightTaker(pl.Callback):
    """Takes whole weights at the end of training, while the ranks can still talk."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gathers them."""
        strategy: Any = trainer.strategy
        weights = strategy.gather_weights()
        self.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}


def rehearse(
    strategy: pl.strategies.Strategy | str,
    *,
    devices: int = 1,
    steps: int = 10,
    optim: Any = None,
    network: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    packed: bool = True,
    num_samples: int = 20,
    gradient_clip_norm: float | None = 0.5,
    precision: PrecisionName = "fp32",
    folder: Path | None = None,
    every_n_steps: int = 5,
    resume: Path | None = None,
    callbacks: Sequence[pl.Callback] = (),
    **trainer_options: Any,
) -> dict[str, Any]:
    """Trains the tiny model for a few steps on this rank.

    Args:
        strategy: One of ours, or the name of one that Lightning knows.
        devices: Ranks; more than one only inside :func:`nemo_like.testing.world.run_world`.
        steps: Of the whole run.
        optim: None is AdamW; ``"muon"`` is Muon; or a builder.
        network: Differences from the tiny shape.
        model_options: Of ``DecoderModel``: the base to start from, an adapter.
        packed: Two documents a sample.
        num_samples: Of an epoch; 8 are a step.
        gradient_clip_norm: Largest norm of the gradient.
        precision: Number format.
        folder: Where to save; None saves nothing.
        every_n_steps: Steps between two checkpoints.
        resume: Checkpoint folder to go on from.
        callbacks: Further ones.
        trainer_options: Of Lightning's Trainer.

    Returns:
        ``steps`` (figures of each), ``sample_ids``, ``weights`` (whole, canonical names), ``val``, ``position``,
        ``global_step``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_all(0)
        shape = DecoderConfig(**{**_SHAPE, **(network or {})})
        model = DecoderModel(network=shape, **(model_options or {}))
        data = TinyTextDataModule(
            num_samples=num_samples,
            packed=packed,
            vocab_size=shape.vocab_size,
            seq_len=shape.max_positions,
        )
        if optim is None or optim == "muon":
            optim = Muon(lr=0.02) if optim == "muon" else AdamW(lr=1e-2)
        model.optim, model.seed, model.schedule = optim, 3, _halve_slowly
        model.gradient_clip_norm = gradient_clip_norm
        recorder, taker = Recorder(), _WeightTaker()
        watchers: list[pl.Callback] = [recorder, taker, *callbacks]
        if folder is not None:
            watchers.append(
                Checkpointing(folder=folder, every_n_steps=every_n_steps, keep_last=100)
            )
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            plugins=[build_precision(precision, "cpu")],
            max_steps=steps,
            max_epochs=-1,
            callbacks=watchers,
            **{**QUIET, "val_check_interval": steps, "limit_val_batches": 1.0, **trainer_options},
        )
        trainer.fit(model, datamodule=data, ckpt_path=resume)
    return {
        "steps": recorder.steps,
        "sample_ids": recorder.sample_ids,
        "weights": taker.weights,
        "val": dict(model.val_metrics),
        "position": data.position,
        "global_step": trainer.global_step,
    }


def _halve_slowly(step: int) -> float:
    return float(0.5 ** (step / 10))
