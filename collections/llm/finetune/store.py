"""Tokenised samples of a source, kept in the cache: two token shards side by side, one of ids, one of what is learnt.

They are made once for each combination of files, keys, tokenizer and template, before any cutting and packing, so that
runs of other lengths share them.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nemo_like.core.errors import DataError
from nemo_like.data.cache import build_once
from nemo_like.data.corpus import hash_corpus, hash_key
from nemo_like.data.held_out import is_held_out
from nemo_like.data.jsonl_zst import ReadReport
from nemo_like.data.token_shards import TokenShard, TokenShardWriter, choose_dtype

from .config import SourceConfig
from .encode import Encoded, SampleEncoder
from .samples import (
    BadSampleError,
    PreferenceSample,
    SameAnswersError,
    Sample,
    fingerprint,
    read_sample,
)
from .sources import count_bad, find_files, read_records

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Part of the key of a cache folder: another number makes all of them anew."""
Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


class SampleShard:
    """Tokenised samples, read by mmap.

    Args:
        prefix: Path of the shards, less their endings.
    """

    def __init__(self, prefix: Path) -> None:
        self.ids, self.learnt = TokenShard(f"{prefix}.ids"), TokenShard(f"{prefix}.learnt")
        self.lengths = self.ids.lengths

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The ids of a sample, and 1 for each that is learnt, else 0."""
        return self.ids[number], self.learnt[number]

    @property
    def num_targets(self) -> int:
        """Tokens that are learnt, in all samples."""
        return int(np.count_nonzero(self.learnt.tokens))


@dataclass
class Store:
    """What a source comes to.

    Attributes:
        folder: Cache folder.
        shards: One for each split.
        report: What was read, and what could not be used.
        num_same: Preferences between an answer and itself, which are left out.
    """

    folder: Path
    shards: dict[Split, SampleShard]
    report: ReadReport
    num_same: int = 0


def open_store(
    source: SourceConfig,
    *,
    encoder: SampleEncoder,
    template_key: str,
    held_out_fraction: float,
    on_error: Literal["skip", "raise"],
    cache_dir: Path,
    as_pairs: bool = False,
) -> Store:
    """Tokenises a source, or finds it tokenised. Of several processes that ask at once one works, the others wait.

    Args:
        source: Files, kind and keys, filled in.
        encoder: Makes tokens of samples.
        template_key: What decides about the texts of its chat template.
        held_out_fraction: Share of samples that form the split ``held_out``, by content.
        on_error: What a record that cannot be used does: it is skipped and counted, or it ends the work.
        cache_dir: Folder that holds the cache folders.
        as_pairs: The samples are preferences: each becomes two, the better answer and the worse.

    Raises:
        DataError: A record cannot be used, or a file cannot be read.
    """
    paths = find_files(source.files, split=source.split)
    assert source.keys is not None, "filled in by the configuration"
    key = {
        "format": FORMAT_VERSION,
        "files": hash_corpus(paths, cache_dir),
        "kind": source.kind,
        "keys": asdict(source.keys),
        "tokenizer": encoder.tokenizer.content_hash,
        "template": template_key,
        "held_out_fraction": held_out_fraction,
    }
    folder = cache_dir / ("pairs" if as_pairs else "samples") / hash_key(key)

    def build(part: Path) -> None:
        logger.info("tokenising the samples of %d files", len(paths))
        report, same = ReadReport(), Counter[str]()
        dtype = choose_dtype(encoder.tokenizer.vocab_size)
        with ExitStack() as stack:
            writers = {
                split: (
                    stack.enter_context(TokenShardWriter(part / f"{split}.ids", dtype=dtype)),
                    stack.enter_context(TokenShardWriter(part / f"{split}.learnt", dtype=np.uint8)),
                )
                for split in SPLITS
            }
            for content, parts in encode_source(
                source, paths, encoder, report, on_error, same=same if as_pairs else None
            ):
                is_held = is_held_out(content, held_out_fraction)
                split: Split = "held_out" if is_held else "train"
                for encoded in parts:
                    writers[split][0].add(encoded.ids_T)
                    writers[split][1].add(encoded.is_learnt_T.view(np.uint8))
        manifest = {"key": key, "report": vars(report), "same": same.total()}
        (part / "manifest.json").write_text(json.dumps(manifest, indent=1))

    start = time.perf_counter()
    if build_once(folder, build):
        logger.info("tokenised samples in %.1f s: %s", time.perf_counter() - start, folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    found = manifest["report"]
    report = ReadReport()
    report.add(ReadReport(**found | {"faults": type(report.faults)(found["faults"])}))
    if report.faults and on_error == "raise":  # a run that skips them has been here
        raise DataError(f"{report.places[0]}; on_error=skip leaves such records out")
    shards: dict[Split, SampleShard] = {split: SampleShard(folder / split) for split in SPLITS}
    return Store(folder, shards, report, manifest.get("same", 0))


def _encode_one(sample: Sample, encoder: SampleEncoder) -> tuple[str, Sequence[Encoded]]:
    if isinstance(sample, PreferenceSample):
        raise BadSampleError(
            "is a preference pair, which this data module has no use for: say what is to be learnt with "
            "kind=pair and keys.completion=chosen"
        )
    return fingerprint(sample), [encoder.encode(sample)]


def _encode_pair(sample: Sample, encoder: SampleEncoder) -> tuple[str, Sequence[Encoded]]:
    if not isinstance(sample, PreferenceSample):
        raise BadSampleError("is no preference: a better answer (chosen) and a worse (rejected)")
    chosen, rejected = encoder.encode_preference(sample)
    if np.array_equal(chosen.ids_T, rejected.ids_T):
        raise SameAnswersError
    # Other answers to a prompt that is trained on would say little about unseen ones.
    return json.dumps(sample.prompt, sort_keys=True, ensure_ascii=False), [chosen, rejected]


def encode_source(
    source: SourceConfig,
    paths: list[Path],
    encoder: SampleEncoder,
    report: ReadReport,
    on_error: Literal["skip", "raise"],
    *,
    same: Counter[str] | None = None,
) -> Iterator[tuple[str, Sequence[Encoded]]]:
    """The samples of a source, each with the text that decides whether it is held out, encoded.

    Args:
        source: Kind and keys.
        paths: Its files.
        encoder: Makes tokens of samples.
        report: Receives the counts.
        on_error: As in :func:`open_store`.
        same: Makes preferences of the records, two answers each, and counts by file those whose answers are the same,
            which are left out; None makes anything but preferences.

    Raises:
        DataError: A record cannot be used.
    """
    encode = _encode_one if same is None else _encode_pair
    lines, samples = ReadReport(), ReadReport()
    for record in read_records(paths, on_error=on_error, report=lines):
        try:
            sample = read_sample(record.values, kind=source.kind or "auto", keys=source.keys)
            content, encoded = encode(sample, encoder)
        except BadSampleError as error:
            if same is not None and isinstance(error, SameAnswersError):
                same[record.file.name] += 1
                continue
            fault = count_bad(samples, "sample", record, str(error))
            if on_error == "raise":
                raise DataError(
                    f"{error}; on_error=skip leaves such records out",
                    file=record.file,
                    line=record.line,
                ) from error
            logger.debug("%s", fault)
            continue
        samples.documents += 1
        yield content, encoded
    lines.documents = 0  # those that could be read are counted if they could be used
    for part in (lines, samples):
        report.add(part)
    if samples.faults:  # what was wrong with lines was said by their reader
        logger.warning("%s", samples.describe())
