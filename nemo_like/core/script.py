"""The frame of a script that is no run: its log, and errors as lines with an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from nemo_like.core.console import setup_logging
from nemo_like.core.errors import ConfigError, NemoLikeError


def run_script(work: Callable[[Sequence[str]], object]) -> None:
    """Does the work of a script; ends the process with 1 if it failed, 2 at a mistake in what was asked, 130 at Ctrl-C.

    Args:
        work: Is given the words of the command line, without the name of the script.
    """
    setup_logging()
    try:
        work(sys.argv[1:])
    except ConfigError as error:
        sys.stderr.writelines(f"error: {fault}\n" for fault in error.faults)
        sys.exit(2)
    except NemoLikeError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        sys.exit(130)
