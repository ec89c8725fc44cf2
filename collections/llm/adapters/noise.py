"""Noise on the embeddings, against overfitting in fine-tuning (NEFTune)."""
# Shapes: B = samples, T = tokens, D = model width.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class EmbeddingNoise:
    """A forward hook of an embedding: in training, uniform noise of ``alpha / sqrt(T * D)`` is added (Jain et al. 2023,
    arXiv:2310.05914, algorithm 1; T counts padding, as in the authors' code).

    The noise comes from the global generator, which is set at each step: it is a function of (seed, step, rank).

    Args:
        alpha: Width; the paper takes 5, 10 and 15.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def __call__(self, module: nn.Module, arguments: Any, output_BTD: Tensor) -> Tensor:
        """Gives the embeddings with noise, or as they are outside of training."""
        if not module.training:
            return output_BTD
        width = self.alpha / math.sqrt(output_BTD.size(-2) * output_BTD.size(-1))
        return output_BTD + torch.empty_like(output_BTD).uniform_(-width, width)
