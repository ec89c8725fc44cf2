import logging
import math

import pytest

from nemo_like.core.errors import ConfigError
from nemo_like.optim import ConstantSchedule, CosineSchedule, LinearSchedule


@pytest.mark.parametrize(
    "schedule",
    [
        CosineSchedule(total_steps=100, warmup_steps=4),
        LinearSchedule(total_steps=100, warmup_steps=4),
        ConstantSchedule(warmup_steps=4),
    ],
)
def test_warm_up_is_a_straight_line_from_a_first_step_above_zero(schedule):
    assert [schedule(step) for step in range(5)] == [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1.0]


@pytest.mark.parametrize(
    "schedule", [CosineSchedule(total_steps=10), LinearSchedule(total_steps=10), ConstantSchedule()]
)
def test_without_warm_up_the_first_step_has_the_peak(schedule):
    assert schedule(0) == 1.0


def test_cosine_follows_its_formula():
    schedule = CosineSchedule(total_steps=30, warmup_steps=10, min_ratio=0.2)
    for step in range(10, 30):
        expected = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 20))
        assert schedule(step) == pytest.approx(expected, abs=1e-15)
    assert schedule(20) == pytest.approx(0.6)


def test_linear_halves_at_the_middle_and_the_last_step_still_moves():
    schedule = LinearSchedule(total_steps=20, warmup_steps=10)
    assert schedule(15) == 0.5
    assert schedule(19) == pytest.approx(0.1)


@pytest.mark.parametrize("step", [20, 21, 1000])
@pytest.mark.parametrize("kind", [CosineSchedule, LinearSchedule])
def test_from_the_last_step_on_it_stays_at_the_floor(kind, step):
    assert kind(total_steps=20, warmup_steps=3, min_ratio=0.25)(step) == 0.25


def test_constant_never_falls():
    assert ConstantSchedule(warmup_steps=2)(10**9) == 1.0


def test_a_warm_up_that_is_cut_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING):
        schedule = CosineSchedule(total_steps=5, warmup_steps=50)
    assert "warmup_steps=50 is not below total_steps=5" in caplog.text
    assert schedule(4) == 5 / 51


def test_all_faults_of_a_schedule_are_raised_at_once():
    with pytest.raises(ConfigError, match="total_steps=0") as raised:
        CosineSchedule(total_steps=0, warmup_steps=-1, min_ratio=2)
    assert [fault.partition("=")[0] for fault in raised.value.faults] == [
        "total_steps",
        "warmup_steps",
        "min_ratio",
    ]
    with pytest.raises(ConfigError, match="min_ratio=-1"):
        LinearSchedule(total_steps=1, min_ratio=-1)
    with pytest.raises(ConfigError, match="warmup_steps=-2"):
        ConstantSchedule(warmup_steps=-2)
