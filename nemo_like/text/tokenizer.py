"""Tokenizers: one class around Hugging Face ``tokenizers``, loaded from a folder or trained from
text."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nemo_like.core.errors import DataError

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
MIN_BPE_VOCAB = 257  # every byte, and the end of text
PLAIN_CONFIG = b"""{
  "tokenizer_class": "PreTrainedTokenizerFast",
  "clean_up_tokenization_spaces": false
}"""
# Files that need sentencepiece or a slow tokenizer class of transformers to be read.
SLOW_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
# A longer text is encoded in pieces, since an Encoding holds over a hundred bytes a token. The cut
# stands where no pre-tokenizer of a byte-level BPE joins the two sides (before a single space,
# behind a single line end), so the tokens are those of the whole text.
PIECE_CHARS = 1 << 18
CALL_CHARS = 1 << 20
_SAFE_CUT = re.compile(r"\S(?:\n(?=\S)|(?= \S))")


class Tokenizer:
    """Text to token ids and back.

    Encoding is for raw text: it adds no special tokens, neither cuts nor pads, and the name of a
    special token inside the text is text like any other, so a corpus cannot forge the end of a
    document.

    Args:
        files: ``tokenizer.json``, ``tokenizer_config.json`` and what else belongs to the tokenizer,
            by file name.
        bos_token: Begin of text; None where the tokenizer has none.
        eos_token: End of text.

    Raises:
        DataError: ``tokenizer.json`` cannot be read, or a named token is not in the vocabulary.
    """

    def __init__(
        self, files: Mapping[str, bytes], *, bos_token: str | None, eos_token: str
    ) -> None:
        config = json.loads(files.get("tokenizer_config.json", PLAIN_CONFIG))
        config |= {"bos_token": bos_token, "eos_token": eos_token}
        text = json.dumps(config, indent=2, ensure_ascii=False)
        self._files = dict(files) | {"tokenizer_config.json": text.encode()}
        self.backend = _read_backend(files["tokenizer.json"])
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        self.bos_token, self.eos_token = bos_token, eos_token
        self.bos_id = None if bos_token is None else self._find(bos_token, "bos_token")
        self.eos_id = self._find(eos_token, "eos_token")
        self.vocab_size = max(self.backend.get_vocab().values()) + 1
        """Highest id + 1: the rows an embedding needs, also where ids have gaps."""

    def _find(self, token: str, role: str) -> int:
        found = self.backend.token_to_id(token)
        if found is None:
            raise DataError(
                f"{role} {token!r} is not in the vocabulary; {_list_special(self.backend)}"
            )
        return int(found)

    @property
    def prefix_id(self) -> int:
        """What stands before every document: begin of text, else end of text."""
        return self.eos_id if self.bos_id is None else self.bos_id

    @property
    def content_hash(self) -> str:
        """SHA-256 over what decides about ids, in hexadecimal."""
        key = f"{self.bos_id} {self.eos_id}\n".encode() + self._files["tokenizer.json"]
        return hashlib.sha256(key).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of several texts, on all cores unless ``TOKENIZERS_PARALLELISM=false``."""
        parts: list[list[NDArray[np.int32]]] = [[] for _ in texts]
        for owners, pieces in _group(texts):
            for owner, encoding in zip(
                owners,
                self.backend.encode_batch_fast(pieces, add_special_tokens=False),
                strict=True,
            ):
                parts[owner].append(np.array(encoding.ids, dtype=np.int32))
        return [part[0] if len(part) == 1 else np.concatenate(part) for part in parts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def to_bytes(self) -> dict[str, bytes]:
        """The files of the tokenizer by name; :meth:`from_bytes` and ``AutoTokenizer`` (in a
        folder) read them."""
        return dict(self._files)

    @classmethod
    def from_bytes(
        cls,
        files: Mapping[str, bytes],
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> Tokenizer:
        """Reads the files of a Hugging Face folder.

        Begin and end of text come from the arguments, else from ``tokenizer_config.json``,
        ``special_tokens_map.json``, ``generation_config.json`` or ``config.json``.

        Raises:
            DataError: The files do not say which token ends a text.
        """
        named = {
            name: json.loads(files[name])
            for name in files
            if name.endswith(".json") and name != "tokenizer.json"
        }
        config = named.get("special_tokens_map.json", {}) | named.get("tokenizer_config.json", {})
        ids = named.get("config.json", {}) | named.get("generation_config.json", {})
        eos_token = eos_token or _read_name(config.get("eos_token"))
        bos_token = bos_token or _read_name(config.get("bos_token"))
        if eos_token is None or (bos_token is None and not config):
            backend = _read_backend(files["tokenizer.json"])
            eos_token = eos_token or _read_id(ids.get("eos_token_id"), backend)
            # Where it is, it decides that there is no BOS: Qwen's config.json names one in vain.
            if not config:
                bos_token = bos_token or _read_id(ids.get("bos_token_id"), backend)
            if eos_token is None:
                raise DataError(
                    f"the files {sorted(files)} do not say which token ends a text: give eos_token "
                    f"(in a configuration: tokenizer.eos_token=...); {_list_special(backend)}"
                )
        kept = {
            name: files[name] for name in ("tokenizer.json", "chat_template.jinja") if name in files
        }
        if config:
            kept["tokenizer_config.json"] = json.dumps(config).encode()
        return cls(kept, bos_token=bos_token, eos_token=eos_token)

    @classmethod
    def load(
        cls, path: str | Path, *, bos_token: str | None = None, eos_token: str | None = None
    ) -> Tokenizer:
        """Reads a ``tokenizer.json`` (with the files beside it) or a Hugging Face folder.

        Args:
            path: The file or the folder.
            bos_token: Begin of text, where the files do not say or say something else.
            eos_token: End of text, likewise.

        Raises:
            DataError: There is no ``tokenizer.json``, or the files do not say which token ends a
                text.
        """
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        main = folder / "tokenizer.json" if path.is_dir() else path
        if not main.is_file():
            slow = [name for name in SLOW_FILES if (folder / name).exists()]
            if slow:
                raise DataError(
                    f"holds only {', '.join(slow)}; needed is tokenizer.json. Write it with: "
                    f"python -c \"from transformers import AutoTokenizer as A; p = '{folder}'; "
                    'A.from_pretrained(p).save_pretrained(p)"',
                    file=folder,
                )
            raise DataError(
                "no such tokenizer: give a tokenizer.json or a folder that holds one", file=path
            )
        beside = (
            "tokenizer_config.json",
            "special_tokens_map.json",
            "generation_config.json",
            "config.json",
        )
        files = {
            name: (folder / name).read_bytes()
            for name in (*beside, "chat_template.jinja")
            if (folder / name).is_file()
        }
        try:
            return cls.from_bytes(
                files | {"tokenizer.json": main.read_bytes()},
                bos_token=bos_token,
                eos_token=eos_token,
            )
        except DataError as error:
            raise DataError(error.message, file=path) from error

    def save(self, folder: str | Path) -> None:
        """Writes a folder that :meth:`load` and transformers' ``AutoTokenizer`` open."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (folder / name).write_bytes(content)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer.from_bytes, (self._files,)


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE (Sennrich et al. 2016; Radford et al. 2019): any text survives a
    round trip.

    The same texts give the same tokenizer, byte for byte.

    Args:
        texts: Read once, streaming.
        vocab_size: Tokens including the 256 bytes and the one special token; little text gives
            fewer.

    Raises:
        ValueError: ``vocab_size`` is below 257.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_BPE_VOCAB:
        raise ValueError(
            f"vocab_size={vocab_size}: a byte-level BPE has at least {MIN_BPE_VOCAB} tokens"
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(iter(texts), trainer)
    tokenizer = Tokenizer(
        {"tokenizer.json": backend.to_str().encode()}, bos_token=None, eos_token=END_OF_TEXT
    )
    if tokenizer.vocab_size < vocab_size:
        logger.info("the text gave %d tokens of the %d asked for", tokenizer.vocab_size, vocab_size)
    return tokenizer


def _read_backend(content: bytes) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_buffer(content)
    except ValueError as error:
        raise DataError(f"no readable tokenizer: {error}", file="tokenizer.json") from error


def _split(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > 2 * PIECE_CHARS:
        match = _SAFE_CUT.search(text, start + PIECE_CHARS, start + 2 * PIECE_CHARS)
        cut = match.end() if match else start + 2 * PIECE_CHARS
        yield text[start:cut]
        start = cut
    yield text[start:]


def _group(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Pieces of texts, with the number of the text each belongs to, in groups that bound the memory
    of a call."""
    owners: list[int] = []
    pieces: list[str] = []
    num_chars = 0
    for owner, text in enumerate(texts):
        for piece in _split(text):
            owners.append(owner)
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars >= CALL_CHARS:
                yield owners, pieces
                owners, pieces, num_chars = [], [], 0
    if pieces:
        yield owners, pieces


def _read_name(entry: Any) -> str | None:
    """A token as ``tokenizer_config.json`` names it: a string, or an object with its content."""
    name: str | None = entry["content"] if isinstance(entry, dict) else entry
    return name


def _read_id(entry: Any, backend: tokenizers.Tokenizer) -> str | None:
    """The token of an id in ``generation_config.json``; of a list the first."""
    if isinstance(entry, list):
        entry = entry[0] if entry else None
    return None if entry is None else backend.id_to_token(entry)


def _list_special(backend: tokenizers.Tokenizer) -> str:
    special = [
        token.content
        for _, token in sorted(backend.get_added_tokens_decoder().items())
        if token.special
    ]
    return f"its special tokens are: {', '.join(special[:20]) or 'none'}"
