"""Data paths: files, globs, packages, and what is said when nothing is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.core.errors import DataError
from nemo_like.core.paths import resolve


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        "data/b.jsonl.zst",
        "data/a.jsonl.zst",
        "data/deep/er/c.jsonl.zst",
        "data/odd[1].txt",
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path


def test_globs_are_sorted_and_relative_to_the_current_folder(folder: Path) -> None:
    assert resolve("data/*.zst") == [Path("data/a.jsonl.zst"), Path("data/b.jsonl.zst")]
    assert resolve(f"{folder}/data/*.zst")[0] == folder / "data/a.jsonl.zst"


def test_two_stars_cross_folders(folder: Path) -> None:
    assert [path.name[0] for path in resolve("data/**/*.zst")] == ["a", "b", "c"]


def test_a_file_or_folder_is_itself_even_with_brackets_in_its_name(folder: Path) -> None:
    assert resolve("data/odd[1].txt") == [Path("data/odd[1].txt")]
    assert resolve("data") == [Path("data")]


def test_the_home_folder_is_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert resolve("~/data/a.*") == [folder / "data/a.jsonl.zst"]


def test_files_inside_a_package_are_found(folder: Path) -> None:
    (found,) = resolve("pkg://nemo_like.core/path*.py")
    assert found.name == "paths.py"
    assert found.is_absolute()


def test_a_missing_file_names_the_nearest(folder: Path) -> None:
    nearest = r"'data/a.json.zst': no such file or folder; in data there is no 'a.json.zst'; did you mean 'a.jsonl.zst'"
    with pytest.raises(DataError, match=nearest):
        resolve("data/a.json.zst")
    with pytest.raises(DataError, match=r"in data there is no 'dep'; did you mean 'deep'"):
        resolve("data/dep/er/c.jsonl.zst")


def test_a_glob_without_a_match_says_what_is_there(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"'data/deep/\*.txt': no such file or folder; data/deep holds: er"
    ):
        resolve("data/deep/*.txt")
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds: nothing"):
        resolve("empty/*")


def test_a_missing_package_is_named(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"'pkg://nemo_lik.samples/x': there is no package 'nemo_lik.samples'"
    ):
        resolve("pkg://nemo_lik.samples/x")
    with pytest.raises(DataError, match=r"there is no package ''"):
        resolve("pkg:///x")
