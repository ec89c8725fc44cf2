"""How close two results must be: one table by dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Relative and absolute at once. A test may tighten it; widening needs a comment that says why.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}


def assert_close(
    actual: Tensor | Mapping[str, Tensor],
    expected: Tensor | Mapping[str, Tensor],
    *,
    tolerance: float | None = None,
) -> None:
    """Compares floating-point tensors, or mappings of them, by :data:`TOLERANCE`.

    The coarser dtype of the two decides, so a result in BF16 can be held against one in FP32. NaN
    equals NaN.

    Args:
        actual: What was computed.
        expected: What it should be; of the same shape, or with the same keys.
        tolerance: Replaces the table's figure, relative and absolute.

    Raises:
        AssertionError: They differ; the text says where most and by how much.
        TypeError: A dtype without a tolerance: integers and booleans are exact, compare them with
            ``torch.equal``.
    """
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        assert set(actual) == set(expected), f"keys differ: {set(actual) ^ set(expected)}"
        for name in expected:
            _assert_close(actual[name], expected[name], tolerance, name)
    else:
        _assert_close(actual, expected, tolerance, "")


def _assert_close(actual: Any, expected: Any, tolerance: float | None, name: str) -> None:
    for it in (actual, expected):
        if it.dtype not in TOLERANCE:
            raise TypeError(
                f"{name or 'tensor'} is {it.dtype}: assert_close knows "
                f"{', '.join(map(str, TOLERANCE))}; compare exact things with torch.equal"
            )
    table = max(TOLERANCE[actual.dtype], TOLERANCE[expected.dtype])
    limit = table if tolerance is None else tolerance
    torch.testing.assert_close(
        actual,
        expected,
        rtol=limit,
        atol=limit,
        check_dtype=False,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}" if name else text,
    )
