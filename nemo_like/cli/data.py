"""``nemo-like data preview``: samples of fine-tuning data as the model will see them, with what is learnt in colour."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_like.cli.parser import add_config_dir, make_parser
from nemo_like.core.errors import ConfigError, suggest

if TYPE_CHECKING:
    from nemo_like.collections.llm.finetune.config import FinetuneDataModuleConfig
    from nemo_like.collections.llm.finetune.encode import SampleEncoder
    from nemo_like.collections.llm.finetune.preview import Preview, Shown, Stretch

_DESCRIPTION = "Shows what a model will see of fine-tuning data: samples, what is learnt in them, lengths, faults."
_EPILOG = """\
examples: nemo-like data preview mine.jsonl --tokenizer models/SmolLM2-135M -n 5
          nemo-like data preview 'pkg://nemo_like.samples/chat/*.jsonl.zst'
          nemo-like data preview +conf=llm/<run> data.seq_len=512

colours:  green is learnt, dim is context, bold is a special token, red is cut off. Where the output is no terminal,
          what is learnt stands in [[ ]], what is cut off in {{ }}."""
# (is_learnt, is_special) -> style of rich.
_STYLES = {
    (False, False): "dim",
    (False, True): "bold magenta",
    (True, False): "green",
    (True, True): "bold green",
}


def main(arguments: list[str]) -> int:
    """Shows samples and figures; exit code 1 where no record can be used."""
    parser = make_parser("data", _DESCRIPTION, _EPILOG)
    parser.add_argument("action", help="preview")
    what = "files, globs, folders of data sets; or what follows `nemo-like run <verb>`"
    parser.add_argument("what", nargs="+", help=what)
    text = "folder, run or tokenizer.json; without one, a small one is trained from the data"
    parser.add_argument("--tokenizer", metavar="PATH", help=text)
    parser.add_argument("-n", type=int, default=3, metavar="N", help="samples of each source (3)")
    text = "records to read of each source, 0 for all (10000)"
    parser.add_argument("--limit", type=int, default=10_000, metavar="N", help=text)
    parser.add_argument("--seq-len", type=int, default=2048, metavar="N", help="tokens (2048)")
    text = "chatml, none, or a Jinja file; else the tokenizer's own"
    parser.add_argument("--chat-template", metavar="NAME", help=text)
    parser.add_argument("--verb", help="what the run is for (finetune)")
    add_config_dir(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.action != "preview":
        raise ConfigError(
            [
                f"nemo-like data: no action {options.action!r}{suggest(options.action, ['preview'])}; "
                "there is: preview"
            ]
        )
    if options.n < 0 or options.limit < 0:
        raise ConfigError([f"-n {options.n} --limit {options.limit}: must be at least 0"])
    return _preview(options)


def _preview(options: argparse.Namespace) -> int:
    from nemo_like.collections.llm.finetune.encode import build_encoder
    from nemo_like.collections.llm.finetune.preview import make_stand_in, preview_source

    config = _read_config(options)
    tokenizer = None
    if config.tokenizer.path is None:
        tokenizer = make_stand_in(config)
        _say(
            f"no --tokenizer: one of {tokenizer.vocab_size:,} tokens was trained from these data, to look at them"
        )
    encoder, _ = build_encoder(config, tokenizer)
    chat = encoder.chat
    _say(f"chat template: {chat.name}; an answer ends with {chat.end_token} ({chat.end_id})")
    limit = options.limit or sys.maxsize
    found = 0
    for name, source in config.list_sources().items():
        preview = preview_source(name, source, encoder, num_shown=options.n, limit=limit)
        for number, shown in enumerate(preview.shown, start=1):
            _show_sample(shown, number, config, encoder)
        _show_figures(preview, config)
        found += len(preview.lengths)
    return 0 if found else 1


def _read_config(options: argparse.Namespace) -> FinetuneDataModuleConfig:
    from nemo_like.collections.llm.config import TokenizerConfig
    from nemo_like.collections.llm.finetune.config import FinetuneDataModuleConfig

    if not any("=" in text for text in options.what):
        config = FinetuneDataModuleConfig(
            files=options.what,
            tokenizer=TokenizerConfig(path=options.tokenizer),
            seq_len=options.seq_len,
            global_batch_size=1,
            chat_template=options.chat_template,
        )
        if faults := list(config.check()):
            raise ConfigError([f"nemo-like data: {fault}" for fault in faults])
        return config
    return _read_run(options)


def _read_run(options: argparse.Namespace) -> FinetuneDataModuleConfig:
    from nemo_like.collections.llm.finetune.data import FinetuneDataModule
    from nemo_like.collections.llm.preference.data import PreferenceDataModule
    from nemo_like.core.compose import compose
    from nemo_like.core.library import Library

    verb = options.verb or ("finetune" if "finetune" in Library().primaries() else "pretrain")
    line = [*(f"--config-dir={folder}" for folder in options.config_dir), *options.what]
    if options.tokenizer is not None:
        line.append(f"data.tokenizer.path={options.tokenizer}")
    if options.chat_template is not None:
        line.append(f"data.chat_template={options.chat_template}")
    data = compose(verb, line).build("data")
    if isinstance(data, PreferenceDataModule):
        return data.config.to_finetune()
    if not isinstance(data, FinetuneDataModule):
        raise ConfigError(
            [
                f"data._target_: this run trains on {type(data).__name__}; a preview is for a FinetuneDataModule "
                "(data=llm/sft)"
            ]
        )
    return data.config


def _show_sample(
    shown: Shown, number: int, config: FinetuneDataModuleConfig, encoder: SampleEncoder
) -> None:
    from nemo_like.collections.llm.finetune.preview import find_kept, list_stretches

    length = len(shown.encoded.ids_T)
    kept = find_kept(length, seq_len=config.seq_len, too_long=config.too_long)
    head = f"{number}. {shown.file.name}:{shown.line}, {shown.kind}, {length:,} tokens, "
    head += f"{shown.encoded.num_targets:,} learnt"
    if kept != (0, length):
        head += f", {length - (kept[1] - kept[0]):,} cut off"
    elif length - 1 > config.seq_len:
        head += f", split into {-(-(length - 1) // config.seq_len)}"
    stretches = list(list_stretches(shown.encoded, encoder.tokenizer, kept=kept))
    if sys.stdout.isatty():
        _show_in_colour(head, stretches)
        return
    parts = []
    for it in stretches:
        text = f"{{{{{it.text}}}}}" if it.is_cut else it.text
        parts.append(f"[[{text}]]" if it.is_learnt else text)
    # An answer and its end are two stretches of one learnt whole.
    _say(f"\n{head}\n\n" + "".join(parts).replace("]][[", "").replace("}}{{", ""))


def _show_in_colour(head: str, stretches: Sequence[Stretch]) -> None:
    from rich.console import Console
    from rich.text import Text

    text = Text()
    for it in stretches:
        text.append(it.text, "strike red" if it.is_cut else _STYLES[it.is_learnt, it.is_special])
    console = Console(highlight=False)
    console.rule(Text(head, "bold"), align="left")
    console.print(text)


def _show_figures(preview: Preview, config: FinetuneDataModuleConfig) -> None:
    from nemo_like.collections.llm.finetune.preview import draw_histogram

    lengths = preview.lengths
    tokens = sum(lengths)
    which = "" if preview.is_whole else "the first "
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in preview.kinds.items()) or "none"
    _say(f"\n{preview.name}: {', '.join(path.name for path in preview.files)}")
    _say(
        f"{which}{len(lengths):,} samples ({kinds}), {tokens:,} tokens, {preview.num_learnt:,} learnt "
        f"({preview.num_learnt / max(tokens, 1):.0%})"
    )
    if preview.report.faults:
        _say(preview.report.describe())
    if not lengths:
        return
    _say(f"tokens of a sample: median {statistics.median(lengths):,.0f}, longest {max(lengths):,}")
    _say("\n".join(draw_histogram(lengths)))
    long = preview.count_long(config.seq_len)
    _say(f"{long:,} longer than seq_len={config.seq_len} (too_long={config.too_long})")


def _say(text: str) -> None:
    print(text)
