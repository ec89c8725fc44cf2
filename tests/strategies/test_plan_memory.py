"""What the planner predicts is what a step takes, by the account of all tensors of a rank."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_plan_memory.py"


def load_tool() -> ModuleType:
    name = "bench_plan_memory"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TOOL)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def measure_and_predict(name: str) -> tuple[int, int]:
    tool = load_tool()
    (case,) = [it for it in tool.CASES if it.name == name]
    return tool.measure(case), case.predict().total


@pytest.mark.dist
@pytest.mark.parametrize("name", ["single, activations", "fsdp x 2, weights", "megatron TP2 SP"])
def test_a_step_takes_the_predicted_memory(name: str) -> None:
    measured, predicted = measure_and_predict(name)
    assert predicted == pytest.approx(measured, rel=0.04)  # 0.1 is what is promised of all cases


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in load_tool().CASES])
def test_every_case_takes_the_predicted_memory(name: str) -> None:
    measured, predicted = measure_and_predict(name)
    assert predicted == pytest.approx(measured, rel=0.1)


def test_the_cases_are_of_all_strategies() -> None:
    cases = load_tool().CASES
    assert {it.plan.strategy for it in cases} == {"ddp", "fsdp", "deepspeed", "megatron"}
    assert len({it.name for it in cases}) == len(cases) > 8
