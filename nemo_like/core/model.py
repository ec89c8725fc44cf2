"""The one base class of all models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from nemo_like.core.nonfinite import NonfiniteSteps
from nemo_like.core.seed import derive_seed, seed_all
from nemo_like.core.summary import Section


class OptimizerBuilder(Protocol):
    """Makes the optimizer of a module: parameter groups, decay rules and all."""

    def build(self, module: nn.Module) -> Optimizer:
        """An optimizer over the parameters of ``module`` that require a gradient."""
        ...


class Model(pl.LightningModule):
    """A network, its loss, its metrics.

    A subclass says three things: how many targets a micro-batch has (:meth:`count_targets`), the *sum* of the loss
    over them (:meth:`compute_loss_sum`), and how it is judged (:meth:`validation_step`, :meth:`summarize`). The
    strategy runs a whole optimizer step (a list of micro-batches), divides by the number of targets over all
    micro-batches and ranks, and leaves the gradients; so the result does not depend on how a step was cut.

    Attributes:
        optim: Makes the optimizer; set by the run.
        seed: Of the run; makes every training step's randomness a function of (seed, step, rank). None leaves the
            generators alone.
        schedule: Optimizer step (0 is the first) -> factor on every learning rate; None keeps them constant.
        gradient_clip_norm: Largest norm of the gradient over all parameters; None clips nothing.
        val_weights: What is validated: ``model``, or ``ema``, the moving average that ``optim.ema_decay`` asks for.
        nonfinite: The steps that were left out.
        step_sums: Figures besides the loss of the micro-batches so far, see :meth:`add_sums`.
        step_metrics: Figures of the last training step, ``<stage>/<metric>[_<unit>]``; tensors stay on the device
            until somebody logs them.
        val_metrics: Figures of the last validation.
        val_step: Optimizer steps done at the last validation; -1 before the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.optim: OptimizerBuilder | None = None
        self.schedule: Callable[[int], float] | None = None
        self.gradient_clip_norm: float | None = None
        self.seed: int | None = None
        self.val_weights: Literal["model", "ema"] = "model"
        self.nonfinite = NonfiniteSteps()
        # The strategy runs the whole step: Lightning's loop only counts.
        self.automatic_optimization = False
        self.step_sums: dict[str, Tensor] = {}
        self.step_metrics: dict[str, Tensor | float] = {}
        self.val_metrics: dict[str, float] = {}
        self.val_step = -1
        self._val_loss_sum = torch.zeros((), dtype=torch.float64)
        self._val_sums: dict[str, Tensor] = {}
        self._val_count = torch.zeros((), dtype=torch.int64)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; the name of the running hook goes past ``nn.Module``'s search for parameters.

        Lightning notes it in the module some twenty times a step, and each of them would cost ten microseconds.
        """
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    # What a subclass says.

    def count_targets(self, micro_batch: Any) -> Tensor:
        """How many targets (tokens, frames, pairs) the loss of this micro-batch sums over; int64, no gradient.

        Called before the forward pass, so it must follow from the batch alone.
        """
        raise NotImplementedError(f"{type(self).__name__} must define count_targets")

    def compute_loss_sum(self, micro_batch: Any) -> Tensor:
        """The sum of the loss over the targets of this micro-batch; a scalar with gradient."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_loss_sum")

    def add_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Notes figures besides the loss; for :meth:`compute_loss_sum` to call.

        They are summed up over micro-batches and ranks and divided by the number of targets, as the loss is, and become
        ``train/<name>`` and ``val/<name>``.

        Args:
            sums: Name -> sum over the targets of a micro-batch; the same names for every micro-batch, blank ones too.
        """
        for name, part in sums.items():
            part = part.detach().double()
            self.step_sums[name] = self.step_sums[name] + part if name in self.step_sums else part

    def count_units(self, micro_batch: Any) -> int:
        """What throughput counts (tokens, frames): read from the batch's shape, padding included."""
        return int(self.count_targets(micro_batch))

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks of the network, in order: what is sharded, or computed again, as one.

        Those in the outermost ``nn.ModuleList`` of more than one module, unless a subclass says otherwise.
        """
        for module in self.modules():
            if isinstance(module, nn.ModuleList) and len(module) > 1:
                return list(module)
        return []

    can_start_empty = False
    """Whether the model may be constructed on the meta device and be filled by :meth:`draw_weights` afterwards: every
    parameter belongs to a module with ``reset_parameters()``, and there are no buffers."""

    def draw_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that the constructor would have drawn, one module after the other, on the CPU.

        A rank takes its part of each and never holds all of them. The model itself is left as it is.
        """
        seed_all(derive_seed(self.seed or 0, 0))
        for prefix, module in self.named_modules():
            kept = {name: it for name, it in module._parameters.items() if it is not None}
            if not kept:
                continue
            drawn = {
                name: nn.Parameter(torch.empty(it.shape, dtype=it.dtype), requires_grad=False)
                for name, it in kept.items()
            }
            module._parameters.update(drawn)
            try:
                module.reset_parameters()
            finally:
                module._parameters.update(kept)
            for name, tensor in drawn.items():
                yield f"{prefix}.{name}", tensor.detach()

    unit = "targets"
    """Plural name of what :meth:`count_units` counts: ``tokens`` gives ``perf/tokens_per_s``."""

    def summarize(self) -> list[Section]:
        """What the model has to show at the end of a run, computed on all ranks (they may communicate)."""
        return []

    # Lightning's side.

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Refuses to run: a step belongs to the strategy."""
        raise RuntimeError(
            f"{type(self).__name__}.training_step was called by a strategy that knows no whole steps: "
            "use one of nemo_like.strategies, e.g. Trainer(strategy='nemo_ddp')"
        )

    def on_validation_epoch_start(self) -> None:
        """Empties the validation sums."""
        self._val_loss_sum = torch.zeros((), dtype=torch.float64)
        self._val_sums = {}
        self._val_count = torch.zeros((), dtype=torch.int64)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Adds up loss and targets; the mean is over all targets of all ranks, however uneven the batches."""
        strategy: Any = self.trainer.strategy
        self.step_sums = {}
        self._val_loss_sum += strategy.compute_loss_sum(batch).double().cpu()
        for name, part in self.step_sums.items():
            self._val_sums[name] = self._val_sums.get(name, 0) + part.cpu()
        self.step_sums = {}
        self._val_count += self.count_targets(batch).cpu()

    def on_validation_epoch_end(self) -> None:
        """Gives ``val/loss``, and the means of what :meth:`add_sums` was given."""
        strategy = self.trainer.strategy
        total, count, *parts = (
            strategy.reduce(part.to(self.device), reduce_op="sum")
            for part in (self._val_loss_sum, self._val_count, *self._val_sums.values())
        )
        means = {"val/loss": float(total / count)}
        for name, part in zip(self._val_sums, parts, strict=True):
            means[f"val/{name}"] = float(part / count)
        self.report_validation(means)

    def report_validation(self, metrics: dict[str, float]) -> None:
        """Makes figures known to loggers, to checkpointing, and to Lightning's callbacks; the same on all ranks."""
        self.val_metrics.update(metrics)
        self.val_step = self.trainer.global_step
        for name, value in metrics.items():
            # Of equal figures the largest is the figure itself, to the bit.
            self.log(name, value, logger=False, sync_dist=True, reduce_fx="max")

    def configure_optimizers(self) -> Any:
        """Optimizer and schedule, both counted in optimizer steps."""
        if self.optim is None:
            raise RuntimeError(
                f"{type(self).__name__}.optim is not set: give it e.g. nemo_like.optim.AdamW(lr=3e-4)"
            )
        optimizer = self.optim.build(self)
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            # A fused step would unscale inside itself, after the clipping that needs unscaled gradients.
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if self.schedule is None:
            return optimizer
        scheduler = LambdaLR(optimizer, self.schedule)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what the weights mean nothing without: files of the data module and of the model."""
        datamodule = getattr(self.trainer, "datamodule", None)
        artefacts = dict(datamodule.artefacts()) if datamodule is not None else {}
        checkpoint["files"] = {**checkpoint.get("files", {}), **artefacts, **self.artefacts()}
        if self.nonfinite.total:
            checkpoint["nonfinite_steps"] = self.nonfinite.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the count of steps that were left out."""
        self.nonfinite.load_state_dict(checkpoint.get("nonfinite_steps", {}))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The weights that a checkpoint holds, by canonical name; all of them, unless a subclass reads some elsewhere.

        They are the module's own tensors, so that filling them is loading.
        """
        return dict(self.state_dict())

    def artefacts(self) -> dict[str, bytes]:
        """Files that belong into every checkpoint of this model (its shape), name -> content."""
        return {}


# Lightning looks for batch_idx in this signature before every step; kept here, that costs a tenth.
Model.training_step.__signature__ = inspect.signature(Model.training_step)  # type: ignore[attr-defined]
