"""Samples to token ids and the mask of what is learnt."""

# Shapes: T = tokens of a sample.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_like.text.tokenizer import Tokenizer

from .chat import ChatTemplate
from .config import FinetuneDataModuleConfig
from .samples import BadSampleError, ChatSample, PreferenceSample, TextSample
from .template import choose_template
from .tokenizer import open_tokenizer


@dataclass(frozen=True)
class Encoded:
    """One sample."""

    ids_T: NDArray[np.int32]
    """Token ids, with whatever begins and ends a text."""
    is_learnt_T: NDArray[np.bool_]
    """Whether each token is a target, when the model has read those before it."""

    @property
    def num_targets(self) -> int:
        """Tokens that are learnt; the first has nothing before it to be predicted from."""
        return int(self.is_learnt_T[1:].sum())


class SampleEncoder:
    """Encodes samples of every kind.

    Args:
        tokenizer: Of the model.
        chat: Its chat template.
    """

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate) -> None:
        self.tokenizer, self.chat = tokenizer, chat

    def encode(self, sample: ChatSample | TextSample) -> Encoded:
        """A chat by its template; a text as in pre-training, between begin and end of text.

        Raises:
            BadSampleError: The template cannot be used on it, or nothing of it would be learnt.
        """
        if isinstance(sample, TextSample):
            inside = self.tokenizer.encode(sample.text)
            ids = np.array([self.tokenizer.prefix_id, *inside, self.tokenizer.eos_id], np.int32)
            return Encoded(ids, np.arange(len(ids)) > 0)
        ids, is_learnt = self.chat.encode(sample.messages, sample.tools)
        return _require_targets(Encoded(ids, is_learnt))

    def encode_preference(self, sample: PreferenceSample) -> tuple[Encoded, Encoded]:
        """The conversation with the better answer, and with the worse; only the answers are learnt.

        Raises:
            BadSampleError: As :meth:`encode`.
        """
        first = len(sample.prompt)
        return (
            self._continue(sample, sample.chosen, first),
            self._continue(sample, sample.rejected, first),
        )

    def _continue(
        self, sample: PreferenceSample, answer: list[dict[str, object]], first: int
    ) -> Encoded:
        ids, is_learnt = self.chat.encode([*sample.prompt, *answer], sample.tools, first=first)
        return _require_targets(Encoded(ids, is_learnt))


def _require_targets(encoded: Encoded) -> Encoded:
    if not encoded.num_targets:
        raise BadSampleError("no token of it would be learnt")
    return encoded


def build_encoder(
    config: FinetuneDataModuleConfig, tokenizer: Tokenizer | None = None
) -> tuple[SampleEncoder, str]:
    """The encoder of a configuration, and what decides about the texts of its template.

    Args:
        config: Names tokenizer and template.
        tokenizer: Another tokenizer than that of the configuration.

    Raises:
        ConfigError: The chat template cannot be used.
        DataError: There is no such tokenizer.
    """
    if tokenizer is None:
        spec = config.tokenizer
        assert spec.path is not None, "checked by the configuration"
        tokenizer = open_tokenizer(spec.path, bos_token=spec.bos_token, eos_token=spec.eos_token)
    template, name, key = choose_template(tokenizer, config.chat_template)
    return SampleEncoder(tokenizer, ChatTemplate(tokenizer, template, name=name)), key
