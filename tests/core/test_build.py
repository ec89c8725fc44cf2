"""From a mapping to an object: schemas with and without a config class, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_like.core.build import build
from nemo_like.core.errors import ConfigError, DataError

PACKAGE = {
    "__init__.py": """
from typing import TYPE_CHECKING
from nemo_like.core.lazy import lazy_names
if TYPE_CHECKING:
    from .parts import Engine
__getattr__ = lazy_names(__name__, {"Engine": ".parts", "Gone": ".parts"})
""",
    "config.py": """
from __future__ import annotations
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

@dataclass(kw_only=True)
class PistonConfig:
    bore_mm: float
    stroke_mm: float = 90.0
    def check(self) -> Iterator[str]:
        if self.bore_mm <= 0:
            yield f"bore_mm={self.bore_mm}: must be above 0"

@dataclass(kw_only=True)
class EngineConfig:
    piston: PistonConfig
    fuel: Literal["gas", "diesel"] = "gas"
    turbo: Any = None
    spare: list[Any] = field(default_factory=list)
""",
    "parts.py": """
import subprocess
from subprocess import Popen
from nemo_like.core.errors import DataError
LOADED = True

class Engine:
    def __init__(self, *, piston, fuel="gas", turbo=None, spare=()):
        self.piston, self.fuel, self.turbo, self.spare = piston, fuel, turbo, spare

class Turbo:
    def __init__(self, bars: float, *, size: int = 3, hot: "Nowhere" = None):
        self.bars, self.size, self.hot = bars, size, hot

class BigTurbo(Turbo):
    def __init__(self, *, noise: str, **kwargs):
        super().__init__(**kwargs)
        self.noise = noise

class LoudEngine(Engine):
    def __init__(self, *, horn: int = 1, **kwargs):
        super().__init__(**kwargs)
        self.horn = horn

class Fragile:
    def __init__(self, *, how: str):
        if how == "value":
            raise ValueError("how=value: no good")
        if how == "data":
            raise DataError("broken", file="x.jsonl", line=3)
        raise KeyError("a bug")

def function(**kwargs):
    raise AssertionError("must not be called")
""",
}


@pytest.fixture
def package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[str]:
    # A name of its own for every test, since what is known about a module is kept.
    name = f"pkg_{abs(hash(request.node.nodeid))}"
    for file, text in PACKAGE.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [it for it in sys.modules if it.partition(".")[0] == name]:
        del sys.modules[module]


def test_a_mapping_becomes_an_object_and_records_and_components_inside_come_first(
    package: str,
) -> None:
    node = {
        "_target_": f"{package}.Engine",
        "piston": {"bore_mm": 80},
        "turbo": {"_target_": f"{package}.parts.Turbo", "bars": 1},
        "spare": [{"_target_": f"{package}.parts.Turbo", "bars": 2}, {"plain": [1]}],
    }
    engine = build(node, allow=[package])
    assert type(engine).__name__ == "Engine"
    assert (type(engine.piston).__name__, engine.piston.bore_mm, engine.piston.stroke_mm) == (
        "PistonConfig",
        80.0,
        90.0,
    )
    assert (engine.turbo.bars, engine.turbo.size, engine.spare[0].bars) == (1.0, 3, 2.0)
    assert engine.spare[1] == {"plain": [1]}
    assert node["piston"] == {"bore_mm": 80}


def test_the_schema_is_found_without_importing_the_class(package: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"component.feul: no such key; did you mean 'fuel'; there are: piston, fuel",
    ):
        build(
            {"_target_": f"{package}.Engine", "piston": {"bore_mm": 1}, "feul": "gas"},
            allow=[package],
        )
    assert f"{package}.parts" not in sys.modules


def test_all_faults_of_a_component_are_told_at_once_with_the_key_path(package: str) -> None:
    node = {"_target_": f"{package}.Engine", "piston": {"bore_mm": -1.0, "x": 1}, "fuel": "gaz"}
    with pytest.raises(ConfigError) as caught:
        build(node, path="model", allow=[package])
    assert [fault.removeprefix("build(): ") for fault in caught.value.faults] == [
        "model.piston.x: no such key; there are: bore_mm, stroke_mm",
        "model.piston.bore_mm=-1.0: must be above 0",
        "model.fuel='gaz': must be one of gas, diesel; did you mean 'gas'",
    ]


def test_without_a_config_class_the_constructor_is_the_schema(package: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"_target_": f"{package}.parts.Turbo", "bar": 1, "size": "big"}, allow=[package])
    assert [fault.removeprefix("build(): ") for fault in caught.value.faults] == [
        "component.bars: is required: a value",
        "component.bar: no such key; did you mean 'bars'; there are: bars, size, hot",
    ]


def test_further_keywords_go_on_with_the_next_class(package: str) -> None:
    turbo = build(
        {"_target_": f"{package}.parts.BigTurbo", "noise": "loud", "bars": 2.0}, allow=[package]
    )
    assert (turbo.noise, turbo.bars) == ("loud", 2.0)
    with pytest.raises(
        ConfigError,
        match=r"component.bras: no such key; did you mean 'bars'; there are: noise, bars",
    ):
        build(
            {"_target_": f"{package}.parts.BigTurbo", "noise": "x", "bars": 2.0, "bras": 1},
            allow=[package],
        )


def test_a_subclass_keeps_the_config_of_its_base(package: str) -> None:
    target = f"{package}.parts.LoudEngine"
    engine = build({"_target_": target, "piston": {"bore_mm": 1}, "horn": 2}, allow=[package])
    assert (engine.horn, engine.piston.bore_mm, engine.fuel) == (2, 1.0, "gas")
    with pytest.raises(ConfigError, match=r"component.piston.bore_mm=0.0: must be above 0"):
        build({"_target_": target, "piston": {"bore_mm": 0}}, allow=[package])


def test_what_was_built_once_can_be_built_again(package: str) -> None:
    from nemo_like.core.check import Checker
    from nemo_like.core.config import Component
    from nemo_like.core.layers import Tree

    node = {"_target_": f"{package}.Engine", "piston": {"bore_mm": 80}}
    checked = Checker(Tree({"model": node}), allow=[package]).check(dict[str, Component])
    assert build(checked["model"], allow=[package]).piston is checked["model"]["piston"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "os.system",
            r"outside of what may be built \(nemo_like., torch.optim., lightning.pytorch.\); if you trust os, add",
        ),
        ("{0}.parts.Engin", "no class 'Engin' in {0}.parts; did you mean 'Engine'"),
        ("{0}.Engin", "no class 'Engin' in {0}; did you mean 'Engine'"),
        ("{0}.Gone", "no class 'Gone' in {0}.parts"),
        ("{0}.part.Engine", "no module 'part' in {0}; did you mean 'parts'"),
        ("{0}.parts", "is a module, not a class"),
        ("{0}.parts.function", "is a function, not a class: only classes can be built"),
        ("{0}.parts.LOADED", "is a bool, not a class: only classes can be built"),
        ("{0}.parts.subprocess.Popen", "no module 'subprocess' in {0}.parts"),
        ("{0}.parts.Popen", "outside of what may be built"),
    ],
)
def test_targets_that_are_refused(package: str, target: str, message: str) -> None:
    allow = [] if target == "os.system" else [package]
    with pytest.raises(ConfigError, match=message.format(package)):
        build({"_target_": target.format(package), "args": ["true"]}, allow=allow)


def test_an_allowed_prefix_ends_at_a_dot(package: str) -> None:
    with pytest.raises(ConfigError, match=r"outside of what may be built"):
        build({"_target_": f"{package}.Engine", "piston": {"bore_mm": 1}}, allow=[package[:-1]])


def test_a_module_that_cannot_be_read_is_told_with_its_fault(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "broken.py").write_text("class X(:\n")
    (tmp_path / package / "needy.py").write_text("import no_such_module_here\nclass X: pass\n")
    with pytest.raises(ConfigError, match=r"cannot be read: invalid syntax"):
        build({"_target_": f"{package}.broken.X"}, allow=[package])
    with pytest.raises(
        ConfigError, match=r"cannot be imported: No module named 'no_such_module_here'"
    ):
        build({"_target_": f"{package}.needy.X"}, allow=[package])


def test_what_a_constructor_refuses_is_a_fault_at_its_key(package: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"callbacks.a: {package}.parts.Fragile: how=value: no good"
    ):
        build(
            {"_target_": f"{package}.parts.Fragile", "how": "value"},
            path="callbacks.a",
            allow=[package],
        )


def test_other_errors_of_a_constructor_pass_unchanged(package: str) -> None:
    with pytest.raises(DataError, match=r"x.jsonl:3: broken"):
        build({"_target_": f"{package}.parts.Fragile", "how": "data"}, allow=[package])
    with pytest.raises(KeyError, match=r"a bug"):
        build({"_target_": f"{package}.parts.Fragile", "how": "bug"}, allow=[package])


def test_a_component_needs_a_target() -> None:
    with pytest.raises(ConfigError, match=r"component._target_: is required: the class to build"):
        build({"lr": 1})
