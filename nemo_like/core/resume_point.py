"""Where a run goes on: the newest checkpoint that is whole, the same for all ranks, each byte of it hashed once."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWorking
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like.core.console import process_rank
from nemo_like.core.errors import CheckpointError
from nemo_like.core.launch import agree
from nemo_like.core.status import STATUS_FILE

if TYPE_CHECKING:
    from nemo_like.core.config import RunConfig

logger = logging.getLogger(__name__)

# Ranks wait two minutes for a value: rank zero tells them in time that it is still at work.
_SIGN_OF_LIFE_S = 30.0


def find_resume_point(folder: Path, *, verify: bool = True) -> Path | None:
    """Gives the newest whole checkpoint, on all ranks the same, and clears away what is not whole.

    Rank zero looks. What a killed save left behind is named and removed. A checkpoint whose files are not what was
    saved is named with what is wrong, renamed to ``<name>.damaged``, and the one before it is taken.

    Args:
        folder: Where the checkpoints of the run are.
        verify: Compare the SHA-256 of every file; else only names and sizes.

    Returns:
        None where there is no whole one.

    Raises:
        CheckpointError: The newest one has a format of a later version.
    """
    import nemo_like.core.checkpoint  # noqa: F401 (not for the first time in a thread: it imports torch)

    answer: dict[str, Any] = {}
    if process_rank() == 0:
        with ThreadPoolExecutor(1) as threads:
            work = threads.submit(_look, folder, verify=verify)
            number = 0
            while not _is_done(work):
                agree(f"RESUME_{number}", "{}")
                number += 1
        answer = work.result()
        agree(f"RESUME_{number}", json.dumps(answer))
    else:
        number = 0
        while not answer:
            answer = json.loads(agree(f"RESUME_{number}", '{"path": null}'))
            number += 1
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return None if answer["path"] is None else Path(answer["path"])


def _is_done(work: Future[Any]) -> bool:
    try:
        work.exception(timeout=_SIGN_OF_LIFE_S)
    except StillWorking:
        return False
    return True


def _look(folder: Path, *, verify: bool) -> dict[str, Any]:
    """What the other ranks are told: a path or null, or why there is no going on."""
    from nemo_like.core.checkpoint import (
        DamagedCheckpointError,
        find_checkpoints,
        open_checkpoint,
    )

    try:
        clear_incomplete(folder)
        _set_aside_halves(folder)
        saved = find_checkpoints(folder)
        for path in reversed(saved):
            try:
                open_checkpoint(path, verify=verify)
            except DamagedCheckpointError as error:
                logger.warning("%s", error)
                _set_aside(path)
                continue
            return {"path": str(path)}
        if saved:
            logger.warning("%s: no checkpoint is whole; the run starts from its beginning", folder)
    except (CheckpointError, OSError) as error:
        return {"error": str(error)}
    return {"path": None}


def clear_incomplete(folder: Path) -> None:
    """Removes what a killed save left behind, and says so."""
    import shutil

    from nemo_like.core.checkpoint import find_incomplete, list_files

    for path in find_incomplete(folder):
        logger.warning(
            "removing %s, which was never finished: it holds %d files and no manifest of them",
            path,
            len(list_files(path)),
        )
        shutil.rmtree(path)


def _set_aside_halves(folder: Path) -> None:
    """Folders under the name of a checkpoint without a manifest."""
    from nemo_like.core.checkpoint import MANIFEST, is_checkpoint_name

    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if is_checkpoint_name(path.name) and path.is_dir() and not (path / MANIFEST).exists():
            logger.warning("%s: has no %s, so it is not whole", path, MANIFEST)
            _set_aside(path)


def _set_aside(path: Path) -> None:
    """Renames what is damaged, so that its name is free and somebody may look at it."""
    aside, number = path.with_name(f"{path.name}.damaged"), 2
    while aside.exists():
        aside, number = path.with_name(f"{path.name}.damaged-{number}"), number + 1
    with suppress(OSError):  # a file system that may only be read: it is passed over all the same
        path.rename(aside)
        logger.warning("set it aside as %s", aside)


def is_finished(checkpoint: Path, config: RunConfig, run_dir: Path) -> bool:
    """Whether a run has nothing left to do after a checkpoint: no step, and no validation of its last step."""
    from nemo_like.core.checkpoint import read_figures

    options, step = config.trainer, read_step(checkpoint)
    if step != options.max_steps:
        return step > options.max_steps
    with suppress(OSError, ValueError):
        if json.loads((run_dir / STATUS_FILE).read_bytes())["state"] == "finished":
            return True
    interval = options.val_every_n_steps or options.max_steps
    return step % interval != 0 or read_figures(checkpoint) is not None


def read_step(checkpoint: Path) -> int:
    """Optimizer steps done when it was saved."""
    from nemo_like.core.checkpoint import STATE

    return int(json.loads((checkpoint / STATE).read_bytes())["step"])
