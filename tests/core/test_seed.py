"""Randomness is a function of (seed, step, rank)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nemo_like.core.seed import derive_seed, seed_step
from nemo_like.core.units import format_count, seconds_to_samples


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_step_draws_the_same_whatever_was_drawn_before() -> None:
    seed_step(1, 5, 0)
    first = draw()
    torch.rand(100)
    seed_step(1, 5, 0)
    assert draw() == first


def test_steps_ranks_and_seeds_draw_differently() -> None:
    drawn = set()
    for arguments in [(1, 5, 0), (1, 5, 1), (1, 6, 0), (2, 5, 0)]:
        seed_step(*arguments)
        drawn.add(draw())
    assert len(drawn) == 4


def test_derived_seeds_do_not_collide_and_order_matters() -> None:
    seeds = {
        derive_seed(seed, step, rank)
        for seed in range(10)
        for step in range(100)
        for rank in range(8)
    }
    assert len(seeds) == 8000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2, 3) != derive_seed(1, 3, 2)
    assert derive_seed(-1) != derive_seed(1)


def test_seconds_become_samples_by_rounding_half_up() -> None:
    assert [seconds_to_samples(x, 16000) for x in (0.0, 1.0, 2.5 / 16000, 0.49 / 16000)] == [
        0,
        16000,
        3,
        0,
    ]
    with pytest.raises(ValueError, match=r"seconds_to_samples\(-1, 8000\)"):
        seconds_to_samples(-1, 8000)


def test_counts_read_as_people_say_them() -> None:
    assert [format_count(x) for x in (7, 1234, 5.81e6, 7.2e9)] == ["7", "1.2 k", "5.8 M", "7.2 G"]
