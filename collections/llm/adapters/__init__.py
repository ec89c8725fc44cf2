"""Adapters: a small trained part beside a frozen language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

from .config import LoraConfig

if TYPE_CHECKING:
    from .folder import Adapter as Adapter
    from .folder import open_adapter as open_adapter
    from .lora import Lora as Lora
    from .peft_folder import save_peft_folder as save_peft_folder

__all__ = ["Adapter", "Lora", "LoraConfig", "open_adapter", "save_peft_folder"]

__getattr__ = lazy_names(
    __name__,
    {
        "Adapter": ".folder",
        "open_adapter": ".folder",
        "Lora": ".lora",
        "save_peft_folder": ".peft_folder",
    },
)
