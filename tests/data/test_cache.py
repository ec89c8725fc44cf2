from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like.data.cache import build_once, find_cache_dir, hash_files

BUILDER = """
import sys, time
from pathlib import Path
from nemo_like.data.cache import build_once

def build(part):
    (part / "start").write_text("")
    time.sleep(0.3)
    (part / "end").write_text("")

folder = Path(sys.argv[1])
print("built" if build_once(folder, build) else "found", len(list(folder.iterdir())))
"""


def fill(part: Path) -> None:
    (part / "file").write_text("content")


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    assert build_once(folder, fill)
    assert not build_once(folder, pytest.fail)
    assert (folder / "file").read_text() == "content"


def test_a_build_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        fill(part)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(tmp_path / "folder", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.lock"]
    assert build_once(tmp_path / "folder", fill)


def test_what_a_killed_process_left_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "folder.part").mkdir()
    (tmp_path / "folder.part" / "half").write_text("")
    assert build_once(tmp_path / "folder", fill)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]


@pytest.mark.dist
def test_of_processes_that_ask_at_once_one_works_and_the_others_wait(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILDER, str(tmp_path / "folder")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = sorted(process.communicate()[0].strip() for process in processes)
    assert said == ["built 2", "found 2", "found 2"]


def test_hashes_are_those_of_the_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert hash_files([path], tmp_path / "cache") == [hashlib.sha256(b"content").hexdigest()]


def test_a_file_that_did_not_change_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    first = hash_files([path], tmp_path / "cache")
    monkeypatch.setattr(hashlib, "file_digest", pytest.fail)
    assert hash_files([path], tmp_path / "cache") == first


def test_a_file_that_changed_is_hashed_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    before = hash_files([path], tmp_path / "cache")
    stat = path.stat()
    path.write_bytes(b"CONTENT")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time of change
    assert hash_files([path], tmp_path / "cache") != before


def test_a_broken_record_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    expected = hash_files([path], tmp_path / "cache")
    for record in (tmp_path / "cache" / "hashes").glob("*.json"):
        record.write_text('{"state": [')
    assert hash_files([path], tmp_path / "cache") == expected


def test_the_cache_lies_where_the_system_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert find_cache_dir() == Path("/somewhere/nemo-like")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert find_cache_dir() == Path("/home/me/.cache/nemo-like")
