"""Curves for the eye: smoothing, thinning, ranges and ticks."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_like.tracking.curve import choose_range, choose_ticks, smooth, thin


def test_smoothing_leaves_a_constant_and_a_span_of_one_alone() -> None:
    assert smooth(np.full(20, 3.0), span=7) == pytest.approx(np.full(20, 3.0), rel=1e-12)
    values = np.arange(9.0)
    assert smooth(values, span=1).tolist() == values.tolist()
    assert len(smooth(np.empty(0), span=5)) == 0


def test_smoothing_does_not_lag_behind_a_slope() -> None:
    values = np.arange(200.0)
    assert smooth(values, span=11)[50:150] == pytest.approx(values[50:150], abs=0.01)


def test_smoothing_passes_over_gaps() -> None:
    values = np.array([1.0, np.nan, 1.0, np.inf, 1.0])
    assert smooth(values, span=3) == pytest.approx(np.ones(5))


def test_thinning_keeps_the_spike_and_both_ends() -> None:
    steps, values = np.arange(10_000), np.zeros(10_000)
    values[7_777] = 9.0
    values[0], values[-1] = 1.0, 2.0
    kept, shown = thin(steps, values, limit=200)
    assert len(kept) <= 202
    assert (kept[0], kept[-1], shown.max()) == (0, 9_999, 9.0)
    assert np.array_equal(values[kept], shown)
    assert thin(steps[:50], values[:50], limit=200)[0].tolist() == steps[:50].tolist()


def test_a_spike_does_not_flatten_the_picture() -> None:
    values = np.linspace(2, 4, 2000)
    values[1000] = 1e6
    low, high = choose_range([values])
    assert 1.5 < low < 2
    assert 4 < high < 5


def test_the_smoothed_curve_is_seen_whole() -> None:
    low, high = choose_range([np.full(1000, 2.0)], smoothed=np.array([1.0, 5.0]))
    assert low < 1
    assert high > 5


def test_a_range_is_never_empty() -> None:
    for curves in ([np.full(5, 2.0)], [np.zeros(3)], [np.array([np.nan])], []):
        low, high = choose_range(curves)
        assert low < high


def test_ticks_are_round_and_inside() -> None:
    assert choose_ticks(0, 1200, count=6) == [0, 200, 400, 600, 800, 1000, 1200]
    assert choose_ticks(0.0, 0.31, count=3) == [0.0, 0.2]
    assert choose_ticks(2.71, 8.4, count=7) == [3, 4, 5, 6, 7, 8]
