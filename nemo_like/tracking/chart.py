"""A line chart as inline SVG: crisp at any size, coloured by the page it stands in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from nemo_like.tracking.curve import choose_range, choose_ticks, thin

_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 30


@dataclass(kw_only=True)
class Line:
    """One curve of a chart."""

    label: str
    steps: np.ndarray
    values: np.ndarray
    color: str = "a"
    """``a`` to ``d``: a colour class of the page."""
    is_faint: bool = False
    """Behind the others, without a legend entry: the raw points of a smoothed curve."""
    has_points: bool = False
    """A dot on each point, with its figures when the mouse rests on it."""


def render_chart(
    lines: Sequence[Line], *, width: int = 760, height: int = 300, from_zero: bool = False
) -> str:
    """Draws curves over optimizer steps.

    Args:
        lines: At least one; later ones are drawn above earlier ones.
        width: Of the drawing, in its own units, which are CSS pixels at full size.
        height: Likewise.
        from_zero: The axis starts at zero, for rates and norms.

    Returns:
        An ``<svg>`` element with a legend if there is more than one curve to name.
    """
    calm = [line.values for line in lines if not line.is_faint]
    low, high = choose_range(
        [line.values for line in lines], smoothed=np.concatenate(calm) if calm else None
    )
    low = 0.0 if from_zero and low >= 0 else low
    last = max(1, max(int(line.steps[-1]) for line in lines if len(line.steps)))

    def to_x(step: float) -> float:
        return _LEFT + (width - _LEFT - _RIGHT) * step / last

    def to_y(value: float) -> float:
        return _TOP + (height - _TOP - _BOTTOM) * (high - value) / (high - low)

    kind = "chart large" if width > 500 else "chart"
    parts = [f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img">']
    for tick in choose_ticks(low, high, count=7 if height > 200 else 4):
        y = to_y(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,.6g}</text>'
        )
    for tick in choose_ticks(0, last, count=6 if width > 500 else 4):
        x, label, anchor = to_x(tick), f"{tick:,.0f}", "middle"
        # A digit is 7 wide at this size; a label at the right edge would be cut.
        if x + 3.5 * len(label) > width:
            x, anchor = width - 1, "end"
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - 8}" text-anchor="{anchor}">{label}</text>'
        )
    bottom = height - _BOTTOM
    parts.append(
        f'<line class="axis" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    )
    for line in lines:
        parts += _render_line(line, to_x, to_y, low, high)
    named = [line for line in lines if not line.is_faint]
    if len(named) > 1:
        x = width - _RIGHT - 110
        for index, line in enumerate(named):
            y = _TOP + 12 + 20 * index
            parts.append(
                f'<line class="line {line.color}" x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}"/>'
            )
            if line.has_points:
                parts.append(f'<circle class="dot {line.color}" cx="{x + 11}" cy="{y}" r="3.5"/>')
            parts.append(
                f'<text class="legend" x="{x + 30}" y="{y + 4}">{escape(line.label)}</text>'
            )
    return "".join([*parts, "</svg>"])


def _render_line(
    line: Line,
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
    low: float,
    high: float,
) -> list[str]:
    steps, values = thin(line.steps, line.values, limit=700)
    # A value beyond the picture is drawn at its edge, just outside; a missing one breaks the line.
    edge = 0.02 * (high - low)
    strokes: list[list[str]] = [[]]
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        if np.isfinite(value):
            strokes[-1].append(
                f"{to_x(step):.1f},{to_y(min(max(value, low - edge), high + edge)):.1f}"
            )
        elif strokes[-1]:
            strokes.append([])
    style = f"line {line.color}" + (" faint" if line.is_faint else "")
    parts = [
        f'<polyline class="{style}" points="{" ".join(points)}"/>' for points in strokes if points
    ]
    if line.has_points:
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            if low <= value <= high:
                parts.append(
                    f'<circle class="dot {line.color}" cx="{to_x(step):.1f}" cy="{to_y(value):.1f}" r="3.5">'
                    f"<title>{escape(line.label)}, step {step:,}: {value:,.4f}</title></circle>"
                )
    return parts
