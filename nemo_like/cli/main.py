"""The ``nemo-like`` command; subcommands are imported when they are called, so help is quick."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from nemo_like import __version__

COMMANDS = {
    "ls": "runs that can be started, and the options of a group",
    "cp": "copy a run into a folder of yours, to change it",
    "run": "start a run: nemo-like run pretrain +conf=llm/quickstart",
    "validate": "check runs and overrides without starting anything",
    "download": "fetch a model from the Hugging Face hub",
    "env": "versions and hardware, for a bug report",
    "plan": "what a run takes on given devices, and which strategy to choose",
    "data": "look at fine-tuning data: nemo-like data preview FILES --tokenizer FOLDER",
}
_MORE = """\
  nemo-like <command> --help                      all about one command
  nemo-like --install-completion [bash|zsh|fish]  commands, runs and keys on the tab key
  nemo-like --version"""
_COMPLETE = "_complete"  # what the completion scripts call


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Without the name of the program; None takes those of the process.

    Returns:
        Exit code: 0 is fine, 2 is a mistake in what was asked.
    """
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = _dispatch(command, rest)
        sys.stdout.flush()  # here, where a closed pipe can be caught, and not when Python ends
        return code
    except BrokenPipeError:  # `nemo-like ls | head` is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _dispatch(command: str, rest: list[str]) -> int:
    if command in ("-h", "--help", "help"):
        print(_help())
        return 0
    if command in ("-V", "--version"):
        print(f"nemo-like {__version__}")
        return 0
    if command == "--install-completion":
        return _call("completion", rest)
    if command == _COMPLETE:
        from nemo_like.cli.completion import complete

        return complete(rest)
    if command not in COMMANDS:
        from nemo_like.core.errors import suggest

        known = [*COMMANDS, "--help", "--version", "--install-completion"]
        listed = ", ".join(known)
        print(
            f"nemo-like: no command {command!r}{suggest(command, known)}; there are: {listed}",
            file=sys.stderr,
        )
        return 2
    return _call(command, rest)


def _call(module: str, rest: list[str]) -> int:
    from nemo_like.core.errors import NemoLikeError

    try:
        code: int = importlib.import_module(f"nemo_like.cli.{module}").main(rest)
    except NemoLikeError as error:
        print(error, file=sys.stderr)
        return 2
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: nemo-like <command> [...]", "", *lines, "", _MORE])


if __name__ == "__main__":
    sys.exit(main())
