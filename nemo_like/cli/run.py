"""``nemo-like run``: the same as the scripts in ``examples``, from anywhere."""

from __future__ import annotations

from nemo_like.core.errors import ConfigError, suggest
from nemo_like.core.library import Library

_HELP = """\
usage: nemo-like run <verb> +conf=<domain>/<run> [<group>=<option>] [<key>=<value>] [~<key>]
                     [--config-dir DIR]

verbs: {verbs}; llm/pretrain means the same as pretrain
runs, groups, options: nemo-like ls
DIR is a folder with runs of yours: DIR/conf/<domain>/<run>.yaml

example: nemo-like run pretrain +conf=llm/quickstart trainer.max_steps=100 seed=3"""


def main(arguments: list[str]) -> int:
    """Starts a run; the domain of ``llm/pretrain`` is for the reader, the run file decides."""
    verbs = Library().primaries()
    listed = ", ".join(verbs)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP.format(verbs=listed))
        return 0 if arguments else 2
    verb = arguments[0].rpartition("/")[2].removesuffix(".py")
    if verb not in verbs:
        raise ConfigError(
            [f"nemo-like run: no verb {arguments[0]!r}{suggest(verb, verbs)}; there are: {listed}"]
        )
    from nemo_like.core import run

    run.main(verb, arguments[1:])
    return 0
