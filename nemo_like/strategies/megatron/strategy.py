"""The strategy that trains a model in its Megatron form, with our optimizers and our checkpoints."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.core.checkpoint import Checkpoint
from nemo_like.core.datamodule import StepBatch
from nemo_like.core.errors import ConfigError
from nemo_like.core.extras import require
from nemo_like.core.float8 import Float8Precision
from nemo_like.core.seed import derive_seed, seed_step
from nemo_like.strategies.resume import restore_optimizer
from nemo_like.strategies.step import count_step, note_step
from nemo_like.strategies.strategy import StepStrategy

from .context import MegatronContext, MegatronModel, MegatronParts
from .cuda_on_cpu import cuda_on_cpu
from .schedule import Pipeline
from .slices import CanonicalSlice, clip_norm

_TENSOR_RNG = "model-parallel-rng"
"""What Megatron-Core calls the generator of tensor-parallel regions."""


def _import_megatron() -> None:
    """Imports Megatron-Core once, without its warnings of each optional package that is not there."""
    toolkit = logging.getLogger("torch.utils.cpp_extension")
    level = toolkit.level
    toolkit.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        require("megatron.core")
        require("megatron.core.models.gpt.gpt_layer_specs")
    toolkit.setLevel(level)


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


class MegatronStrategy(StepStrategy):
    """Each layer cut over ranks (tensor), the layers cut over ranks (pipeline), replicas of that (data).

    The model computes in Megatron-Core's modules and schedules. Optimizer and checkpoints see the parameters of the
    single-device network, of which each rank holds a slice.

    Args:
        tensor_parallel: Ranks that share each layer.
        pipeline_parallel: Stages that the layers are cut into.
        virtual_pipeline: Chunks of layers that each stage holds, interleaved; None is one.
        sequence_parallel: Cut what lies between the tensor-parallel regions along the sequence.
        shard_optimizer: Cut optimizer state over the data-parallel ranks.
        options: Of :class:`StepStrategy`.

    Raises:
        ConfigError: Settings that contradict each other; all of them.
        MissingExtraError: Megatron-Core is not installed.
    """

    spreads_weights = True
    fills_weights = True

    def __init__(
        self,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        virtual_pipeline: int | None = None,
        sequence_parallel: bool = False,
        shard_optimizer: bool = True,
        **options: Any,
    ) -> None:
        _import_megatron()
        faults = []
        if virtual_pipeline is not None and pipeline_parallel == 1:
            faults.append(
                f"strategy.virtual_pipeline={virtual_pipeline}: chunks are interleaved over stages, of which "
                "strategy.pipeline_parallel=1 has one; set it to 2 or more, or virtual_pipeline=null"
            )
        if sequence_parallel and tensor_parallel == 1:
            faults.append(
                "strategy.sequence_parallel=true: cuts the sequence over the tensor-parallel ranks, of which "
                "strategy.tensor_parallel=1 has one; set it to 2 or more, or sequence_parallel=false"
            )
        if faults:
            raise ConfigError(faults)
        self.tensor_parallel, self.pipeline_parallel = tensor_parallel, pipeline_parallel
        self.virtual_pipeline, self.sequence_parallel = virtual_pipeline, sequence_parallel
        self.shard_optimizer = shard_optimizer
        self._pipeline: Pipeline | None = None
        self._slices: dict[str, CanonicalSlice] = {}
        self._stage_of: dict[str, int] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._made_group = False
        super().__init__(**options)

    # Ranks: tensor first, then data, then pipeline, as Megatron-Core counts them.

    @property
    def data_parallel_rank(self) -> int:
        """Which share of each global batch this process reads; all ranks of a replica read the same."""
        return self.global_rank // self.tensor_parallel % self.data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """How many replicas there are."""
        return max(1, self.world_size // (self.tensor_parallel * self.pipeline_parallel))

    def _in_megatron(self) -> AbstractContextManager[Any]:
        """A context for calls into Megatron-Core; without a GPU, the CPU does what it asks of CUDA."""
        return nullcontext() if self.root_device.type == "cuda" else cuda_on_cpu()

    def setup_distributed(self) -> None:
        """Starts the process group, also for one process, and Megatron-Core's groups in it.

        Raises:
            ConfigError: The ranks cannot be divided into whole replicas.
        """
        from megatron.core import parallel_state

        replica = self.tensor_parallel * self.pipeline_parallel
        ranks = self.num_nodes * self.num_processes
        if ranks % replica:
            raise ConfigError(
                [
                    f"strategy.tensor_parallel={self.tensor_parallel} x pipeline_parallel={self.pipeline_parallel}: "
                    f"needs a multiple of {replica} ranks, trainer.devices x trainer.num_nodes is {ranks}"
                ]
            )
        self._made_group = not dist.is_initialized()
        # Not StepStrategy's, which starts no group for one process.
        super(StepStrategy, self).setup_distributed()
        with self._in_megatron():
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(
                self.tensor_parallel,
                self.pipeline_parallel,
                self.virtual_pipeline,
                create_gloo_process_groups=False,
            )

    # The model.

    def wrap_model(self) -> None:
        """Builds the Megatron form and gives the module slices of its parameters instead of the whole ones.

        Raises:
            TypeError: The model has no Megatron form.
            ConfigError: Its shape cannot be cut like that, or the number format is not supported.
        """
        model = self.module
        if not isinstance(model, MegatronModel):
            raise TypeError(
                f"{type(model).__name__} has no Megatron form (build_megatron): choose strategy=fsdp or strategy=ddp"
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ConfigError(
                [
                    "trainer.precision=fp16-mixed: strategy=megatron has no loss scaling; "
                    "take bf16-mixed or fp32"
                ]
            )
        context = self._make_context(fp8=isinstance(self.precision_plugin, Float8Precision))
        with self._in_megatron():
            parts = model.build_megatron(context)
            self._pipeline = Pipeline(parts, context)
        self._replace_parameters(parts)
        self._seed_tensor_rng(torch.initial_seed())

    def _make_context(self, *, fp8: bool) -> MegatronContext:
        from megatron.core import parallel_state

        return MegatronContext(
            tensor_parallel=self.tensor_parallel,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            pipeline_parallel=self.pipeline_parallel,
            pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
            virtual_pipeline=self.virtual_pipeline,
            sequence_parallel=self.sequence_parallel,
            activation_checkpointing=self.activation_checkpointing,
            fp8=fp8,
            device=self.root_device,
        )

    def _replace_parameters(self, parts: MegatronParts) -> None:
        """Fills Megatron's parameters; the module keeps its names, with what lies on this rank under them."""
        mesh = self._make_mesh()
        # Shapes without memory: each whole weight goes as soon as its slice is taken.
        likes = {name: _without_memory(it) for name, it in self.module.named_parameters()}
        for name, whole in self.read_weights():
            here = whole.to(self.root_device)
            dist.broadcast(
                here, 0
            )  # drawn alike on all ranks if the seed was; this way in any case
            self._shapes[name] = here.shape
            self._set_parameter(name, None)
            if name in parts.slices:
                self._slices[name] = CanonicalSlice(
                    parts.slices[name], likes[name], mesh, is_sharded=self.shard_optimizer
                )
                self._slices[name].fill(here)
        # Without parameters nothing is copied, but the module learns where it is.
        self.model_to_device()
        for name, it in self._slices.items():
            self._set_parameter(name, it.parameter)
        self.publish_weights()
        stages: list[Any] = [None] * self.pipeline_parallel
        dist.all_gather_object(stages, list(self._slices), group=self._pipeline_group)
        self._stage_of = {name: stage for stage, names in enumerate(stages) for name in names}
        missing = sorted(self._shapes.keys() - self._stage_of)
        assert not missing, f"no place in the Megatron form for {missing}"

    def _set_parameter(self, name: str, parameter: nn.Parameter | None) -> None:
        owner, _, key = name.rpartition(".")
        self.module.get_submodule(owner)._parameters[key] = parameter

    def _make_mesh(self) -> DeviceMesh:
        from megatron.core import parallel_state

        tensor, data = self.tensor_parallel, self.data_parallel_size
        first = parallel_state.get_pipeline_model_parallel_rank() * tensor * data
        ranks_DT = torch.arange(first, first + tensor * data).view(data, tensor)
        groups = [
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_data_parallel_group(),
        ]
        return DeviceMesh.from_group(
            groups, self.root_device.type, mesh=ranks_DT.mT, mesh_dim_names=("tensor", "data")
        )

    @property
    def _pipeline_group(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        group: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
        return group

    def publish_weights(self) -> None:
        """Brings Megatron's parameters up to date with the canonical ones."""
        from megatron.core import parallel_state

        for it in self._slices.values():
            it.publish()
        assert self._pipeline is not None, "made in wrap_model"
        parts = self._pipeline.parts
        # The last stage's copy of the embedding follows the first stage, which alone has its optimizer state.
        if parts.tied_name is not None and self.pipeline_parallel > 1:
            source = parts.slices.get(parts.tied_name)
            weight = source.weight if source is not None else parts.tied_copy
            if weight is not None:
                group = parallel_state.get_embedding_group()
                dist.broadcast(weight.detach(), group=group, group_src=0)

    # A step.

    def run_micro_batches(self, batch: StepBatch) -> Tensor:
        """Runs the schedule; leaves the gradients of the mean loss, gives that loss."""
        from megatron.core import parallel_state

        model, pipeline = self.module, self._pipeline
        assert pipeline is not None, "made in wrap_model"
        group = parallel_state.get_data_parallel_group()
        if model.seed is not None:
            self._seed(model.seed, model.trainer.global_step)
        size = self.data_parallel_size
        num_targets, units = count_step(
            model, batch, size=size, group=group, device=self.root_device
        )
        with self._in_megatron(), self.activation_context():
            total = pipeline.run(
                batch.micro_batches,
                scale=1 / num_targets,
                autocast=self.precision_plugin.train_step_context(),
            )
        for it in self._slices.values():
            it.take_gradient()
        return note_step(model, total, num_targets, units, size=size, group=group)

    def _seed(self, seed: int, step: int) -> None:
        """Sets the generators: those of replicas and stages differ, those of tensor-parallel ranks agree."""
        from megatron.core import parallel_state

        stage = parallel_state.get_pipeline_model_parallel_rank()
        rank = self.data_parallel_rank + stage * self.data_parallel_size
        seed_step(seed, step, rank)
        self._seed_tensor_rng(derive_seed(seed, step, rank))

    def _seed_tensor_rng(self, seed: int) -> None:
        """Sets the generator of tensor-parallel regions, where these ranks must differ."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with self._in_megatron():
            tracker = get_cuda_rng_tracker()
            tracker.reset()
            rank = parallel_state.get_tensor_model_parallel_rank()
            tracker.add(_TENSOR_RNG, derive_seed(seed, 1 + rank))

    def zero_grad(self) -> None:
        """Forgets the gradients of the last step; those of the slices are views of them."""
        assert self._pipeline is not None, "made in wrap_model"
        self._pipeline.zero_grad()

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clips by the norm over all slices, each counted once."""
        loss = torch.as_tensor(self.module.step_metrics["train/loss"], device=self.root_device)
        return clip_norm(list(self._slices.values()), max_norm, loss)

    def optimizer_step(self, *arguments: Any, **options: Any) -> Any:
        """Changes the slices, then Megatron's parameters."""
        output = super().optimizer_step(*arguments, **options)
        self.publish_weights()
        return output

    def compute_loss_sum(self, micro_batch: Any) -> Tensor:
        """Runs a micro-batch through the stages without gradient; every rank gets the figure."""
        assert self._pipeline is not None, "made in wrap_model"
        with self._in_megatron(), torch.no_grad():
            return self._pipeline.run([micro_batch], scale=None, autocast=nullcontext())

    # Saving and loading.

    def fill_weights(self, checkpoint: Checkpoint) -> None:
        """Reads this rank's slices."""
        tensors = {name: it.parameter.detach() for name, it in self._slices.items()}
        checkpoint.load_tensors("model", tensors, elsewhere=self._elsewhere)
        self.publish_weights()

    def fill_optimizer(self, checkpoint: Checkpoint) -> None:
        """Reads this rank's slices of the optimizer state."""
        restore_optimizer(self.optimizers[0], self.module, checkpoint, elsewhere=self._elsewhere)

    @property
    def _elsewhere(self) -> set[str]:
        """Canonical parameters of other stages."""
        return self._stage_of.keys() - self._slices.keys()

    def gather_weights(self) -> dict[str, Tensor]:
        """All weights, whole, on every rank, by canonical name."""
        gathered = {}
        for name, shape in self._shapes.items():
            if name in self._slices:
                whole = self._slices[name].gather().contiguous()
            else:
                whole = torch.empty(shape, device=self.root_device)
            if self.pipeline_parallel > 1:
                dist.broadcast(whole, group=self._pipeline_group, group_src=self._stage_of[name])
            gathered[name] = whole
        return gathered

    def collect_tensors(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Slices of weights and optimizer state; other stages hand in other names."""
        weights, state = super().collect_tensors()
        return {name: weights[name] for name in self._slices}, state

    def teardown(self) -> None:
        """Leaves Megatron-Core's groups, and the process group if it is this strategy's own of one process."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        model = self.lightning_module
        if model is not None and any(parameter.is_meta for parameter in model.parameters()):
            # Something failed before it had weights; moving it would fail as well, and hide what it was.
            self._lightning_module = None
        super().teardown()
        if self._made_group and self.world_size == 1 and dist.is_initialized():
            dist.destroy_process_group()
