"""Files of fine-tuning data, and the records in them: lines of JSON, rows of Parquet and Arrow tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_like.core.errors import DataError
from nemo_like.core.extras import require
from nemo_like.core.paths import resolve
from nemo_like.data.jsonl_record import FaultKind, parse_object
from nemo_like.data.jsonl_zst import ReadReport, read_documents

LINE_ENDINGS = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".ndjson")
TABLE_ENDINGS = (".parquet", ".arrow")
ENDINGS = (*LINE_ENDINGS, *TABLE_ENDINGS)
ARRAY_ENDING = ".json"
"""A whole file that is one array; in folders such files are about the data set, so it must be named."""
_ROWS = 1024  # read at once from a table


@dataclass(frozen=True)
class Record:
    """An object of a file."""

    values: dict[str, Any]
    file: Path
    line: int
    """Line or row, from 1."""


def find_files(specs: Sequence[str] | str, *, split: str = "train") -> list[Path]:
    """The files that paths, globs and folders mean, in order.

    A folder is one of a Hugging Face data set: saved by ``save_to_disk``, or a repository of data files. Where the
    names in it speak of splits, the files of one split are taken.

    Args:
        specs: Paths and globs.
        split: Name of a split.

    Raises:
        DataError: Nothing is there, a folder has no file of a known kind or not the split, or a file is named twice.
    """
    files: list[Path] = []
    for spec in [specs] if isinstance(specs, str) else specs:
        for path in resolve(spec):
            files += _list_folder(path, split) if path.is_dir() else [_require_known(path)]
    seen = set()
    for path in files:
        if path.resolve() in seen:
            raise DataError("is named twice; take one of the two out", file=path)
        seen.add(path.resolve())
    return files


def _require_known(path: Path) -> Path:
    known = (*ENDINGS, ARRAY_ENDING)
    if not path.name.endswith(known):
        raise DataError(f"is no file of a known kind: {', '.join(known)}", file=path)
    return path


def _list_folder(folder: Path, split: str) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        if split not in splits:
            raise DataError(f"has no split {split!r}; there are: {', '.join(splits)}", file=folder)
        folder = folder / split
    if (folder / "state.json").is_file():
        state = json.loads((folder / "state.json").read_bytes())
        if state.get("_indices_files"):
            raise DataError(
                "was saved with a selection of rows beside the table; write it again with "
                "dataset.flatten_indices().save_to_disk(...)",
                file=folder,
            )
        return [folder / entry["filename"] for entry in state["_data_files"]]
    files = sorted(path for path in folder.rglob("*") if path.name.endswith(ENDINGS))
    if not files:
        raise DataError(f"holds no file of a known kind: {', '.join(ENDINGS)}", file=folder)
    named = {path: _name_split(path.relative_to(folder)) for path in files}
    if not any(named.values()):
        return files
    found = [path for path in files if named[path] == split]
    if not found:
        there = ", ".join(sorted({name for name in named.values() if name}))
        raise DataError(f"has no file of the split {split!r}; there are: {there}", file=folder)
    return found


def _name_split(path: Path) -> str | None:
    """The split that a path speaks of: ``data/train-00000-of-00002.parquet``, ``test/0.jsonl``, ``train_sft.json``."""
    for part in reversed(path.parts):
        stem = part.partition(".")[0]
        name = re.sub(r"-\d+(-of-\d+.*)?$", "", stem)
        if re.match(r"(train|test|validation|valid|val|dev)(_|$)", name):
            return name
    return None


def read_records(
    paths: Sequence[Path],
    *,
    on_error: Literal["skip", "raise"] = "raise",
    report: ReadReport | None = None,
) -> Iterator[Record]:
    """The records of files, in order, in bounded memory.

    Args:
        paths: As :func:`find_files` gives them.
        on_error: What a line that is no object does: it is skipped and counted, or it ends the reading. What is no
            table or array as a whole always ends it.
        report: To be filled with counts.

    Raises:
        DataError: A file cannot be read, or, with ``on_error="raise"``, a line of it.
        MissingExtraError: A table needs pyarrow.
    """
    report = ReadReport() if report is None else report
    for path in paths:
        if path.name.endswith((*TABLE_ENDINGS, ARRAY_ENDING)):
            rows = _read_array(path) if path.suffix == ARRAY_ENDING else _read_rows(path)
            for number, values in enumerate(rows, start=1):
                report.documents += 1
                yield Record(values, path, number)
        else:
            for it in read_documents(path, on_error=on_error, report=report, parse=parse_object):
                yield Record(it.meta, path, it.line)


def _read_array(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"is no JSON: {error}", file=path) from error
    if type(rows) is not list or not all(type(row) is dict for row in rows):
        raise DataError("must be an array of objects; or write an object a line: .jsonl", file=path)
    return rows


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    pa = require("pyarrow")
    try:
        if path.suffix == ".parquet":
            with require("pyarrow.parquet").ParquetFile(path) as table:
                for batch in table.iter_batches(batch_size=_ROWS):
                    yield from batch.to_pylist()
            return
        with pa.memory_map(str(path)) as source:
            for batch in _open_arrow(pa, source):
                for start in range(0, batch.num_rows, _ROWS):
                    yield from batch.slice(start, _ROWS).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"is no table that pyarrow can read: {error}", file=path) from error


def _open_arrow(pa: Any, source: Any) -> Iterator[Any]:
    """The batches of an Arrow file, which is a stream (as ``save_to_disk`` writes it) or has a table of contents."""
    try:
        yield from pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        source.seek(0)
        table = pa.ipc.open_file(source)
        for number in range(table.num_record_batches):
            yield table.get_batch(number)


def count_bad(report: ReadReport, kind: FaultKind, record: Record, message: str) -> DataError:
    """Counts a record that cannot be used; gives the error that says where it stands."""
    error = DataError(message, file=record.file, line=record.line)
    report.count_fault(kind, error)
    return error
