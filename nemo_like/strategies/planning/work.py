"""The work of one optimizer step, as far as memory and time depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol


class DecoderShape(Protocol):
    """A decoder's numbers; the configuration of the language model's network has them under these names."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def num_layers(self) -> int:
        """Blocks."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        ...

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Inner width of the feed-forward blocks."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """Whether the embedding is the output matrix, too."""
        ...

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised."""
        ...

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a token sees at most."""
        ...

    @property
    def dropout(self) -> float:
        """Probability of dropping a channel of what a block adds."""
        ...

    @property
    def attention_dropout(self) -> float:
        """Probability of dropping an attention weight."""
        ...

    def count_parameters(self) -> int:
        """Numbers that are trained."""
        ...


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained and how much of it in a step; nothing about how it is spread."""

    shape: DecoderShape
    """The network."""
    seq_len: int
    """Tokens of a sample."""
    global_batch_size: int
    """Samples of an optimizer step."""
    precision: Literal["fp32", "bf16-mixed", "fp16-mixed", "fp8-mixed"] = "fp32"
    """Of the forward and backward pass."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Which states it keeps."""
    keeps_average: bool = False
    """Whether it keeps a moving average of the weights as well."""
    platform: Literal["cpu", "gpu"] = "gpu"
    """Kernels differ in what they keep: the CPU has no fused normalisation."""
    packed: bool = True
    """Whether a sample may hold several documents, which takes an attention mask."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number that a matrix product keeps; in FP8 it multiplies copies of 16-bit numbers."""
        return 4 if self.precision == "fp32" else 2

    @property
    def has_mask(self) -> bool:
        """Whether attention is given a mask."""
        window = self.shape.sliding_window
        return self.packed or (window is not None and window < self.seq_len)


def read_work(config: Any, *, platform: Literal["cpu", "gpu"]) -> Work | None:
    """The work that a run describes.

    Args:
        config: A checked ``RunConfig``.
        platform: What it will run on.

    Returns:
        None where it cannot be told: another kind of model, or a shape that is read from a folder.
    """
    shape = config.model.get("network")
    seq_len, global_batch_size = (
        config.data.get("seq_len"),
        config.data.get("global_batch_size"),
    )
    if not (hasattr(shape, "count_parameters") and hasattr(shape, "intermediate_size")):
        return None
    if not (isinstance(seq_len, int) and isinstance(global_batch_size, int)):
        return None
    return Work(
        shape=shape,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        precision=config.trainer.precision,
        optimizer="muon" if is_muon(config.optim) else "adamw",
        keeps_average=config.optim.get("ema_decay") is not None,
        platform=platform,
    )


def is_muon(optim: Mapping[str, Any]) -> bool:
    """Whether an optimizer component is our Muon, which keeps one state of a hidden matrix and takes it whole."""
    return str(optim.get("_target_", "")).rpartition(".")[2] == "Muon"
