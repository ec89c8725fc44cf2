import cmath
import math

import pytest
import torch
from torch.testing import assert_close

from nemo_like.nn.rope import RotaryPositions, compute_frequencies, rotate, scale_llama3


def test_frequencies_follow_the_formula():
    expected = [10000.0 ** (-2 * i / 8) for i in range(4)]
    assert_close(compute_frequencies(8), torch.tensor(expected))


def test_odd_heads_are_refused():
    with pytest.raises(ValueError, match="head_dim=7: must be even"):
        compute_frequencies(7)


def test_rotation_is_a_complex_product():
    x_BTHD = torch.randn(1, 3, 2, 4, dtype=torch.float64)
    positions = torch.tensor([[0, 5, 1000]])
    frequencies = compute_frequencies(4)
    got = rotate(x_BTHD, RotaryPositions(frequencies)(positions))
    for t in range(3):
        for i in range(2):
            turn = cmath.exp(1j * float(positions[0, t]) * float(frequencies[i]))
            for h in range(2):
                turned = complex(x_BTHD[0, t, h, i], x_BTHD[0, t, h, i + 2]) * turn
                expected = torch.tensor([turned.real, turned.imag], dtype=torch.float64)
                # The angle is rounded to float32: half a unit in the last place of 1000 radians.
                assert_close(got[0, t, h, i::2], expected, rtol=0, atol=1e-4)


def test_scores_depend_on_distance_alone():
    rotary = RotaryPositions(compute_frequencies(16))
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(i, j):
        turned_query = rotate(query, rotary(torch.tensor([[i]])))
        return (turned_query * rotate(key, rotary(torch.tensor([[j]])))).sum()

    assert_close(score(7, 3), score(104, 100), rtol=0, atol=1e-5)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_llama3_scaling_keeps_high_slows_low_and_blends_between():
    wavelengths = torch.tensor([100.0, 4000.0, 40_000.0])
    frequencies = 2 * math.pi / wavelengths
    got = scale_llama3(
        frequencies,
        factor=8.0,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_max_positions=8192,
    )
    kept = (8192 / 4000 - 1) / (4 - 1)
    expected = frequencies * torch.tensor([1.0, kept + (1 - kept) / 8, 1 / 8])
    assert_close(got, expected)


def test_16_bit_queries_are_turned_in_float32():
    x = torch.randn(1, 64, 1, 8)
    turns = RotaryPositions(compute_frequencies(8))(torch.arange(64)[None])
    rounded = x.bfloat16()
    assert torch.equal(rotate(rounded, turns), rotate(rounded.float(), turns).bfloat16())
