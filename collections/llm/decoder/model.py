"""The decoder as a model to train: next-token loss, held-out bits per byte, a sample at the end."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from nemo_like.core.checkpoint import find_checkpoints, open_checkpoint
from nemo_like.core.errors import CheckpointError, ConfigError
from nemo_like.core.model import Model
from nemo_like.core.summary import Section
from nemo_like.core.units import format_count
from nemo_like.text.tokenizer import Tokenizer

from ..data import IGNORE_INDEX, TextBatch, TextDataModule
from ..decoding import generate
from ..evaluation import evaluate_bits_per_byte
from ..hf_folder import load_hf_folder
from ..losses import chunked_cross_entropy_sum
from .config import DecoderConfig, RopeScalingConfig
from .network import DecoderNetwork

logger = logging.getLogger(__name__)

_SHAPE_FILE = "network.json"
_LARGEST_SUMMARY_BYTES = 8 * 2**30
"""A model that is spread over ranks is put together for its summary only up to this size."""
_AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class DecoderModel(Model):
    """A decoder-only language model.

    Args:
        network: Shape of the network; None takes that of ``init_from``.
        init_from: Hugging Face folder, checkpoint or run folder whose weights training starts from; None draws them.
        sample_prompt: What the sample at the end of a run continues; empty starts at the beginning of a document.
        sample_tokens: Length of that sample; 0 leaves it out.

    Raises:
        ConfigError: Neither a shape nor a folder to take it from.
        CheckpointError: ``init_from`` is no such folder, or does not fit the shape.

    Attributes:
        tokenizer: Set by the data module when a run starts, or by :meth:`load`.
    """

    unit = "tokens"
    can_start_empty = True

    def __init__(
        self,
        *,
        network: DecoderConfig | None = None,
        init_from: str | None = None,
        sample_prompt: str = "",
        sample_tokens: int = 0,
    ) -> None:
        super().__init__()
        loaded = None if init_from is None else open_source(Path(init_from))
        shape = network or (loaded.shape if loaded else None)
        if shape is None:
            raise ConfigError(
                ["network: is required: the shape of the network, or init_from=FOLDER"]
            )
        self.shape = shape
        self.network = DecoderNetwork(shape)
        self.init_from = init_from
        if loaded is not None and not self._is_empty:
            self._fill(self.network, loaded)
        self.tokenizer: Tokenizer | None = None
        self.sample_prompt, self.sample_tokens = sample_prompt, sample_tokens

    @property
    def _is_empty(self) -> bool:
        return self.network.embedding.weight.is_meta

    def _fill(self, network: DecoderNetwork, loaded: DecoderSource) -> None:
        try:
            loaded.fill(network)
        except RuntimeError as error:
            raise CheckpointError(
                f"init_from={self.init_from}: does not fit network: {error}"
            ) from error

    def draw_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that training starts from: drawn, or those of ``init_from``."""
        if self.init_from is None:
            yield from super().draw_weights()
            return
        network = DecoderNetwork(self.shape)
        self._fill(network, open_source(Path(self.init_from)))
        for name, tensor in network.state_dict().items():
            yield f"network.{name}", tensor

    def count_targets(self, micro_batch: TextBatch) -> Tensor:
        """Positions that have a target token."""
        return (micro_batch.targets_BT != IGNORE_INDEX).sum()

    def count_units(self, micro_batch: TextBatch) -> int:
        """Tokens read, padding included."""
        return micro_batch.tokens_BT.numel()

    def compute_loss_sum(self, micro_batch: TextBatch) -> Tensor:
        """Sum of the negative log-likelihoods of the target tokens, in nats."""
        hidden_BTD = self.network.compute_hidden(
            micro_batch.tokens_BT, segments_BT=micro_batch.segments_BT
        )
        return chunked_cross_entropy_sum(
            hidden_BTD, self.network.output_weight_VD, micro_batch.targets_BT
        )

    def setup(self, stage: str) -> None:
        """Takes the tokenizer of the data and compares vocabularies before the first step.

        Raises:
            ConfigError: The tokenizer has more tokens than the network.
        """
        datamodule = getattr(self.trainer, "datamodule", None)
        if isinstance(datamodule, TextDataModule):
            self.tokenizer = datamodule.tokenizer
            if self.tokenizer.vocab_size > self.shape.vocab_size:
                raise ConfigError(
                    [
                        f"model.network.vocab_size={self.shape.vocab_size}: the tokenizer has "
                        f"{self.tokenizer.vocab_size} tokens; set at least that many"
                    ]
                )
        count = sum(parameter.numel() for parameter in self.parameters())
        plugin = self.trainer.precision_plugin
        kernel = self.network.describe_attention(
            device=self.trainer.strategy.root_device,
            dtype=_AUTOCAST_DTYPES.get(getattr(plugin, "precision", "")),
        )
        logger.info("model: %s parameters, %s", format_count(count), kernel)

    def summarize(self) -> list[Section]:
        """Bits per byte on the held-out documents, and a sample."""
        datamodule = getattr(self.trainer, "datamodule", None)
        sections = []
        network = self._take_whole_network()
        if network is None:
            return []
        if isinstance(datamodule, TextDataModule):
            assert self.tokenizer is not None
            result = evaluate_bits_per_byte(
                network,
                self.tokenizer,
                datamodule.held_out_documents(),
                context=datamodule.seq_len,
                mixture=datamodule.mixture_shares,
                rank=self.trainer.global_rank,
                world_size=self.trainer.world_size,
            )
            sections.append(result.to_section())
        if self.sample_tokens and self.tokenizer is not None:
            text = generate(
                network,
                self.tokenizer,
                self.sample_prompt,
                max_tokens=self.sample_tokens,
                temperature=0.8,
                top_p=0.95,
                seed=self.seed or 0,
            )
            sections.append(Section(title="A sample", text=self.sample_prompt + text))
        return sections

    def _take_whole_network(self) -> DecoderNetwork | None:
        """The trained network in one piece on this rank; None where it is too large for that."""
        strategy: Any = self.trainer.strategy
        if not strategy.spreads_weights:
            return self.network
        if self.shape.count_parameters() * 4 > _LARGEST_SUMMARY_BYTES:
            logger.info(
                "no summary of a model of this size at the end of a run: "
                "python examples/llm/evaluate.py takes its checkpoint"
            )
            return None
        weights = strategy.gather_weights()
        network = DecoderNetwork(self.shape)
        prefix = "network."
        network.load_state_dict({name.removeprefix(prefix): it for name, it in weights.items()})
        return network.to(strategy.root_device)

    def build_megatron(self, context: Any) -> Any:
        """The part of the network that lies on this rank, as Megatron-Core computes it; the strategy asks for it."""
        from .megatron import MegatronDecoder

        return MegatronDecoder(self.shape, context)

    def artefacts(self) -> dict[str, bytes]:
        """The shape of the network, so that a checkpoint opens without the configuration of its run."""
        return {_SHAPE_FILE: json.dumps(dataclasses.asdict(self.shape), indent=1).encode()}

    @classmethod
    def load(cls, folder: Path | str, **options: Any) -> Self:
        """Opens a checkpoint folder of ours, or a Hugging Face folder, for use on the CPU.

        Args:
            folder: ``.../checkpoints/step_00000100``, a run folder (its newest checkpoint), or a folder with a
                ``config.json``.
            options: Further constructor arguments.

        Raises:
            CheckpointError: It is neither, or its names or shapes do not fit.
        """
        loaded = open_source(Path(folder))
        model = cls(network=loaded.shape, **options)
        loaded.fill(model.network)
        model.tokenizer = loaded.tokenizer
        return model.eval()


@dataclasses.dataclass
class DecoderSource:
    """What a folder holds: shape, tokenizer, and ways to its weights."""

    shape: DecoderConfig
    tokenizer: Tokenizer | None
    fill: Callable[[DecoderNetwork], Any]
    """Fills a network of this shape in place."""
    read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    """Reads some of the weights, by the names of the network, so that a large model need not be in memory at once."""


def open_source(folder: Path) -> DecoderSource:
    """Opens a Hugging Face folder, a checkpoint of ours, or the newest one of a run folder.

    Raises:
        CheckpointError: It is none of them.
    """
    if (folder / "config.json").is_file():
        shape, state = load_hf_folder(folder)
        tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
        return DecoderSource(
            shape,
            tokenizer,
            fill=lambda network: network.load_state_dict(state),
            read=lambda names: {name: state[name] for name in names},
        )
    if (folder / "checkpoints").is_dir():
        saved = find_checkpoints(folder / "checkpoints")
        if not saved:
            raise CheckpointError(f"{folder}: has no whole checkpoint yet")
        folder = saved[-1]
    checkpoint = open_checkpoint(folder)
    values = json.loads(checkpoint.read_file(_SHAPE_FILE))
    if values.get("rope_scaling") is not None:
        values["rope_scaling"] = RopeScalingConfig(**values["rope_scaling"])

    def fill(network: DecoderNetwork) -> None:
        state = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
        checkpoint.load_tensors("model", state)

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        tensors = checkpoint.read_tensors("model", [f"network.{name}" for name in names])
        return {name.removeprefix("network."): tensor for name, tensor in tensors.items()}

    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    return DecoderSource(DecoderConfig(**values), tokenizer, fill, read)
