"""Moments of parameters that `fully_shard` (FSDP2) has sharded: Σc² is reduced beside FSDP's own reduction, and sharded as gradients are.

Gradients are averaged over ranks, so that all is as `distributed.py` says; but each rank needs the sums of its own shard only.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from varreg.engine.contribution import stat_dtype

if TYPE_CHECKING:
    from varreg.engine.observer import Observer


class _Beside(ReduceScatter):
    """Reduces Σc² of a group of sharded parameters when FSDP reduces their gradients: each rank keeps the part that its shard needs.

    A parameter's Σc² is cut into one piece per rank, as FSDP cuts gradients, with the counts behind each piece: one reduce-scatter for all.
    """

    def __init__(self, group: FSDPParamGroup, inner: ReduceScatter):
        self._group, self.inner = weakref.ref(group), inner
        self.observer: Observer | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        work = self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op)
        if self.observer is not None:
            self.reduce(self.observer, group)
        return work

    def reduce(self, observer: Observer, ranks: Any) -> None:
        group, world = self._group(), dist.get_world_size(ranks)
        assert group is not None
        known = [
            (f, f.sharded_param, ledger)
            for f in group.fsdp_params
            if f.sharded_param.requires_grad and (ledger := observer.ledger_of(f.sharded_param)) is not None
        ]
        if not known:
            return
        divisor = group.gradient_divide_factor or world
        pieces, shapes = [], []
        counts = torch.zeros(len(known), 3)
        for i, (f, p, ledger) in enumerate(known):
            count, groups, square, partial = ledger.own(p, observer.partition_of(p))
            counts[i] = torch.tensor([count, groups, partial])
            local_shape = torch.Size(f.sharded_size)
            shape = torch.Size(f.padded_sharded_param_size)
            pieces.append(_cut(square, p, f.fsdp_placement.dim, world, shape))
            shapes.append((shape, local_shape))
        dtype = stat_dtype(known[0][1].dtype)
        rows = torch.cat([*(piece.to(dtype) for piece in pieces), counts.to(dtype).flatten().expand(world, -1)], 1).contiguous()
        mine = rows.new_empty(rows.shape[1])
        dist.reduce_scatter_single(mine, rows.flatten(), group=ranks)
        *parts, found = mine.split([*(shape.numel() for shape, _ in shapes), 3 * len(known)])
        for i, (_, _, ledger) in enumerate(known):
            count, groups, partial = (round(x) for x in found[3 * i : 3 * i + 3].tolist())
            shape, local_shape = shapes[i]
            square = parts[i].view(shape)[tuple(slice(n) for n in local_shape)].div(divisor**2)
            ledger.merge(count, groups, square, None)
            ledger.awaits_gradient = not partial


def _cut(square: Tensor | None, p: Any, dim: int, world: int, shape: torch.Size) -> Tensor:
    """`[world, elements of a padded shard]`."""
    out = torch.zeros(world, *shape, dtype=stat_dtype(p.dtype), device=p.device)
    if square is not None:
        for rank, piece in enumerate(square.chunk(world, dim)):
            out[rank][tuple(slice(n) for n in piece.shape)] = piece
    return out.flatten(1)


def _param_groups(model: nn.Module) -> list[FSDPParamGroup]:
    return [group for m in model.modules() if isinstance(m, FSDPModule) for group in m._get_fsdp_state()._fsdp_param_groups]


def _pairs(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Each gathered parameter, and the sharded one that it stands for."""
    found = [f for group in _param_groups(model) for f in group.fsdp_params]
    return [(f._unsharded_param, f.sharded_param) for f in found if hasattr(f, "_unsharded_param")]


def attach(observer: Observer) -> None:
    """Called as a forward begins: has the model sharded parameters?"""
    groups = _param_groups(observer.model)
    for group in groups:
        mesh = group.mesh_info.mesh
        if mesh.ndim != 1 or any(f.is_dtensor for f in group.fsdp_params):
            raise ValueError(
                "varreg: fully_shard is supported on a mesh of one dimension, and without tensor parallelism; this model has a mesh of shape "
                f"{tuple(mesh.shape)}. Shard over all ranks, or use DistributedDataParallel."
            )
        if not isinstance(group._reduce_scatter_comm, _Beside):
            group._reduce_scatter_comm = _Beside(group, group._reduce_scatter_comm)
        group._reduce_scatter_comm.observer = observer
        observer.rank, observer.world = mesh.get_local_rank(), mesh.size()
    if groups:
        observer.follow_shards(_pairs)
