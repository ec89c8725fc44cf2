"""Direct preference optimisation as the objective of a language model."""
# Shapes: P = pairs, N = all pairs of the data; rows of (2, P) are the better answers, then the worse.

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nemo_like.core.errors import ConfigError
from nemo_like.nn.lora import LoraLinear

from ..data import TextBatch
from .batch import PreferenceBatch, compute_log_probs, count_scored
from .config import DpoConfig
from .data import PreferenceDataModule
from .losses import compute_preference_losses, compute_scores
from .reference import load_reference

if TYPE_CHECKING:
    from ..decoder.model import DecoderModel

logger = logging.getLogger(__name__)


class Dpo(DpoConfig):
    """Learns which of two answers is better; what the arguments mean stands in ``DpoConfig``.

    The targets of a batch are its pairs. Besides the loss a step gives, as means over its pairs, ``dpo_reward_chosen``
    and ``dpo_reward_rejected`` (beta times what the loss compares, see :func:`.losses.compute_scores`), their
    difference ``dpo_margin``, and ``dpo_accuracy``, the share of pairs whose margin is above 0.

    Raises:
        ConfigError: A value makes no sense; all faults at once.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if faults := list(self.check()):
            raise ConfigError([f"objective.{fault}" for fault in faults])
        self._reference_2N: Tensor | None = None

    def start(self, model: DecoderModel) -> None:
        """Compares itself with model and data; computes or finds the log-probabilities of a cached reference.

        Args:
            model: Has a trainer; every rank calls this.

        Raises:
            ConfigError: There is nothing to start from, no such reference, or the data are no preferences.
        """
        faults = list(self.check_model(init_from=model.init_from, adapter=model.adapter))
        data = getattr(model.trainer, "datamodule", None)
        if not isinstance(data, PreferenceDataModule):
            faults.append(
                f"data: is a {type(data).__name__}, the objective needs pairs: PreferenceDataModule"
            )
        if faults:
            raise ConfigError(faults)
        assert isinstance(data, PreferenceDataModule)
        reference = self.resolve_reference(model.adapter)
        logger.info("objective: DPO, loss %s, reference %s", self.loss, reference)
        if reference == "cached":
            self._reference_2N = load_reference(model, data)

    def count_targets(self, batch: TextBatch) -> Tensor:
        """The pairs of a batch, int64; a blank batch has none."""
        return _is_pair(count_scored(batch)).sum()

    def compute_loss_sum(self, model: DecoderModel, batch: TextBatch) -> Tensor:
        """The sum of the loss over the pairs; notes the figures of the step with the model.

        Args:
            model: Whose network is the policy, and without its adapters perhaps the reference.
            batch: From a :class:`PreferenceDataModule`.
        """
        num_tokens_2P = count_scored(batch)
        reference_2P = self._find_reference(model, batch)
        log_probs_2P = compute_log_probs(model.network, batch)
        scores_2P = compute_scores(log_probs_2P, reference_2P, num_tokens_2P, kind=self.loss)
        loss_P = compute_preference_losses(
            scores_2P, kind=self.loss, beta=self.beta, label_smoothing=self.label_smoothing
        )
        is_pair_P = _is_pair(num_tokens_2P)
        self._note(model, scores_2P.detach() * is_pair_P)
        return (loss_P * is_pair_P).sum()

    def _note(self, model: DecoderModel, scores_2P: Tensor) -> None:
        rewards_2P = self.beta * scores_2P
        margin_P = rewards_2P[0] - rewards_2P[1]
        model.add_sums(
            {
                "dpo_reward_chosen": rewards_2P[0].sum(),
                "dpo_reward_rejected": rewards_2P[1].sum(),
                "dpo_margin": margin_P.sum(),
                "dpo_accuracy": (margin_P > 0).sum(),
            }
        )

    @torch.no_grad()
    def _find_reference(self, model: DecoderModel, batch: TextBatch) -> Tensor | None:
        """Log-probabilities of the answers under the reference, (2, P); None without one."""
        kind = self.resolve_reference(model.adapter)
        if kind == "none":
            return None
        if kind == "base":
            # Autocast would keep what it rounded here, without a gradient, for the policy's pass; but what is trained
            # takes no part in this one.
            with evaluating(model.network), without_adapters(model.network):
                return compute_log_probs(model.network, batch)
        assert self._reference_2N is not None, "loaded when the run starts"
        assert isinstance(batch, PreferenceBatch), "checked when the run starts"
        assert batch.pair_ids_P is not None, "its data module numbers pairs"
        self._reference_2N = self._reference_2N.to(batch.pair_ids_P.device)
        return self._reference_2N[:, batch.pair_ids_P]


def _is_pair(num_tokens_2P: Tensor) -> Tensor:
    return num_tokens_2P[0] > 0


@contextmanager
def without_adapters(network: nn.Module) -> Iterator[None]:
    """The frozen model alone computes.

    Args:
        network: With adapters or without.
    """
    layers = [it for it in network.modules() if isinstance(it, LoraLinear)]
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_off = False


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Nothing is dropped and no noise is added.

    Args:
        network: Is put back into the mode that it was in.
    """
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)
