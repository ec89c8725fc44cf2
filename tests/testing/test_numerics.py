from __future__ import annotations

import pytest
import torch

from nemo_like.testing.numerics import TOLERANCE, assert_close


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_table_draws_the_line_for_each_dtype(dtype: torch.dtype) -> None:
    ones = torch.ones(3, dtype=torch.float64)
    limit = 2 * TOLERANCE[dtype]  # relative and absolute add up at 1
    assert_close((ones + 0.5 * limit).to(dtype), ones.to(dtype))
    with pytest.raises(AssertionError, match="not close"):
        assert_close((ones + 4 * limit).to(dtype), ones.to(dtype))


def test_coarser_dtype_decides() -> None:
    exact = torch.linspace(0.1, 3, 50, dtype=torch.float64)
    assert_close(exact.bfloat16(), exact)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(exact.bfloat16().float(), exact)


def test_given_tolerance_replaces_the_table() -> None:
    one = torch.ones(1)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(one + 1e-5, one, tolerance=1e-6)


def test_mappings_are_compared_by_key_and_the_key_is_named() -> None:
    weights = {"a.weight": torch.ones(2), "b.weight": torch.zeros(2)}
    assert_close(weights, {name: it.clone() for name, it in weights.items()})
    with pytest.raises(AssertionError, match=r"^b\.weight: "):
        assert_close(weights, {**weights, "b.weight": torch.ones(2)})
    with pytest.raises(AssertionError, match=r"keys differ: \{'b.weight'\}"):
        assert_close(weights, {"a.weight": torch.ones(2)})


def test_shape_must_agree() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(2, 1), torch.ones(1, 2))


def test_integers_are_sent_to_equal() -> None:
    with pytest.raises(TypeError, match=r"tensor is torch\.int64: .*torch\.equal"):
        assert_close(torch.tensor([1]), torch.tensor([1]))
