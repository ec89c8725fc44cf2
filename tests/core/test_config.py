"""The rules of a run's own settings, and how text of a YAML file is read."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_like.core.config import CheckpointConfig, Component, RunConfig, TrainerConfig
from nemo_like.core.layers import parse_plain


def make_run(**keys: Any) -> RunConfig:
    parts = {key: Component() for key in ("model", "data", "optim", "schedule", "strategy")}
    return RunConfig(**{"name": "x", "trainer": TrainerConfig(max_steps=1), **parts, **keys})


def test_defaults_have_no_fault() -> None:
    assert list(make_run().check()) == []
    assert list(TrainerConfig(max_steps=1).check()) == []
    assert list(CheckpointConfig().check()) == []


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("max_steps", 0, "max_steps=0: must be at least 1"),
        ("devices", 0, "devices=0: must be at least 1"),
        ("num_nodes", -1, "num_nodes=-1: must be at least 1"),
        ("log_every_n_steps", 0, "log_every_n_steps=0: must be at least 1"),
        ("val_every_n_steps", 0, "val_every_n_steps=0: must be at least 1"),
        ("val_batches", 0, "val_batches=0: must be at least 1"),
        ("threads", 0, "threads=0: must be at least 1"),
        (
            "gradient_clip_norm",
            0.0,
            "gradient_clip_norm=0.0: must be above 0, or null to clip nothing",
        ),
        (
            "gradient_clip_norm",
            float("nan"),
            "gradient_clip_norm=nan: must be above 0, or null to clip nothing",
        ),
    ],
)
def test_trainer_values_out_of_range(key: str, value: Any, fault: str) -> None:
    assert list(TrainerConfig(**{"max_steps": 1, key: value}).check()) == [fault]


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        (
            "every_n_steps",
            0,
            "every_n_steps=0: must be at least 1, or null to save after the last step",
        ),
        ("keep_last", 0, "keep_last=0: must be at least 1, or a run could not be resumed"),
        ("keep_best", -1, "keep_best=-1: must be at least 0"),
    ],
)
def test_checkpoint_values_out_of_range(key: str, value: int, fault: str) -> None:
    assert list(CheckpointConfig(**{key: value}).check()) == [fault]


@pytest.mark.parametrize("name", ["", "a/b", ".hidden"])
def test_a_name_must_make_a_folder(name: str) -> None:
    (fault,) = make_run(name=name).check()
    assert fault.startswith(f"name={name!r}: must be usable as the name of a folder")


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range(seed: int) -> None:
    assert list(make_run(seed=seed).check()) == [f"seed={seed}: must be between 0 and 4294967295"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12), ("-12", -12), ("+3", 3), ("1_000", 1000), ("0", 0),
        ("1.5", 1.5), (".5", 0.5), ("1.", 1.0), ("1e3", 1000.0), ("1E-3", 0.001), ("-2.5e+2", -250.0),
        (".inf", float("inf")), ("-.inf", float("-inf")),
        ("true", True), ("False", False), ("TRUE", True), ("null", None), ("~", None), ("", None), ("Null", None),
        ("00012", "00012"), ("0x1F", "0x1F"), ("0o17", "0o17"), ("1:30", "1:30"), ("yes", "yes"), ("no", "no"),
        ("off", "off"), ("2026-01-02", "2026-01-02"), ("1.2.3", "1.2.3"), ("e5", "e5"), ("tRue", "tRue"),
        ("inf", "inf"), ("nan", "nan"), ("007.5", "007.5"), ("1e", "1e"), ("_1", "_1"),
    ],
)  # fmt: skip
def test_unquoted_text_means_what_it_says(text: str, value: Any) -> None:
    found = parse_plain(text)
    assert (found, type(found)) == (value, type(value))
