"""The command line's side of generation: options by the names of the configuration, prompts from files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_like.core.errors import ConfigError, DataError, suggest

from .config import EVICTION_POLICIES, GenerationConfig

_HELP: dict[str, tuple[Any, str]] = {
    "max_tokens": (int, "tokens after which a text ends at the latest"),
    "repetition_penalty": (float, "above 1 makes tokens that were seen less likely"),
    "temperature": (float, "what logits are divided by; 0 takes the likeliest token"),
    "top_k": (int, "draw from this many likeliest tokens"),
    "top_p": (float, "draw from the likeliest tokens that together have this probability"),
    "min_p": (
        float,
        "draw from tokens with at least this share of the likeliest one's probability",
    ),
    "seed": (int, "the same seed gives the same text"),
    "num_beams": (int, "beams of a beam search"),
    "length_penalty": (float, "above 0 favours long beams"),
    "logprobs": (int, "give log-probabilities, and of so many likeliest tokens"),
    "cache_size": (int, "tokens that are remembered at once"),
    "num_sinks": (int, "first tokens that attention_sinks keeps"),
}
_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_TEXTS = ("--prompt", "--stop", "--system")
"""Options whose value is a text, in which ``key=value`` means nothing."""


def add_generation_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Adds an option for each field of :class:`GenerationConfig`.

    Args:
        parser: Of the command.
        defaults: Where the command differs from the dataclass.
    """
    default = {**dataclasses.asdict(GenerationConfig()), **defaults}
    parser.set_defaults(generation_defaults=defaults)
    group = parser.add_argument_group("generation")
    for name, (kind, text) in _HELP.items():
        shown = "" if default[name] is None else f" (default: {default[name]})"
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, type=kind, default=argparse.SUPPRESS, help=text + shown)
    group.add_argument(
        "--eviction-policy",
        choices=EVICTION_POLICIES,
        default=argparse.SUPPRESS,
        help=f"when the cache is full (default: {default['eviction_policy']})",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        help=r"string before which a text ends, \n is a line end; may be given several times",
    )
    group.add_argument(
        "--stop-tokens", type=int, nargs="+", default=[], help="ids of tokens that end a text"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on behind the end of text")


def read_generation_options(
    arguments: argparse.Namespace, *, stop_tokens: Sequence[int] = ()
) -> GenerationConfig:
    """The configuration that was asked for.

    Args:
        arguments: What :func:`parse_spelled` gave.
        stop_tokens: Further tokens that end a text.

    Raises:
        ConfigError: It has faults.
    """
    names = [field.name for field in dataclasses.fields(GenerationConfig)]
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    values = {**arguments.generation_defaults, **given}
    if given.get("temperature") == 0 or given.get("num_beams", 1) > 1:
        # What the command would filter by otherwise; what the user asked for stays, and is refused if it is idle.
        values = {name: it for name, it in values.items() if name in given or name not in _FILTERS}
    values["stop"] = [it.replace("\\n", "\n").replace("\\t", "\t") for it in values["stop"]]
    if not values["ignore_eos"]:
        values["stop_tokens"] = [*values["stop_tokens"], *stop_tokens]
    config = GenerationConfig(**values)
    faults = list(config.check())
    if faults:
        raise ConfigError(faults)
    return config


def parse_spelled(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads ``key=value`` like ``--key value``; what is unknown is refused, with the nearest name.

    Raises:
        ConfigError: An argument is unknown.
    """
    spelled = [
        each
        if before in _TEXTS
        else re.sub(r"^(\w+)=", lambda key: f"--{key[1]}=".replace("_", "-"), each)
        for before, each in zip(["", *argv], argv, strict=False)
    ]
    known, unknown = parser.parse_known_args(spelled)
    faults = []
    keys = {*vars(known), *(field.name for field in dataclasses.fields(GenerationConfig))}
    keys -= {"generation_defaults"}
    for each in unknown:
        name = each.lstrip("-").partition("=")[0].replace("-", "_")
        faults.append(f"{name!r} is no argument{suggest(name, sorted(keys))}; --help lists them")
    if faults:
        raise ConfigError(faults)
    return known


def read_stop_tokens(folder: Path) -> list[int]:
    """All tokens that end a text as a Hugging Face folder names them: chat models often have several.

    Args:
        folder: Of the model; without ``generation_config.json`` there are none to name.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return []
    found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    if found is None:
        return []
    return [int(it) for it in (found if isinstance(found, list) else [found])]


def read_prompts(file: Path) -> Iterator[dict[str, Any]]:
    """Prompts of a file: each line of ``.jsonl`` is an object with ``prompt``, each line of another file a prompt.

    Yields:
        Objects with ``prompt``, and whatever else stood beside it.

    Raises:
        DataError: A line is no such object, with file and line.
    """
    if not file.is_file():
        raise DataError("no such file of prompts", file=file)
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if file.suffix != ".jsonl":
                yield {"prompt": line.rstrip("\n")}
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"no JSON: {error}", file=file, line=number) from error
            if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
                raise DataError('must be an object with a text "prompt"', file=file, line=number)
            yield record
