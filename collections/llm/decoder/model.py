"""The decoder as a model to train: next-token loss, held-out bits per byte, a sample at the end."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from nemo_like.core.errors import CheckpointError, ConfigError
from nemo_like.core.model import Model
from nemo_like.core.seed import derive_seed, seed_all
from nemo_like.core.summary import Section
from nemo_like.core.units import format_count
from nemo_like.text.tokenizer import Tokenizer

from ..adapters.base_model import ADAPTER_FILE, BaseModel
from ..adapters.folder import describe_adapter, open_adapter
from ..adapters.lora import Lora, is_adapter
from ..adapters.noise import EmbeddingNoise
from ..data import IGNORE_INDEX, TextBatch, TextDataModule
from ..evaluation import evaluate_bits_per_byte
from ..generation.config import GenerationConfig
from ..generation.generate import Prompt, generate
from ..generation.request import GenerationResult
from ..generation.speculative import Draft
from ..loading import TokenDataModule
from ..losses import chunked_cross_entropy_sum
from .config import DecoderConfig
from .network import DecoderNetwork
from .source import SHAPE_FILE
from .source import DecoderSource as DecoderSource
from .source import open_source as open_source

logger = logging.getLogger(__name__)

_ADAPTER = "adapter"
"""Key of a checkpoint's state under which adapter and base are noted."""
_LARGEST_SUMMARY_BYTES = 8 * 2**30
"""A model that is spread over ranks is put together for its summary only up to this size."""
_AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Objective(Protocol):
    """What is learnt, where it is not the next token."""

    def start(self, model: DecoderModel) -> None:
        """Compares itself with a model that has a trainer, and makes ready; every rank calls it before the run."""
        ...

    def count_targets(self, batch: Any) -> Tensor:
        """How many targets :meth:`compute_loss_sum` sums over, from the batch alone; int64."""
        ...

    def compute_loss_sum(self, model: DecoderModel, batch: Any) -> Tensor:
        """The sum of the loss over the targets; a scalar with gradient."""
        ...


class DecoderModel(Model):
    """A decoder-only language model.

    Args:
        network: Shape of the network; None takes that of ``init_from``.
        adapter: What is trained beside the weights of ``init_from``, which stay as they are; None trains all of them.
        objective: What is learnt instead of the next token; None is the next token.
        neftune_alpha: Width of the noise that is added to the embeddings in training; None adds none.
        init_from: Hugging Face folder, checkpoint or run folder whose weights training starts from; None draws them.
        sample_prompt: What the sample at the end of a run continues; empty starts at the beginning of a document.
        sample_tokens: Length of that sample; 0 leaves it out.

    Raises:
        ConfigError: Neither a shape nor a folder to take it from, or an objective that does not fit.
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
        adapter: Lora | None = None,
        objective: Objective | None = None,
        neftune_alpha: float | None = None,
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
        self.shape, self.init_from, self.adapter = shape, init_from, adapter
        self.objective = objective
        self.base: BaseModel | None = None
        if adapter is not None:
            self.network = self._build_adapted(adapter, loaded)
        else:
            self.network = DecoderNetwork(shape)
            if loaded is not None and not self._is_empty:
                self._fill(self.network, loaded)
        if neftune_alpha is not None:
            self.network.embedding.register_forward_hook(EmbeddingNoise(neftune_alpha))
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

    def _build_adapted(self, adapter: Lora, loaded: DecoderSource | None) -> DecoderNetwork:
        if loaded is None:
            raise ConfigError(["init_from: is required with an adapter: the folder of its base"])
        if loaded.shape != self.shape:
            raise ConfigError(
                [
                    "network: is not the shape of init_from; leave it out, an adapter takes its base's"
                ]
            )
        self.base = loaded.identify()
        network = adapter.build(self.shape)
        if torch.get_default_device().type != "meta":
            adapter.fill(network, loaded.read, start=self._read_start(adapter))
        return network

    def _read_start(self, adapter: Lora) -> dict[str, Tensor] | None:
        """The parameters of the adapter that training starts from, where it starts from one."""
        if adapter.init_from is None:
            return None
        assert self.base is not None, "set before"
        start = open_adapter(adapter.init_from, self.shape)
        start.base.refuse_other(self.base, source=adapter.init_from)
        # How the base was stored is no matter of the adapter, and peft does not say it.
        start.lora.quantize = adapter.quantize
        adapter.refuse_other(start.lora, self.shape, source=adapter.init_from)
        return start.tensors

    def draw_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that training starts from: drawn, or those of ``init_from``."""
        if self.init_from is None:
            yield from super().draw_weights()
            return
        if self.adapter is not None:
            seed_all(derive_seed(self.seed or 0, 0))  # as when the model is made with weights
            read = open_source(Path(self.init_from)).read
            start = self._read_start(self.adapter)
            made = self.adapter.make_weights(self.adapter.build(self.shape), read, start=start)
            yield from ((f"network.{name}", tensor) for name, tensor in made)
            return
        network = DecoderNetwork(self.shape)
        self._fill(network, open_source(Path(self.init_from)))
        for name, tensor in network.state_dict().items():
            yield f"network.{name}", tensor

    def count_targets(self, micro_batch: TextBatch) -> Tensor:
        """Positions that have a target token, or what the objective counts."""
        if self.objective is not None:
            return self.objective.count_targets(micro_batch)
        return (micro_batch.targets_BT != IGNORE_INDEX).sum()

    def count_units(self, micro_batch: TextBatch) -> int:
        """Tokens read, padding included."""
        return micro_batch.tokens_BT.numel()

    def compute_loss_sum(self, micro_batch: TextBatch) -> Tensor:
        """Sum of the negative log-likelihoods of the target tokens, in nats, or the objective's."""
        if self.objective is not None:
            return self.objective.compute_loss_sum(self, micro_batch)
        hidden_BTD = self.network.compute_hidden(
            micro_batch.tokens_BT, segments_BT=micro_batch.segments_BT
        )
        return chunked_cross_entropy_sum(
            hidden_BTD, self.network.output_weight_VD, micro_batch.targets_BT
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig | None = None,
        *,
        seeds: Sequence[int] | None = None,
        draft: Draft | None = None,
    ) -> list[GenerationResult]:
        """Continues prompts; see :func:`nemo_like.collections.llm.generation.generate.generate`.

        Args:
            prompts: Texts or token ids.
            config: None is the default.
            seeds: One a prompt; None counts up from ``config.seed``.
            draft: Guesses tokens for speculative decoding.

        Raises:
            ConfigError: There is no tokenizer, the configuration has faults, or a prompt does not fit.
        """
        if self.tokenizer is None:
            raise ConfigError(["tokenizer=None: texts need one; set model.tokenizer"])
        return generate(self.network, self.tokenizer, prompts, config, seeds=seeds, draft=draft)

    def setup(self, stage: str) -> None:
        """Takes the tokenizer of the data and compares vocabularies before the first step.

        Raises:
            ConfigError: The tokenizer has more tokens than the network.
        """
        datamodule = getattr(self.trainer, "datamodule", None)
        if isinstance(datamodule, TokenDataModule):
            self.tokenizer = datamodule.tokenizer
            if self.tokenizer.vocab_size > self.shape.vocab_size:
                raise ConfigError(
                    [
                        f"model.network.vocab_size={self.shape.vocab_size}: the tokenizer has "
                        f"{self.tokenizer.vocab_size} tokens; set at least that many"
                    ]
                )
        if self.objective is not None:
            self.objective.start(self)
        count = self.shape.count_parameters()
        if self.adapter is not None:
            trained = sum(it.numel() for it in self.parameters() if it.requires_grad)
            logger.info("adapter: %s parameters are trained", format_count(trained))
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
        network = self.take_whole_network()
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
            config = GenerationConfig(
                max_tokens=self.sample_tokens,
                temperature=0.8,
                top_p=0.95,
                seed=self.seed or 0,
                eviction_policy="sliding_window",
            )
            (sample,) = generate(network, self.tokenizer, [self.sample_prompt], config)
            sections.append(Section(title="A sample", text=self.sample_prompt + sample.text))
        return sections

    def take_whole_network(self) -> DecoderNetwork | None:
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
        prefix = "network."
        with torch.device("meta"):
            network = (
                DecoderNetwork(self.shape)
                if self.adapter is None
                else self.adapter.build(self.shape)
            )
        state = {name.removeprefix(prefix): it for name, it in weights.items()}
        network.load_state_dict(state, assign=True)
        return network.to(strategy.root_device)

    def build_megatron(self, context: Any) -> Any:
        """The part of the network that lies on this rank, as Megatron-Core computes it; the strategy asks for it."""
        from .megatron import MegatronDecoder

        if self.adapter is not None:
            raise ConfigError(
                ["adapter: Megatron splits matrices that adapters know whole; take FSDPStrategy"]
            )

        return MegatronDecoder(self.shape, context)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """All weights; with an adapter those of the adapter alone."""
        state = super().checkpoint_tensors()
        if self.adapter is None:
            return state
        return {name: tensor for name, tensor in state.items() if is_adapter(name)}

    def artefacts(self) -> dict[str, bytes]:
        """What opens a checkpoint without the configuration of its run: the network's shape, or adapter and base."""
        if self.adapter is None:
            return {SHAPE_FILE: json.dumps(dataclasses.asdict(self.shape), indent=1).encode()}
        assert self.base is not None, "set with the adapter"
        return {ADAPTER_FILE: describe_adapter(self.adapter, self.base)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds which adapter it is and what base it stands on."""
        super().on_save_checkpoint(checkpoint)
        if self.adapter is not None and self.base is not None:
            checkpoint[_ADAPTER] = {
                "lora": self.adapter.describe(),
                "base": dataclasses.asdict(self.base),
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compares adapter and base with those that the run had.

        Raises:
            CheckpointError: There is an adapter on one side only, or another one, or another base.
        """
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get(_ADAPTER)
        if (saved is None) != (self.adapter is None):
            was, now = ("an adapter", "none") if saved is not None else ("no adapter", "one")
            raise CheckpointError(
                f"the checkpoint is of a run with {was}, the model has {now}: model.adapter must stay as it was"
            )
        if saved is None or self.adapter is None or self.base is None:
            return
        self.adapter.refuse_other(Lora(**saved["lora"]), self.shape, source="the checkpoint")
        BaseModel(**saved["base"]).refuse_other(self.base, source="the checkpoint")

    @classmethod
    def load(
        cls, folder: Path | str, *, weights: Literal["model", "ema"] = "model", **options: Any
    ) -> Self:
        """Opens a checkpoint folder of ours, or a Hugging Face folder, for use on the CPU.

        Args:
            folder: ``.../checkpoints/step_00000100``, a run folder (its newest checkpoint), or a folder with a
                ``config.json``.
            weights: Of a checkpoint: the weights, or their moving average (``optim.ema_decay``).
            options: Further constructor arguments.

        Raises:
            CheckpointError: It is neither, or its names or shapes do not fit.
        """
        loaded = open_source(Path(folder), weights=weights)
        model = cls(network=loaded.shape, **options)
        loaded.fill(model.network)
        model.tokenizer = loaded.tokenizer
        return model.eval()
