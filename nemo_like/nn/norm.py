"""Root mean square normalisation."""
# Shapes: D = the dimension that is normalised; ... = any leading ones.

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last dimension, then scales each channel.

    ``y = x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich 2019, arXiv:1910.07467). The statistics are
    computed in float32 when ``x`` is a 16-bit tensor.

    Args:
        dim: Size of D.
        eps: Added to the mean square.
    """

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to one."""
        nn.init.ones_(self.weight)

    def forward(self, x_D: Tensor) -> Tensor:
        """Normalises.

        Args:
            x_D: (..., D).

        Returns:
            (..., D), in the type of ``x_D``.
        """
        # Mixed types would leave torch's fused kernel; under autocast the input is 16-bit and the weight is not.
        return F.rms_norm(x_D, self.weight.shape, self.weight.to(x_D.dtype), self.eps)

    def extra_repr(self) -> str:
        """Size and epsilon for ``print(network)``."""
        return f"{self.weight.numel()}, eps={self.eps}"
