"""Micro-batches through the pipeline: Megatron-Core's schedules over our steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .context import MegatronContext, MegatronParts


class Pipeline:
    """The chunks of this stage, wrapped for data parallelism, and the schedule that runs them.

    Args:
        parts: The model.
        context: How it is spread.
    """

    def __init__(self, parts: MegatronParts, context: MegatronContext) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.utils import get_model_config

        self.parts, self.context = parts, context
        self.config = get_model_config(parts.chunks[0])
        self.config.finalize_model_grads_func = functools.partial(_finalize, finalize_model_grads)
        self.chunks: list[Any] = [
            DistributedDataParallel(
                self.config,
                DistributedDataParallelConfig(overlap_grad_reduce=True),
                chunk,
                # Only the chunk whose gradients are ready first has anything to hide its reduction behind.
                disable_bucketing=index > 0,
            )
            for index, chunk in enumerate(parts.chunks)
        ]
        no_sync = [chunk.no_sync for chunk in self.chunks]
        self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def zero_grad(self) -> None:
        """Forgets the gradients of the last step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def run(
        self,
        micro_batches: Sequence[Any],
        *,
        scale: Tensor | None,
        autocast: AbstractContextManager[Any],
    ) -> Tensor:
        """Runs all micro-batches, and their backward passes if there is a scale.

        Args:
            micro_batches: At least one; the same on all ranks of this data-parallel share.
            scale: Factor on the sum of the losses; None runs forward only.
            autocast: Number format. It is entered around backward passes as well, in which Megatron-Core multiplies
                and computes again by itself.

        Returns:
            The sum of the loss over all targets, on every rank of this share; float64.
        """
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        micro_batches = self._fill_up(list(micro_batches))
        shapes = {self.parts.measure(it) for it in micro_batches}
        num_tokens, num_samples = next(iter(shapes))
        # Each stage then says the shape of what it sends, which costs another exchange.
        self.config.variable_seq_lengths = len(shapes) > 1
        for chunk in self.chunks:
            chunk.train(scale is not None)
        data = [iter(micro_batches) for _ in self.chunks]
        with autocast:
            sums = get_forward_backward_func()(
                forward_step_func=functools.partial(self._forward_step, scale=scale),
                data_iterator=data if len(data) > 1 else data[0],
                model=self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=num_tokens,
                micro_batch_size=num_samples,
                forward_only=scale is None,
            )
        total = torch.zeros((), device=self.context.device, dtype=torch.float64)
        if sums:
            total += torch.stack(sums).double().sum()
        if self.context.pipeline_parallel > 1:
            # Only the last stage has any: a sum with zeros is a broadcast.
            group = parallel_state.get_pipeline_model_parallel_group()
            torch.distributed.all_reduce(total, group=group)
        return total

    def _fill_up(self, micro_batches: list[Any]) -> list[Any]:
        """Adds blank micro-batches where the interleaved schedule needs a multiple of the stages."""
        if self.context.virtual_pipeline is not None:
            blank = self.parts.blank(micro_batches[0])
            micro_batches += [blank] * (-len(micro_batches) % self.context.pipeline_parallel)
        return micro_batches

    def _forward_step(
        self, data: Iterator[Any], chunk: nn.Module, scale: Tensor | None
    ) -> tuple[Tensor, Any]:
        micro_batch = next(data)
        output = self.parts.forward(chunk, micro_batch)

        def finish(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            loss_sum = self.parts.sum_loss(losses, micro_batch)
            scaled = loss_sum if scale is None else loss_sum * scale
            # The second is a count of tokens that Megatron-Core would divide by.
            return scaled, torch.zeros((), dtype=torch.int), loss_sum.detach()

        return output, finish


def _finalize(finalize_model_grads: Any, chunks: Any, num_tokens: Any, **groups: Any) -> None:
    """Sums gradients over replicas, norms over tensor ranks, tied embeddings over stages; divides by nothing."""
    finalize_model_grads(chunks, None, **groups)
