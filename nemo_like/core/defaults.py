"""Hydra's rules for defaults lists, over files that are read here and read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nemo_like.core.layers import Tree
from nemo_like.core.library import Library

Load = Callable[[str], Tree | None]
"""The content of a file by its name; None if it cannot be read."""


def order_files(
    config_name: str, lines: Sequence[str], library: Library, load: Load
) -> list[tuple[str, str]]:
    """Name and package of each file to merge, lowest first.

    Args:
        config_name: The primary config.
        lines: Overrides that choose files, as Hydra writes them.
        library: Where files are looked for.
        load: Reads a file.

    Raises:
        ValueError: Hydra's rules do not allow the choices, or its grammar not the overrides.
    """
    from hydra import version
    from hydra._internal.defaults_list import create_defaults_list
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    version.setbase("1.3")
    try:
        found = create_defaults_list(
            repo=_make_repository(library, load),
            config_name=config_name,
            overrides_list=OverridesParser.create().parse_overrides(list(lines)),
            prepend_hydra=False,
            skip_missing=False,
        )
    except HydraException as error:
        raise ValueError(str(error)) from error
    return [(it.config_path, it.package or "") for it in found.defaults if it.config_path]


def _make_repository(library: Library, load: Load) -> Any:
    """What Hydra's algorithm asks for files.

    Hydra's own would parse each of them again in every composition, and with them those of its own groups, which
    cannot be chosen here.
    """
    from hydra._internal.config_repository import ConfigRepository
    from hydra.plugins.config_source import ConfigResult, ConfigSource
    from omegaconf import OmegaConf

    class Files(ConfigRepository):
        """The files of a library; of their content only the header and the defaults list."""

        def __init__(self) -> None:
            self.sources = []
            self._results: dict[str, ConfigResult | None] = {}

        def load_config(self, config_path: str) -> ConfigResult | None:
            if config_path not in self._results:
                self._results[config_path] = self._read(config_path)
            return self._results[config_path]

        def _read(self, name: str) -> ConfigResult | None:
            files = library.files(name)
            if not files:
                return None
            tree = load(name) or Tree()
            defaults = tree.values.get("defaults", [])
            config = OmegaConf.create({"defaults": defaults})
            header = ConfigSource._get_header_dict(files[0].read_text("utf-8", "replace")[:512])
            listed = self._create_defaults_list(name, self._extract_defaults_list(name, config))
            return ConfigResult("nemo_like", str(files[0]), config, header, listed)

        def config_exists(self, config_path: str) -> bool:
            return bool(library.files(config_path))

        def group_exists(self, config_path: str) -> bool:
            return library.is_group(config_path)

        def get_group_options(self, group_name: str, results_filter: object = None) -> list[str]:
            folders = [root / group_name for root in library.roots]
            return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})

    return Files()
