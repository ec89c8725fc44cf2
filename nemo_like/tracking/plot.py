"""The picture of a run: loss above, learning rate and gradient norm below."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_like.tracking.curve import choose_range, choose_span, smooth, thin

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = Mapping[str, tuple[np.ndarray, np.ndarray]]

# Okabe and Ito's palette, told apart by colour-blind readers too.
_BLUE, _VERMILION, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#6b7280"
_STYLE: Any = {
    "font.size": 11,
    "font.family": "sans-serif",
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#111827",
    "axes.spines.top": False,
    "axes.titlepad": 12,
    "axes.titleweight": "bold",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "grid.color": "#e5e7eb",
}


def plot_loss(curves: Curves, path: str | Path, *, title: str = "") -> bool:
    """Draws training loss (thin, and smoothed), validation loss, learning rate and gradient norm.

    Args:
        curves: As ``read_metrics`` gives them; the names are ``train/loss``, ``val/loss``, ``train/lr`` and
            ``train/grad_norm``, and each may be missing.
        path: The PNG to write; replaced whole.
        title: Name of the run.

    Returns:
        Whether there was anything to draw.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    has_loss = "train/loss" in curves or "val/loss" in curves
    has_rest = "train/lr" in curves or "train/grad_norm" in curves
    if not has_loss:
        return False
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 6.4 if has_rest else 4.4), dpi=140, layout="constrained")
        # A canvas of its own: no pyplot, so nothing of another plot in this process changes.
        FigureCanvasAgg(figure)
        heights = [2.4, 1] if has_rest else [1]
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[
            :, 0
        ]
        _draw_loss(axes[0], curves)
        if title:
            axes[0].set_title(title, loc="left")
        if has_rest:
            _draw_rate_and_norm(axes[1], curves)
        axes[-1].set_xlabel("optimizer step")
        axes[-1].xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
        hidden = path.with_name(f".{path.name}.new")
        figure.savefig(hidden, format="png")
        os.replace(hidden, path)
    return True


def _draw_loss(axes: Axes, curves: Curves) -> None:
    shown: list[np.ndarray] = []
    calm: list[np.ndarray] = []
    if "train/loss" in curves:
        steps, values = curves["train/loss"]
        smoothed = smooth(values, span=choose_span(len(values)))
        axes.plot(*thin(steps, values, limit=2000), color=_BLUE, alpha=0.3, linewidth=0.8)
        axes.plot(*thin(steps, smoothed, limit=2000), color=_BLUE, linewidth=1.8, label="training")
        shown.append(values)
        calm.append(smoothed)
    if "val/loss" in curves:
        steps, values = curves["val/loss"]
        axes.plot(
            steps,
            values,
            color=_VERMILION,
            marker="o",
            markersize=4,
            linewidth=1.4,
            label="validation",
        )
        shown.append(values)
        calm.append(values)
    axes.set_ylim(*choose_range(shown, smoothed=np.concatenate(calm)))
    axes.spines["right"].set_visible(False)
    axes.set_ylabel("loss")
    axes.grid(True, linewidth=0.8)
    axes.legend(frameon=False, loc="upper right")


def _draw_rate_and_norm(axes: Axes, curves: Curves) -> None:
    axes.grid(True, linewidth=0.8)
    right = axes if "train/lr" not in curves else axes.twinx()
    if "train/lr" in curves:
        axes.plot(*thin(*curves["train/lr"], limit=2000), color=_GREEN, linewidth=1.6)
        axes.set_ylabel("learning rate", color=_GREEN)
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    if "train/grad_norm" in curves:
        steps, values = curves["train/grad_norm"]
        right.plot(*thin(steps, values, limit=2000), color=_GREY, linewidth=0.8, alpha=0.8)
        right.set_ylabel("gradient norm", color=_GREY)
        right.set_ylim(0, choose_range([values])[1])
    elif right is not axes:
        right.set_visible(False)
