"""Rotary position embedding: each pair of channels is turned by an angle that grows with the position."""
# Shapes: B = sequences (1 where all share their positions), T = tokens, H = heads, D = channels of a head.
# F = D / 2 frequencies.

from __future__ import annotations

import math

import torch
from torch import Tensor


def compute_frequencies(head_dim: int, *, theta: float = 10000.0) -> Tensor:
    """Radians by which one step forward turns each pair of channels.

    ``theta^(-2i/D)`` (Su et al. 2021, arXiv:2104.09864). In float32 and on the CPU on purpose: published models were
    trained with exactly these rounded values, and at position 10,000 one unit in the last place is already
    1e-3 radians.

    Args:
        head_dim: D, even.
        theta: Base; larger ones reach farther.

    Returns:
        (F,) float32 on the CPU, falling from 1.

    Raises:
        ValueError: ``head_dim`` is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: must be even, channels are turned in pairs")
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponent_F


def scale_llama3(
    frequencies_F: Tensor,
    *,
    factor: float,
    low_frequency_factor: float,
    high_frequency_factor: float,
    original_max_positions: int,
) -> Tensor:
    """Slows the low frequencies only, as Llama 3.1 does to reach 128k tokens (arXiv:2407.21783).

    Wavelengths below ``original_max_positions / high_frequency_factor`` stay; those above
    ``original_max_positions / low_frequency_factor`` become ``factor`` times as long; between them the frequency is
    interpolated linearly.

    Args:
        frequencies_F: From :func:`compute_frequencies`.
        factor: How many times the context grew.
        low_frequency_factor: Turns within the old context below which a pair is slowed in full.
        high_frequency_factor: Turns within the old context above which a pair is left alone.
        original_max_positions: The old context in tokens.

    Returns:
        (F,) float32.
    """
    turns_F = original_max_positions / (2 * math.pi / frequencies_F)
    kept_F = (turns_F - low_frequency_factor) / (high_frequency_factor - low_frequency_factor)
    slowed_F = frequencies_F / factor
    between_F = (1 - kept_F) * slowed_F + kept_F * frequencies_F
    scaled_F = torch.where(turns_F < low_frequency_factor, slowed_F, between_F)
    return torch.where(turns_F > high_frequency_factor, frequencies_F, scaled_F)


class RotaryPositions:
    """Cosines and sines for any positions.

    Not a module: the frequencies follow from the configuration, so they are neither saved nor left empty when a
    network is built on the meta device.

    Args:
        frequencies_F: Radians a step, float32.
    """

    def __init__(self, frequencies_F: Tensor) -> None:
        self._frequencies_F = {torch.device("cpu"): frequencies_F}

    def __call__(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Looks up the turns.

        Args:
            positions_BT: int, any order.

        Returns:
            Cosine and signed sine, (B, T, 1, D) float32 each, laid out for :func:`rotate`.
        """
        device = positions_BT.device
        if device not in self._frequencies_F:
            self._frequencies_F[device] = self._frequencies_F[torch.device("cpu")].to(device)
        angle_BTF = positions_BT.unsqueeze(-1).to(torch.float32) * self._frequencies_F[device]
        cos_BTF, sin_BTF = angle_BTF.cos(), angle_BTF.sin()
        cos_BTD = torch.cat((cos_BTF, cos_BTF), dim=-1)
        sin_BTD = torch.cat((-sin_BTF, sin_BTF), dim=-1)
        return cos_BTD.unsqueeze(2), sin_BTD.unsqueeze(2)


def rotate(x_BTHD: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turns channel i together with channel i + D/2 (the pairing of Llama's published Hugging Face weights).

    Args:
        x_BTHD: Queries or keys.
        turns: From :class:`RotaryPositions`.

    Returns:
        (B, T, H, D) in the type of ``x_BTHD``; the arithmetic is done in float32 at least.
    """
    cos_BT1D, sin_BT1D = turns
    first_BTHF, second_BTHF = x_BTHD.chunk(2, dim=-1)
    swapped_BTHD = torch.cat((second_BTHF, first_BTHF), dim=-1)
    return (x_BTHD * cos_BT1D + swapped_BTHD * sin_BT1D).to(x_BTHD.dtype)
