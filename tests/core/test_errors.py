"""Errors say what came, where, and what to do; lazy names behave like names."""

from __future__ import annotations

import sys
import types

import pytest

from nemo_like.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingExtraError,
    NemoLikeError,
    suggest,
)
from nemo_like.core.lazy import lazy_names


def test_every_error_has_the_common_base_and_the_built_in_one() -> None:
    pairs = {
        ConfigError: ValueError,
        DataError: ValueError,
        CheckpointError: RuntimeError,
        MissingExtraError: ImportError,
    }
    assert all(
        issubclass(error, NemoLikeError) and issubclass(error, base)
        for error, base in pairs.items()
    )


def test_a_config_error_keeps_its_faults_apart() -> None:
    error = ConfigError(["a: wrong", "b: wrong"])
    assert error.faults == ["a: wrong", "b: wrong"]
    assert str(error) == "a: wrong\nb: wrong"


def test_a_data_error_shows_file_line_and_byte() -> None:
    assert (
        str(DataError("bad JSON", file="x.jsonl", line=3, byte_offset=70))
        == "x.jsonl:3 (byte 70): bad JSON"
    )
    assert str(DataError("bad", file="x.jsonl")) == "x.jsonl: bad"
    assert str(DataError("bad", line=0, file="x")) == "x:0: bad"
    assert str(DataError("bad")) == "bad"


def test_a_checkpoint_error_lists_all_names() -> None:
    error = CheckpointError("does not fit", missing=["a", "b"], unexpected=["c"])
    assert str(error).splitlines() == [
        "does not fit",
        "  missing:    a",
        "  missing:    b",
        "  unexpected: c",
    ]
    assert (error.missing, error.unexpected) == (["a", "b"], ["c"])


def test_the_nearest_name_is_suggested_and_a_far_one_is_not() -> None:
    assert suggest("max_stepz", ["seed", "max_steps"]) == "; did you mean 'max_steps'"
    assert suggest("zebra", ["seed", "max_steps"]) == ""


def test_lazy_names_import_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = types.ModuleType("lazy_pkg.inner")
    inner.Thing = "thing"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lazy_pkg", types.ModuleType("lazy_pkg"))
    get = lazy_names("lazy_pkg", {"Thing": ".inner"})
    with pytest.raises(ModuleNotFoundError):
        get("Thing")
    monkeypatch.setitem(sys.modules, "lazy_pkg.inner", inner)
    assert get("Thing") == "thing"
    with pytest.raises(AttributeError, match="module 'lazy_pkg' has no attribute 'Thin'"):
        get("Thin")
