import pytest
import torch

from nemo_like.optim.newton_schulz import COEFFICIENTS, orthogonalize


def apply_polynomial(s: torch.Tensor, steps: int) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("shape", [(5, 5), (5, 7), (5, 16)])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_singular_vectors_stay_and_singular_values_follow_the_polynomial(shape, steps):
    x_NRC = torch.randn(3, *shape, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x_NRC, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    expected = u @ torch.diag_embed(apply_polynomial(s, steps)) @ vh
    actual = orthogonalize(x_NRC, steps=steps, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_five_steps_bring_singular_values_near_one():
    values = torch.linalg.svdvals(
        orthogonalize(torch.randn(1, 32, 96), steps=5, dtype=torch.float32)
    )
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 5e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("shape", [(64, 64), (64, 192)])
def test_rounding_stays_small_for_badly_conditioned_matrices(shape, dtype, limit):
    x_NRC = torch.randn(1, *shape) * torch.logspace(0, -5, shape[1])
    exact = orthogonalize(x_NRC.double(), steps=5, dtype=torch.float64)
    error = orthogonalize(x_NRC, steps=5, dtype=dtype).double() - exact
    assert error.norm() / exact.norm() < limit


def test_a_zero_matrix_stays_zero():
    zero = torch.zeros(1, 4, 12)
    assert torch.equal(orthogonalize(zero, steps=5, dtype=torch.float32), zero)


def test_a_matrix_does_not_depend_on_those_beside_it():
    x_NRC = torch.randn(3, 8, 8, dtype=torch.float64)
    x_NRC[2] *= 1e6
    together = orthogonalize(x_NRC, steps=5, dtype=torch.float64)
    alone = orthogonalize(x_NRC[:1], steps=5, dtype=torch.float64)
    torch.testing.assert_close(together[:1], alone, rtol=1e-10, atol=1e-10)
