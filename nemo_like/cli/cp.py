"""``nemo-like cp``: a run file of one's own, to change."""

from __future__ import annotations

import shlex
from pathlib import Path

from nemo_like.cli.parser import add_config_dir, make_parser
from nemo_like.core.errors import ConfigError, suggest
from nemo_like.core.library import open_library

_DEST = """\
a folder, which gets conf/<run>.yaml (default: the current one), or a file
<folder>/conf/<domain>/<name>.yaml"""


def main(arguments: list[str]) -> int:
    """Copies a run file and says how to start it."""
    parser = make_parser("cp", "Copies a run file into a folder of yours, where you can change it.")
    parser.add_argument("run", help="for example llm/quickstart")
    parser.add_argument("dest", nargs="?", default=".", help=_DEST)
    add_config_dir(parser)
    options = parser.parse_args(arguments)
    library, faults = open_library([], options.config_dir)
    runs = library.runs()
    name = options.run.removeprefix("+conf=")
    if name not in runs:
        listed = f"{suggest(name, runs)}; there are: {', '.join(runs)}"
        faults.append(f"nemo-like cp: no run {name!r}{listed}")
    if faults:
        raise ConfigError(faults)
    dest = Path(options.dest)
    folder, new_name = split_run_file(dest) if dest.suffix == ".yaml" else (dest, name)
    file = folder / "conf" / f"{new_name}.yaml"
    if file.exists():
        remedy = f"nemo-like cp {name} {file.with_name(f'my_{file.name}')}"
        raise ConfigError([f"nemo-like cp: {file} exists already; name another file: {remedy}"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(library.files(f"conf/{name}")[0].read_bytes())
    arguments_of_run = f"--config-dir {shlex.quote(str(folder))} +conf={new_name}"
    print(f"wrote {file}\nstart it: nemo-like run pretrain {arguments_of_run}")
    return 0


def split_run_file(path: Path) -> tuple[Path, str]:
    """Takes ``<folder>/conf/<domain>/<run>.yaml`` apart into the folder and the name of the run.

    Raises:
        ConfigError: It is no YAML file in a folder ``conf``.
    """
    parts = path.with_suffix("").parts
    if path.suffix != ".yaml" or "conf" not in parts[:-1]:
        place = "<folder>/conf/<domain>/<run>.yaml"
        raise ConfigError([f"{path}: a run is a file {place}; put it into a folder called conf"])
    at = len(parts) - 1 - parts[::-1].index("conf")
    return Path(*parts[:at]), "/".join(parts[at + 1 :])
