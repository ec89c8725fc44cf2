import inspect
import subprocess
import sys
from dataclasses import MISSING, fields

import pytest

import nemo_like.optim
from nemo_like.core.errors import ConfigError
from nemo_like.optim import config


@pytest.mark.parametrize("name", nemo_like.optim.__all__)
def test_a_constructor_has_the_keys_and_defaults_of_its_schema(name):
    parameters = inspect.signature(getattr(nemo_like.optim, name)).parameters
    schema = fields(getattr(config, f"{name}Config"))
    assert [field.name for field in schema] == list(parameters)
    for field in schema:
        expected = field.default
        if field.default_factory is not MISSING:
            expected = tuple(field.default_factory())
        default = parameters[field.name].default
        assert default == (inspect.Parameter.empty if expected is MISSING else expected)


def test_the_schema_and_the_schedules_load_no_torch():
    code = (
        "import sys; from nemo_like.optim import CosineSchedule, config;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("values", "faults"),
    [
        ({"lr": -1.0}, ["lr=-1.0: must be a finite number, at least 0"]),
        ({"lr": float("nan")}, ["lr=nan: must be a finite number, at least 0"]),
        (
            {"lr": 1.0, "eps": 0.0, "weight_decay": -0.1, "betas": [0.9]},
            [
                "weight_decay=-0.1: must be a finite number, at least 0",
                "eps=0.0: must be a finite number above 0",
                "betas=[0.9]: must be two numbers, each at least 0 and below 1, such as [0.9, 0.95]",
            ],
        ),
        ({"lr": 1.0, "betas": [0.9, 1.0]}, ["betas=[0.9, 1.0]: must be two numbers, each at"]),
        ({"lr": 0.0}, []),
    ],
)
def test_adamw_names_every_value_out_of_range(values, faults):
    found = list(config.AdamWConfig(**values).check())
    assert len(found) == len(faults)
    assert all(line.startswith(start) for line, start in zip(found, faults, strict=True))


def test_muon_names_every_value_out_of_range():
    faults = config.MuonConfig(lr=-1, adamw_lr=-2, momentum=1.0, ns_steps=0, eps=-1).check()
    assert [fault.partition(":")[0] for fault in faults] == [
        "lr=-1",
        "adamw_lr=-2",
        "eps=-1",
        "momentum=1.0",
        "ns_steps=0",
    ]
    with pytest.raises(ConfigError, match="ns_steps=100"):
        nemo_like.optim.Muon(ns_steps=100)
    with pytest.raises(ConfigError, match="lr=-3"):
        nemo_like.optim.AdamW(lr=-3)
