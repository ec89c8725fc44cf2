"""Large language models: text in, text out."""

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

if TYPE_CHECKING:
    from .data import TextBatch, TextDataModule
    from .held_out_samples import HeldOutSamples

__all__ = ["HeldOutSamples", "TextBatch", "TextDataModule"]

__getattr__ = lazy_names(
    __name__,
    {
        "HeldOutSamples": ".held_out_samples",
        "TextBatch": ".data",
        "TextDataModule": ".data",
    },
)
