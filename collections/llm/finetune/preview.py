"""What a model will see of fine-tuning data: samples with what is learnt in them, counts, lengths."""

# Shapes: T = tokens of a sample.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from nemo_like.core.errors import DataError
from nemo_like.data.jsonl_zst import ReadReport
from nemo_like.text.tokenizer import Tokenizer, train_bpe

from .config import FinetuneDataModuleConfig, SourceConfig, TooLong
from .encode import Encoded, SampleEncoder
from .samples import BadSampleError, ChatSample, PreferenceSample, TextSample, read_sample
from .sources import Record, count_bad, find_files, read_records

STAND_IN_VOCAB = 2048
_STAND_IN_RECORDS = 1000


class Stretch(NamedTuple):
    """Tokens in a row that are alike."""

    text: str
    is_learnt: bool
    is_special: bool
    is_cut: bool
    """Whether the model never sees them."""


@dataclass(frozen=True)
class Shown:
    """A sample to be shown."""

    kind: str
    file: Path
    line: int
    encoded: Encoded


@dataclass
class Preview:
    """What was found in a source."""

    name: str
    files: list[Path]
    lengths: list[int] = field(default_factory=list)
    """Tokens of each sample."""
    num_learnt: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    shown: list[Shown] = field(default_factory=list)
    report: ReadReport = field(default_factory=ReadReport)
    is_whole: bool = True
    """Whether all records were read."""

    def count_long(self, seq_len: int) -> int:
        """Samples of more tokens than a sample may have."""
        return sum(length - 1 > seq_len for length in self.lengths)


def preview_source(
    name: str, source: SourceConfig, encoder: SampleEncoder, *, num_shown: int, limit: int
) -> Preview:
    """Reads the first records of a source.

    Args:
        name: Of the source.
        source: Files, kind and keys.
        encoder: Makes tokens of samples.
        num_shown: Samples to keep.
        limit: Records to read.

    Raises:
        DataError: A file cannot be read.
    """
    result = Preview(name, find_files(source.files, split=source.split))
    lines = ReadReport()
    records = read_records(result.files, on_error="skip", report=lines)
    for number, record in enumerate(records):
        if number == limit:
            result.is_whole = False
            break
        try:
            kind, encoded = _encode(record, source, encoder)
        except BadSampleError as error:
            count_bad(result.report, "sample", record, str(error))
            continue
        result.lengths.append(len(encoded.ids_T))
        result.num_learnt += encoded.num_targets
        result.kinds[kind] = result.kinds.get(kind, 0) + 1
        if len(result.shown) < num_shown:
            result.shown.append(Shown(kind, record.file, record.line, encoded))
    lines.documents = len(result.lengths)
    result.report.add(lines)
    return result


def _encode(record: Record, source: SourceConfig, encoder: SampleEncoder) -> tuple[str, Encoded]:
    sample = read_sample(record.values, kind=source.kind or "auto", keys=source.keys)
    if isinstance(sample, PreferenceSample):
        return "preference (chosen)", encoder.encode_preference(sample)[0]
    return "chat" if isinstance(sample, ChatSample) else "text", encoder.encode(sample)


def find_kept(length: int, *, seq_len: int, too_long: TooLong) -> tuple[int, int]:
    """The tokens of a sample that the model sees: the first, and the one behind the last.

    Args:
        length: Tokens of the sample.
        seq_len: Most inputs of a sample.
        too_long: What becomes of longer ones.
    """
    if length - 1 <= seq_len or too_long == "split":
        return 0, length
    if too_long == "drop":
        return 0, 0
    return (0, seq_len + 1) if too_long == "keep_start" else (length - seq_len - 1, length)


def list_stretches(
    encoded: Encoded, tokenizer: Tokenizer, *, kept: tuple[int, int]
) -> Iterator[Stretch]:
    """The text of a sample, in stretches of tokens that are alike.

    Args:
        encoded: The sample.
        tokenizer: Turns tokens into text.
        kept: As :func:`find_kept` gives them.
    """
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    rows = zip(encoded.ids_T.tolist(), encoded.is_learnt_T.tolist(), strict=True)
    marked = [
        (token, (learnt, token in special, not kept[0] <= place < kept[1]))
        for place, (token, learnt) in enumerate(rows)
    ]
    for alike, group in groupby(marked, key=lambda row: row[1]):
        text = tokenizer.decode([token for token, _ in group], skip_special_tokens=False)
        yield Stretch(text, *alike)


def draw_histogram(lengths: Sequence[int], *, width: int = 40) -> list[str]:
    """Lines that show how long samples are, in classes that double.

    Args:
        lengths: Tokens of each sample.
        width: Of the longest bar.
    """
    counts: dict[int, int] = {}
    for length in lengths:
        counts[length.bit_length()] = counts.get(length.bit_length(), 0) + 1
    largest = max(counts.values(), default=1)
    lines = []
    for bits in range(min(counts, default=0), max(counts, default=-1) + 1):
        count = counts.get(bits, 0)
        bar = "#" * -(-count * width // largest)
        lines.append(f"{1 << bits >> 1:>9,} - {(1 << bits) - 1:>9,}  {count:>9,}  {bar}".rstrip())
    return lines


def make_stand_in(config: FinetuneDataModuleConfig) -> Tokenizer:
    """A byte-level BPE trained from the data themselves, to look at data without a model.

    Raises:
        DataError: There is no record to train it from.
    """
    texts: list[str] = []
    for source in config.list_sources().values():
        files = find_files(source.files, split=source.split)
        for record in read_records(files, on_error="skip"):
            if len(texts) == _STAND_IN_RECORDS:
                break
            try:
                sample = read_sample(record.values, kind=source.kind or "auto", keys=source.keys)
            except BadSampleError:
                continue
            texts.append(_join(sample))
    if not texts:
        raise DataError("no record of the files can be used: see what is wrong with --tokenizer")
    return train_bpe(texts, vocab_size=STAND_IN_VOCAB)


def _join(sample: ChatSample | TextSample | PreferenceSample) -> str:
    if isinstance(sample, TextSample):
        return sample.text
    if isinstance(sample, ChatSample):
        return "\n".join(message["content"] for message in sample.messages)
    return "\n".join(message["content"] for message in [*sample.prompt, *sample.chosen])
