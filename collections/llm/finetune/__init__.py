"""Fine-tuning: chats, instruction pairs, texts and preferences become batches with a loss mask."""

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

if TYPE_CHECKING:
    from .chat import ChatTemplate, open_chat_template
    from .data import FinetuneDataModule
    from .encode import Encoded, SampleEncoder
    from .samples import ChatSample, PreferenceSample, TextSample, read_sample
    from .tokenizer import open_tokenizer

__all__ = [
    "ChatSample",
    "ChatTemplate",
    "Encoded",
    "FinetuneDataModule",
    "PreferenceSample",
    "SampleEncoder",
    "TextSample",
    "open_chat_template",
    "open_tokenizer",
    "read_sample",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ChatSample": ".samples",
        "ChatTemplate": ".chat",
        "Encoded": ".encode",
        "FinetuneDataModule": ".data",
        "PreferenceSample": ".samples",
        "SampleEncoder": ".encode",
        "TextSample": ".samples",
        "open_chat_template": ".chat",
        "open_tokenizer": ".tokenizer",
        "read_sample": ".samples",
    },
)
