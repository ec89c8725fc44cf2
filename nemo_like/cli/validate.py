"""``nemo-like validate``: composes and checks, starts nothing, says everything that is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_like.cli.cp import split_run_file
from nemo_like.cli.parser import add_config_dir, make_parser
from nemo_like.core.compose import check_option, check_run, compose
from nemo_like.core.errors import ConfigError
from nemo_like.core.library import Library, is_run, open_library

_DESCRIPTION = "Checks runs without starting anything. Without arguments: all of them."
_EPILOG = """\
examples: nemo-like validate +conf=llm/quickstart trainer.max_steps=100
          nemo-like validate mine/conf/llm/my_run.yaml
          nemo-like validate --all trainer.precision=bf16-mixed"""


def main(arguments: list[str]) -> int:
    """Checks one command line, files, or everything."""
    parser = make_parser("validate", _DESCRIPTION, _EPILOG)
    what = "what follows `nemo-like run <verb>`, and YAML files of yours"
    parser.add_argument("what", nargs="*", help=what)
    parser.add_argument("--all", action="store_true", help="every run and every option of a group")
    parser.add_argument("--verb", default="pretrain", help="what the runs are for (pretrain)")
    add_config_dir(parser)
    options = parser.parse_args(arguments)
    library, faults = open_library([], options.config_dir)
    if faults:
        raise ConfigError(faults)
    files = [text for text in options.what if "=" not in text and text.endswith((".yaml", ".yml"))]
    overrides = [text for text in options.what if text not in files]
    line = [*(f"--config-dir={folder}" for folder in options.config_dir), *overrides]
    checked = {text: _check_file(options.verb, Path(text), line, library) for text in files}
    if options.all or not options.what:
        checked |= _check_all(options.verb, line, library)
    elif overrides and not files:
        checked[" ".join(overrides)] = _check_line(options.verb, line)
    for fault in dict.fromkeys(fault for found in checked.values() for fault in found):
        print(fault, file=sys.stderr)
    if any(checked.values()):
        return 2
    print(f"ok: {', '.join(checked)}")
    return 0


def _check_line(verb: str, line: Sequence[str]) -> list[str]:
    try:
        compose(verb, line)
    except ConfigError as error:
        return error.faults
    return []


def _check_file(verb: str, file: Path, line: Sequence[str], library: Library) -> list[str]:
    if not file.is_file():
        return [f"{file}: there is no such file"]
    if is_run(file):
        folder, name = split_run_file(file.absolute())
        return check_run(verb, [f"--config-dir={folder}", f"+conf={name}", *line])
    groups = library.groups()
    group = next((part for part in reversed(file.absolute().parts[:-1]) if part in groups), None)
    if group is None:
        what = "no run (its first line is # @package _global_), nor in the folder of a group"
        return [f"{file}: is {what} ({', '.join(groups)})"]
    return check_option(verb, group, file)


def _check_all(verb: str, line: Sequence[str], library: Library) -> dict[str, list[str]]:
    checked = {name: check_run(verb, [f"+conf={name}", *line]) for name in library.runs()}
    for group, option, file in _list_options(library):
        checked[f"{group}={option}"] = check_option(verb, group, file)
    return checked


def _list_options(library: Library) -> Iterator[tuple[str, str, Path]]:
    for group in library.groups():
        for option in library.options(group):
            file = library.files(f"{group}/{option}")[0]
            if not is_run(file):
                yield group, option, file
