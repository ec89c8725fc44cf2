"""Tiny corpora, worlds of processes and tolerances, for our tests and those of users."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

if TYPE_CHECKING:
    from nemo_like.testing.corpus import write_corpus
    from nemo_like.testing.numerics import TOLERANCE, assert_close
    from nemo_like.testing.world import WorldError, run_world

__all__ = ["TOLERANCE", "WorldError", "assert_close", "run_world", "write_corpus"]

__getattr__ = lazy_names(
    __name__,
    {
        "TOLERANCE": ".numerics",
        "WorldError": ".world",
        "assert_close": ".numerics",
        "run_world": ".world",
        "write_corpus": ".corpus",
    },
)
