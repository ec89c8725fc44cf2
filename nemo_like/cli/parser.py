"""Arguments of the subcommands, with errors of one line."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that says what is wrong in one line and leaves with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong and where to read on."""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def make_parser(command: str, description: str, epilog: str | None = None) -> Parser:
    """A parser for one subcommand."""
    return Parser(
        prog=f"nemo-like {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_config_dir(parser: Parser) -> None:
    """Adds ``--config-dir``, which may be given several times."""
    text = "a folder with runs of yours: DIR/conf/<domain>/<run>.yaml"
    parser.add_argument("--config-dir", action="append", default=[], metavar="DIR", help=text)
