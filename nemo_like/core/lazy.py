"""Public names of a package that import their module only when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Gives a module-level ``__getattr__`` (PEP 562) for a package.

    A configuration names ``nemo_like.collections.llm.decoder.DecoderModel``; checking it must not
    import torch, and ``from nemo_like.collections.llm.decoder import DecoderModel`` must work.

    Args:
        package: ``__name__`` of the package.
        modules: Public name -> module it lives in, relative to the package (``".model"``).
    """

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name], package), name)

    return __getattr__
