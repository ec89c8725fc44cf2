"""Curves made fit to be looked at: smoothed, thinned, with round ticks."""

from __future__ import annotations

import math

import numpy as np


def smooth(values: np.ndarray, *, span: float) -> np.ndarray:
    """Exponential running mean from both sides, so that it does not lag; gaps (nan, inf) count for nothing.

    Args:
        values: float64, in order.
        span: Over how many points the mean reaches to either side, about; 1 changes nothing.
    """
    if not len(values):
        return values
    both: np.ndarray = _run_mean(values, span=span) + _run_mean(values[::-1], span=span)[::-1]
    return both / 2


def _run_mean(values: np.ndarray, *, span: float) -> np.ndarray:
    keep = 1 - 2 / (span + 1)
    total, weight = 0.0, 0.0
    means = np.empty(len(values))
    for index, value in enumerate(values.tolist()):
        if math.isfinite(value):
            total = keep * total + (1 - keep) * value
            weight = keep * weight + (1 - keep)
        # Divided by the weight so far, the mean is not drawn towards zero at its start.
        means[index] = total / weight if weight else math.nan
    return means


def choose_span(num_points: int) -> float:
    """A span that calms a curve and keeps its shape: a thirtieth of it."""
    return max(1.0, num_points / 30)


def thin(steps: np.ndarray, values: np.ndarray, *, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """At most about ``limit`` points that draw the same picture: lowest and highest of each stretch."""
    if len(steps) <= limit:
        return steps, values
    kept = {0, len(steps) - 1}
    for stretch in np.array_split(np.arange(len(steps)), max(1, limit // 2)):
        part = values[stretch]
        if np.isfinite(part).any():
            kept.add(int(stretch[np.nanargmin(np.where(np.isfinite(part), part, np.nan))]))
            kept.add(int(stretch[np.nanargmax(np.where(np.isfinite(part), part, np.nan))]))
    index = np.array(sorted(kept))
    return steps[index], values[index]


def choose_range(
    curves: list[np.ndarray], *, smoothed: np.ndarray | None = None
) -> tuple[float, float]:
    """Lowest and highest value to show, so that a few spikes do not flatten the rest.

    Args:
        curves: All values that are drawn.
        smoothed: Values that must be seen whole.
    """
    finite = np.concatenate([c[np.isfinite(c)] for c in curves] or [np.empty(0)])
    if not len(finite):
        return 0.0, 1.0
    low, high = np.quantile(finite, [0.001, 0.995])
    if smoothed is not None and np.isfinite(smoothed).any():
        low, high = min(low, np.nanmin(smoothed)), max(high, np.nanmax(smoothed))
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    # A figure that is never negative does not get an axis below zero.
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin


def choose_ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2, 5 times a power of ten) between two numbers."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * count >= high - low)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # Rounded, or 3 * 0.1 would be shown as 0.30000000000000004.
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]
