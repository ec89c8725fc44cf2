"""Canonical parameters over Megatron's: what the optimizer moves and what a checkpoint holds.

Megatron-Core keeps query, key and value of a layer in one matrix, interleaved by key/value head, and gate and up in
another. A :class:`CanonicalSlice` is this rank's part of a parameter of the single-device network, as a DTensor on the
mesh (tensor, data). Where the part is one run of rows, it *is* those rows of Megatron's parameter, and its gradient
those of Megatron's gradient; else it is a copy. With the optimizer sharded, each data-parallel rank owns some of the
rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from .context import Slice


class CanonicalSlice:
    """A canonical parameter, as far as this rank holds it.

    Args:
        place: Where it lies in Megatron's parameter, whose ``main_grad`` exists already.
        like: The parameter of the single-device network: shape, and whether it is trained.
        mesh: Axes ``tensor`` and ``data`` of this pipeline stage.
        is_sharded: Cut the rows over the data-parallel ranks.
    """

    def __init__(
        self, place: Slice, like: nn.Parameter, mesh: DeviceMesh, *, is_sharded: bool
    ) -> None:
        self.weight, self.rows = place.weight, list(place.rows)
        self.mesh, self.is_sharded = mesh, is_sharded and mesh.size(1) > 1
        tensor: Placement = Replicate() if place.split_dim is None else Shard(place.split_dim)
        self._whole_placements = (tensor, Replicate())
        # In this order a slice of a tensor-parallel rank is cut further, not the other way round.
        self._placements = (tensor, Shard(0) if self.is_sharded else Replicate())
        self._shape, self._stride = like.shape, like.stride()
        # Whoever holds a part that others hold as well counts it only once.
        tensor_rank, data_rank = mesh.get_coordinate() or (0, 0)
        self.is_counted = (place.split_dim is not None or tensor_rank == 0) and (
            self.is_sharded or data_rank == 0
        )
        self._data_rank = data_rank
        self.parameter = nn.Parameter(
            self._as_canonical(self._own(self.weight.detach())), requires_grad=like.requires_grad
        )
        self.gradient = self._own(self._main_grad) if like.requires_grad else None

    @property
    def _main_grad(self) -> Tensor:
        gradient: Tensor = self.weight.main_grad  # type: ignore[attr-defined]
        return gradient

    def _as_canonical(self, local: Tensor) -> DTensor:
        return DTensor.from_local(
            local,
            self.mesh,
            self._placements,
            run_check=False,
            shape=self._shape,
            stride=self._stride,
        )

    def _own(self, fused: Tensor) -> Tensor:
        """This rank's rows of one of Megatron's tensors: a view of them if they lie together."""
        pieces = [fused[start:stop] for start, stop in self.rows]
        part = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if not self.is_sharded:
            return part
        size = -(-part.size(0) // self.mesh.size(1))
        mine = part[self._data_rank * size : (self._data_rank + 1) * size]
        return mine if len(pieces) == 1 else mine.clone()

    def take_gradient(self) -> None:
        """Brings the gradient up to date with Megatron's, and shows it to the optimizer."""
        if self.gradient is None:
            return
        if len(self.rows) > 1:
            self.gradient.copy_(self._own(self._main_grad))
        if self.parameter.grad is None:
            self.parameter.grad = self._as_canonical(self.gradient)

    @torch.no_grad()
    def fill(self, whole: Tensor) -> None:
        """Takes this rank's part of a whole parameter."""
        part = distribute_tensor(whole, self.mesh, self._placements, src_data_rank=None)
        self._local.copy_(part.to_local())

    @torch.no_grad()
    def publish(self) -> None:
        """Brings Megatron's parameter up to date on all ranks that hold these rows."""
        if len(self.rows) == 1 and not self.is_sharded:
            return
        canonical = self.parameter.detach()
        assert isinstance(canonical, DTensor)
        part = canonical.redistribute(self.mesh, self._whole_placements).to_local()
        sizes = [stop - start for start, stop in self.rows]
        for (start, stop), piece in zip(self.rows, part.split(sizes), strict=True):
            self.weight.detach()[start:stop].copy_(piece)

    def gather(self) -> Tensor:
        """The whole parameter, on every rank of the stage."""
        canonical = self.parameter.detach()
        assert isinstance(canonical, DTensor)
        return canonical.full_tensor()

    @property
    def _local(self) -> Tensor:
        canonical = self.parameter.detach()
        assert isinstance(canonical, DTensor)
        return canonical.to_local()


def clip_norm(slices: list[CanonicalSlice], max_norm: float | None, loss: Tensor) -> Tensor:
    """Clips the gradients by their global norm and gives the norm before clipping; a scalar, the same on all ranks.

    Args:
        slices: Of this rank.
        max_norm: None only measures.
        loss: Of the step. Where one rank's is not finite, no rank's norm is: they judge the step alike.
    """
    gradients = [it.gradient for it in slices if it.gradient is not None]
    counted = [it.gradient for it in slices if it.gradient is not None and it.is_counted]
    square = loss * 0  # nan where it is not finite
    if counted:
        square += torch.nn.utils.get_total_norm(counted).square()
    dist.all_reduce(square)
    norm = square.sqrt()
    if max_norm is not None and gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
