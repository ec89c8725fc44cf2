"""Learning from preferences: of two answers to a prompt the better one becomes more likely than the worse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

from .config import DpoConfig, PreferenceDataModuleConfig

if TYPE_CHECKING:
    from .batch import PreferenceBatch as PreferenceBatch
    from .data import PreferenceDataModule as PreferenceDataModule
    from .dpo import Dpo as Dpo

__all__ = [
    "Dpo",
    "DpoConfig",
    "PreferenceBatch",
    "PreferenceDataModule",
    "PreferenceDataModuleConfig",
]

__getattr__ = lazy_names(
    __name__,
    {"Dpo": ".dpo", "PreferenceBatch": ".batch", "PreferenceDataModule": ".data"},
)
