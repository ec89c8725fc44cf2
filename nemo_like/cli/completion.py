"""Completion in the shell: small scripts that ask ``nemo-like _complete`` what may come next."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from nemo_like.cli.parser import make_parser
from nemo_like.core.errors import ConfigError, suggest
from nemo_like.core.library import Library, open_library

# Bash hands over the line up to the cursor and expects only what follows the last '=' of the word.
_BASH = """\
_nemo_like() {
    local IFS=$'\\n'
    COMPREPLY=($(nemo-like _complete bash "${COMP_LINE:0:$COMP_POINT}" 2>/dev/null))
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]]; then compopt -o nospace; fi
}
complete -o default -F _nemo_like nemo-like
"""
_ZSH = """\
#compdef nemo-like
_nemo_like() {
    local -a found=(${(f)"$(nemo-like _complete zsh "$LBUFFER" 2>/dev/null)"})
    compadd -Q -S '' -- $found || _files
}
_nemo_like "$@"
"""
_FISH = """\
complete -c nemo-like -a '(nemo-like _complete fish (commandline -cp | string collect) 2>/dev/null)'
"""
# Shell -> script, file below the home folder, and what must be done once.
_SHELLS = {
    "bash": (
        _BASH,
        ".local/share/bash-completion/completions/nemo-like",
        "open a new shell (needs bash-completion), or: source {}",
    ),
    "zsh": (_ZSH, ".zfunc/_nemo-like", "add to ~/.zshrc before compinit: fpath+=~/.zfunc"),
    "fish": (_FISH, ".config/fish/completions/nemo-like.fish", "open a new shell"),
}


def main(arguments: list[str]) -> int:
    """Installs the script for a shell."""
    parser = make_parser("--install-completion", "Installs completion for a shell.")
    parser.add_argument(
        "shell", nargs="?", default=Path(os.environ.get("SHELL", "")).name, help="bash, zsh or fish"
    )
    shell = parser.parse_args(arguments).shell
    if shell not in _SHELLS:
        listed = f"{suggest(shell, _SHELLS)}; there are: {', '.join(_SHELLS)}"
        raise ConfigError([f"nemo-like: no completion for the shell {shell!r}{listed}"])
    script, location, remedy = _SHELLS[shell]
    file = Path.home() / location
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script, encoding="utf-8")
    print(f"wrote {file}; {remedy.format(file)}")
    return 0


def complete(arguments: list[str]) -> int:
    """Prints what may stand at the end of a command line: ``_complete <shell> <line>``."""
    shell, line = arguments
    *before, current = line.split(" ")
    words = [word for word in before[1:] if word]
    skipped = current.rpartition("=")[0] + "=" if shell == "bash" and "=" in current else ""
    for candidate in _candidates(words, current):
        if candidate.startswith(current):
            print(candidate.removeprefix(skipped))
    return 0


def _candidates(words: list[str], current: str) -> Iterator[str]:
    from nemo_like.cli.main import COMMANDS

    dirs = [folder for option, folder in pairwise(words) if option == "--config-dir"]
    library, _ = open_library([], dirs)
    if not words:
        yield from COMMANDS
    elif words[0] == "ls":
        yield from library.groups()
    elif words[0] == "cp" and len(words) == 1:
        yield from library.runs()
    elif words[0] == "run" and len(words) == 1:
        yield from library.primaries()
    elif words == ["data"]:
        yield "preview"
    elif words[0] in ("run", "validate", "plan", "data"):
        yield from _overrides(library, current)


def _overrides(library: Library, current: str) -> Iterator[str]:
    from nemo_like.core.config import RunConfig

    if current.startswith("+"):
        yield from (f"+conf={run}" for run in library.runs())
        return
    for group in library.groups():
        yield from (
            (f"{group}={option}" for option in library.options(group))
            if "=" in current
            else (f"{group}=",)
        )
    yield from _keys(RunConfig, "", with_values="=" in current)
    yield from ("+conf=", "--config-dir")


def _keys(record: type, prefix: str, *, with_values: bool) -> Iterator[str]:
    """Keys of a dataclass and of those in it: ``trainer.precision=``, or one for each value."""
    for name, wanted in typing.get_type_hints(record).items():
        if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
            yield from _keys(wanted, f"{prefix}{name}.", with_values=with_values)
        else:
            yield from (
                (f"{prefix}{name}={value}" for value in _values(wanted))
                if with_values
                else (f"{prefix}{name}=",)
            )


def _values(wanted: Any) -> list[str]:
    if wanted is bool:
        return ["true", "false"]
    members = typing.get_args(wanted) if typing.get_origin(wanted) is not Literal else (wanted,)
    literals = [member for member in members if typing.get_origin(member) is Literal]
    return [str(value) for literal in literals for value in typing.get_args(literal)]
