"""loss.png: drawn from whatever curves there are, touching no other plot of the process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nemo_like.tracking.plot import plot_loss

STEPS = np.arange(10, 210, 10)


@pytest.mark.parametrize(
    "names",
    [
        ("train/loss", "val/loss", "train/lr", "train/grad_norm"),
        ("train/loss",),
        ("val/loss", "train/grad_norm"),
    ],
)
def test_a_picture_is_drawn_from_whatever_curves_there_are(
    tmp_path: Path, names: tuple[str]
) -> None:
    import matplotlib as mpl
    from matplotlib import pyplot

    before = dict(mpl.rcParams)
    curves = {name: (STEPS, np.linspace(3.0, 1.0, len(STEPS))) for name in names}
    assert plot_loss(curves, tmp_path / "loss.png", title="a run")
    data = (tmp_path / "loss.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
    assert pyplot.get_fignums() == []
    assert dict(mpl.rcParams) == before


def test_gaps_in_the_loss_are_drawn_over(tmp_path: Path) -> None:
    values = np.linspace(3.0, 1.0, len(STEPS))
    values[3], values[4] = np.nan, np.inf
    assert plot_loss({"train/loss": (STEPS, values)}, tmp_path / "loss.png")


def test_without_a_loss_there_is_no_picture(tmp_path: Path) -> None:
    assert not plot_loss({"train/lr": (STEPS, STEPS.astype(float))}, tmp_path / "loss.png")
    assert list(tmp_path.iterdir()) == []
