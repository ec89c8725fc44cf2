"""Work that is done once: folders that appear whole, and content hashes that are remembered."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


def find_cache_dir() -> Path:
    """``nemo-like`` in the user's folder for caches."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "nemo-like"


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Holds a lock against other processes; the system frees it when its holder ends, however it
    ends.

    Args:
        path: The lock; stays as an empty file, since removing it would let two processes hold it.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that holds %s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_once(folder: Path, build: Callable[[Path], None]) -> bool:
    """Makes a folder unless it is there; of several processes that ask at once, one works and the
    others wait.

    Args:
        folder: Appears whole, by a rename, or not at all.
        build: Fills the empty folder that it is given.

    Returns:
        Whether it was built here and now.
    """
    if folder.is_dir():
        return False
    with lock_file(folder.with_name(f"{folder.name}.lock")):
        if folder.is_dir():
            return False
        part = folder.with_name(f"{folder.name}.part")
        if part.exists():  # left by a process that was killed
            shutil.rmtree(part)
        part.mkdir()
        try:
            build(part)
        except BaseException:
            shutil.rmtree(part)
            raise
        os.replace(part, folder)
    return True


def hash_files(paths: Sequence[Path], cache_dir: Path) -> list[str]:
    """SHA-256 of the content of each file, in hexadecimal.

    A file is read once: the result is kept with the file's size, times and inode, and holds as long
    as they do.

    Args:
        paths: The files.
        cache_dir: Where the results are kept.
    """
    store = cache_dir / "hashes"
    with lock_file(store / "lock"):
        return [_hash_file(path.resolve(), store) for path in paths]


def _hash_file(path: Path, store: Path) -> str:
    record = store / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    stat = path.stat()
    state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    try:
        known = json.loads(record.read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        known = {}
    if known.get("state") == state:
        return str(known["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    record.write_text(json.dumps({"path": str(path), "state": state, "sha256": digest}))
    return digest
