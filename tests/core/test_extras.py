"""Optional dependencies: there, missing, broken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nemo_like.core.errors import MissingExtraError
from nemo_like.core.extras import require


def test_an_installed_module_is_imported() -> None:
    assert require("json.decoder") is sys.modules["json.decoder"]


def test_a_missing_one_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    with pytest.raises(
        MissingExtraError,
        match=r"'gguf' is needed here and not installed; run: pip install 'nemo-like\[bench\]'",
    ):
        require("gguf")


def test_a_missing_one_without_an_extra_is_named_itself() -> None:
    with pytest.raises(
        MissingExtraError,
        match=r"'no_such_module_here' is needed .* run: pip install no_such_module_here",
    ):
        require("no_such_module_here.inner")


def test_a_broken_install_does_not_look_like_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_part_of_it\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"no_such_part_of_it") as caught:
        require("half_installed")
    assert not isinstance(caught.value, MissingExtraError)
    with pytest.raises(ModuleNotFoundError, match=r"json.no_such_part"):
        require("json.no_such_part")
