"""``nemo-like ls``: what can be run and chosen, each with the first comment of its file."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from nemo_like.cli.parser import add_config_dir, make_parser
from nemo_like.core.errors import ConfigError, suggest
from nemo_like.core.library import Library, open_library, summary


def main(arguments: list[str]) -> int:
    """Lists the runs and groups, or one group."""
    parser = make_parser("ls", "Lists the runs, or the options of a group.")
    parser.add_argument("group", nargs="?", help="for example strategy, optim, model")
    add_config_dir(parser)
    options = parser.parse_args(arguments)
    library, faults = open_library([], options.config_dir)
    if faults:
        raise ConfigError(faults)
    if options.group is not None:
        _list_group(library, options.group)
        return 0
    print("Runs (nemo-like run <verb> +conf=<run>; verbs: " + ", ".join(library.primaries()) + ")")
    _print_table((run, summary(library.files(f"conf/{run}")[0])) for run in library.runs())
    print("\nGroups (choose with <group>=<option>; nemo-like ls <group> says more)")
    _print_table((group, ", ".join(library.options(group))) for group in library.groups())
    return 0


def _list_group(library: Library, group: str) -> None:
    groups = library.groups()
    # People say `ls models` and `ls runs`.
    name = next((known for known in (group, group.removesuffix("s")) if known in groups), None)
    if name is None:
        listed = ", ".join(groups)
        raise ConfigError(
            [f"nemo-like ls: no group {group!r}{suggest(group, groups)}; there are: {listed}"]
        )
    _print_table(
        (option, summary(library.files(f"{name}/{option}")[0])) for option in library.options(name)
    )


def _print_table(rows: Iterable[tuple[str, str]]) -> None:
    table = list(rows)
    width = max((len(name) for name, _ in table), default=0)
    for name, text in table:
        sys.stdout.write(f"  {name:{width}}  {text}".rstrip() + "\n")
