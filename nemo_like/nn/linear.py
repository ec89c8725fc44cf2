"""Weights that know their own initialisation, so that a network built on the meta device can be filled in later."""

from __future__ import annotations

import torch
from torch import nn


class Linear(nn.Linear):
    """``torch.nn.Linear`` with a normal initialisation of a given width; biases start at zero.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
        bias: Whether a bias is added.
        init_std: Standard deviation of the weights.
    """

    def __init__(
        self, in_features: int, out_features: int, *, init_std: float, bias: bool = False
    ) -> None:
        self.init_std = init_std  # first, because the parent's constructor calls reset_parameters
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draws the weights anew from the global generator of their device."""
        with torch.no_grad():
            self.weight.normal_(std=self.init_std)
            if self.bias is not None:
                self.bias.zero_()


class Embedding(nn.Embedding):
    """``torch.nn.Embedding`` with a normal initialisation of a given width (torch's own is 1).

    Args:
        num_embeddings: Rows, the size of the vocabulary.
        embedding_dim: Size of a row.
        init_std: Standard deviation of the weights.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, init_std: float) -> None:
        self.init_std = init_std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draws the rows anew from the global generator of their device."""
        with torch.no_grad():
            self.weight.normal_(std=self.init_std)
