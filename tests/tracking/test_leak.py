"""Memory that only grows is told from memory that jumped, wavers, or was filled at the start."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from nemo_like.tracking.leak import LeakDetector

NOISE = np.random.default_rng(0).normal(0, 3, 100_000)


def watch(
    memory: Callable[[int], float], *, steps: int, every: int = 1, **options: float
) -> tuple[LeakDetector, int | None]:
    """The detector, and the first step at which it said so."""
    detector, found = LeakDetector(**options), None
    for step in range(every, steps + 1, every):
        detector.add(step, memory(step))
        if found is None and detector.find() is not None:
            found = step
    return detector, found


@pytest.mark.parametrize("every", [1, 10])
def test_a_megabyte_a_step_is_found_soon_with_its_slope_and_its_beginning(every: int) -> None:
    def memory(step: int) -> float:
        return 1000 + max(step - 200, 0) + NOISE[step]

    detector, found = watch(memory, steps=1000, every=every)
    assert found is not None
    assert 200 < found <= 200 + 100 * every
    leak = detector.find()
    assert leak is not None
    assert leak.mb_per_step == pytest.approx(1, rel=0.05)
    assert leak.since == pytest.approx(200, abs=300)
    assert detector.compute_growth() == pytest.approx(1, rel=0.1)


def test_since_is_where_it_began() -> None:
    detector, _ = watch(lambda step: 1000 + max(step - 200, 0), steps=1000)
    leak = detector.find()
    assert leak is not None
    # Memory that stood still for a quarter of the time still has most of the slope.
    assert 0 <= leak.since <= 200
    assert leak.grown_mb == pytest.approx(800, rel=0.01)


def test_a_slow_leak_is_found_over_the_whole_run() -> None:
    # 10 kB a step: 1 GB in 100,000 steps, and 10 MB in the last 100 readings.
    detector, found = watch(
        lambda step: 1000 + 0.01 * step + NOISE[step - 1], steps=100_000, every=10
    )
    leak = detector.find()
    assert found is not None
    assert found < 20_000
    assert leak is not None
    assert leak.mb_per_step == pytest.approx(0.01, rel=0.1)


def test_a_leak_in_pieces_is_found() -> None:
    _, found = watch(lambda step: 1000 + 8 * (step // 8), steps=500)
    assert found is not None


@pytest.mark.parametrize("at", [25, 40, 60, 100, 130])
def test_a_jump_is_no_leak(at: int) -> None:
    _, found = watch(lambda step: 1000 + 500 * (step >= at) + NOISE[step], steps=400)
    assert found is None


@pytest.mark.parametrize("second", [50, 62, 70, 85])
def test_two_jumps_are_no_leak(second: int) -> None:
    # A validation takes memory, and the first checkpoint.
    _, found = watch(
        lambda step: 1000 + 300 * (step >= 42) + 300 * (step >= second) + NOISE[step], steps=400
    )
    assert found is None


def test_memory_that_wavers_is_no_leak() -> None:
    _, found = watch(lambda step: 1000 + 20 * NOISE[step], steps=2000)
    assert found is None


def test_a_start_that_fills_pools_is_no_leak() -> None:
    def memory(step: int) -> float:
        return 1000 + 500 * (1 - np.exp(-step / 10)) + NOISE[step]

    assert watch(memory, steps=1000)[1] is None
    assert watch(lambda step: 1000 + 50 * min(step, 20), steps=1000)[1] is None
    # With the start looked at, it would be one.
    assert watch(lambda step: 1000 + 50 * min(step, 40), steps=60, warmup_steps=0)[1] is not None


def test_growth_that_is_not_worth_a_word_is_none() -> None:
    assert watch(lambda step: 1000 + 0.1 * step, steps=500)[1] is None
    assert watch(lambda step: 1000 + 0.1 * step, steps=500, smallest_mb=4)[1] is not None


def test_growth_is_not_told_from_a_few_readings() -> None:
    detector, found = watch(lambda step: 1000 + 100 * step, steps=40)
    assert (detector.compute_growth(), found) == (None, None)


def test_a_run_that_goes_on_has_its_own_start() -> None:
    # Steps count from the beginning of the run, the warm-up from the start of the process.
    detector = LeakDetector()
    for step in range(5001, 5400):
        detector.add(step, 1000 + 50 * min(step - 5000, 20))
        assert detector.find() is None
