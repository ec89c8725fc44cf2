"""A continued run names the settings that are not those it was started with."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nemo_like.core.compose import compose
from nemo_like.core.errors import ConfigError
from nemo_like.core.run import _check_gpus, _warn_of_changes


def test_changed_settings_are_named_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text(compose("pretrain", ["+conf=llm/quickstart"]).yaml)
    changes = ["seed=3", "optim.lr=0.5", "trainer.threads=1", "strategy.micro_batch_size=1"]
    with caplog.at_level(logging.WARNING, logger="nemo_like"):
        _warn_of_changes(saved, compose("pretrain", ["+conf=llm/quickstart"]).tree)
        assert caplog.messages == []
        _warn_of_changes(saved, compose("pretrain", ["+conf=llm/quickstart", *changes]).tree)
    assert caplog.messages == [
        "continuing with another data.seed: 3, it was 0",
        "continuing with another optim.lr: 0.5, it was 0.02",
        "continuing with another seed: 3, it was 0",
    ]


def test_a_run_without_a_saved_configuration_has_nothing_to_compare(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="nemo_like"):
        _warn_of_changes(tmp_path / "config.yaml", {"seed": 1})
    assert caplog.messages == []


def test_more_processes_than_gpus_are_refused() -> None:
    _check_gpus(4, 4)
    _check_gpus("auto", 1)
    with pytest.raises(ConfigError, match=r"trainer\.devices=8: this machine has 4 GPUs"):
        _check_gpus(8, 4)
    with pytest.raises(ConfigError, match="accelerator=gpu: this machine has no GPU"):
        _check_gpus("auto", 0)
