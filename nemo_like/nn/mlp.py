"""The feed-forward block."""
# Shapes: B = sequences, T = tokens, D = model width, F = inner width.

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from nemo_like.nn.linear import Linear


class SwiGLU(nn.Module):
    """Gated feed-forward: ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv:2002.05202).

    Args:
        dim: D.
        inner_dim: F.
        init_std: Standard deviation of the weights of gate and up.
        output_init_std: The same for down, which writes to the residual stream.
    """

    def __init__(
        self, dim: int, inner_dim: int, *, init_std: float, output_init_std: float
    ) -> None:
        super().__init__()
        self.gate = Linear(dim, inner_dim, init_std=init_std)
        self.up = Linear(dim, inner_dim, init_std=init_std)
        self.down = Linear(inner_dim, dim, init_std=output_init_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Maps each token by itself.

        Args:
            x_BTD: Normalised residual stream.

        Returns:
            (B, T, D).
        """
        down_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return down_BTD
