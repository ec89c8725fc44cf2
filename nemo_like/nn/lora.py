"""Low-rank adapters: a frozen linear layer and a small trained one beside it."""
# Shapes: I = input features, O = output features, R = rank.

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_like.nn.linear import Linear
from nemo_like.nn.quantized_linear import QuantizedLinear


def measure_rows(weight_OI: Tensor) -> Tensor:
    """Euclidean norm of each row, (O,): what DoRA's magnitude starts from and is divided by."""
    norm_O: Tensor = torch.linalg.vector_norm(weight_OI, dim=1)
    return norm_O


@torch.no_grad()
def merge_lora(
    weight_OI: Tensor,
    lora_a_RI: Tensor,
    lora_b_OR: Tensor,
    *,
    scaling: float,
    magnitude_O: Tensor | None = None,
) -> Tensor:
    """The weight of the plain layer that does what the adapted one does, in float32 at least.

    Args:
        weight_OI: Of the frozen layer; a packed one is unpacked before.
        lora_a_RI: First matrix.
        lora_b_OR: Second matrix.
        scaling: Factor on their product.
        magnitude_O: Of DoRA; None without.
    """
    weight_OI = weight_OI.to(torch.promote_types(weight_OI.dtype, torch.float32))
    dtype = weight_OI.dtype
    merged_OI = weight_OI + scaling * (lora_b_OR.to(dtype) @ lora_a_RI.to(dtype))
    if magnitude_O is None:
        return merged_OI
    return (magnitude_O.to(dtype) / measure_rows(merged_OI)).unsqueeze(1) * merged_OI


class LoraLinear(nn.Module):
    """A frozen linear layer plus ``scaling * B A x`` (LoRA, Hu et al. 2021, arXiv:2106.09685).

    ``B`` starts at zero, so at first the layer computes exactly what the frozen one does. With ``dora`` the rows of the
    summed weight are brought to a trained length, the magnitude (DoRA, Liu et al. 2024, arXiv:2402.09353); the norm
    that it is divided by is taken as a constant by the backward pass (section 4.3 there).

    Args:
        base: The layer; its parameters are frozen.
        rank: R.
        scaling: ``alpha / rank``, or ``alpha / sqrt(rank)`` (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732).
        dropout: Probability of dropping an input of the adapter, in training.
        dora: Whether there is a magnitude.

    Attributes:
        is_off: Whether the frozen layer computes alone.
    """

    def __init__(
        self,
        base: Linear | QuantizedLinear,
        *,
        rank: int,
        scaling: float,
        dropout: float = 0.0,
        dora: bool = False,
    ) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scaling, self.dropout = scaling, dropout
        self.is_off = False
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, rank))
        self.magnitude = nn.Parameter(torch.empty(base.out_features)) if dora else None

    def draw(self, weight_OI: Tensor) -> dict[str, Tensor]:
        """First values of the adapter's parameters, by name, from the global generator of the CPU.

        Args:
            weight_OI: Of the frozen layer, unpacked.
        """
        rank, in_features = self.lora_a.shape
        # Uniform with the width that torch gives a linear layer (Kaiming, a = sqrt(5)), as peft draws it.
        bound = 1 / math.sqrt(in_features)
        drawn = {
            "lora_a": torch.empty(rank, in_features, device="cpu").uniform_(-bound, bound),
            "lora_b": torch.zeros(self.lora_b.shape, device="cpu"),
        }
        if self.magnitude is not None:
            drawn["magnitude"] = measure_rows(weight_OI.float())
        return drawn

    def forward(self, x: Tensor) -> Tensor:
        """Computes the frozen layer and the adapter.

        Args:
            x: (..., I).

        Returns:
            (..., O).
        """
        output: Tensor = self.base(x)
        if self.is_off:
            return output
        dropped = F.dropout(x, self.dropout, self.training)
        update = F.linear(F.linear(dropped, self.lora_a), self.lora_b)
        if self.magnitude is None:
            return torch.add(output, update, alpha=self.scaling)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            update_OI = self.scaling * (self.lora_b.float() @ self.lora_a.float())
            norm_O = measure_rows(self.base.weight.float() + update_OI)
        stretch_O = self.magnitude / norm_O
        # The frozen product sees the dropped input, too, as DoRA's authors have it; a bias is not stretched.
        plain = self.base(dropped) if self.training and self.dropout else output
        if self.base.bias is not None:
            plain = plain - self.base.bias
        return output + (stretch_O - 1) * plain + (stretch_O * self.scaling) * update

    def merge(self) -> Tensor:
        """The weight of the plain layer that does the same; (O, I) float32."""
        return merge_lora(
            self.base.weight,
            self.lora_a,
            self.lora_b,
            scaling=self.scaling,
            magnitude_O=self.magnitude,
        )
