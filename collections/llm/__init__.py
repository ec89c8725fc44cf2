"""Large language models: text in, text out."""

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

if TYPE_CHECKING:
    from .data import TextBatch, TextDataModule

__all__ = ["TextBatch", "TextDataModule"]

__getattr__ = lazy_names(__name__, {"TextBatch": ".data", "TextDataModule": ".data"})
