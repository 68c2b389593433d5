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

from varreg.distributed import Observers
from varreg.engine.contribution import stat_dtype
from varreg.engine.shards import is_sharded

if TYPE_CHECKING:
    from varreg.engine.observer import Observer


class _Beside(ReduceScatter):
    """Reduces Σc² of a group of sharded parameters when FSDP reduces their gradients: each rank keeps the part that its shard needs.

    A parameter's Σc² is cut into one piece per rank, as FSDP cuts gradients, with the counts behind each piece: one reduce-scatter for all.
    """

    def __init__(self, group: FSDPParamGroup, inner: ReduceScatter):
        self._group, self.inner = weakref.ref(group), inner
        self.observers = Observers()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        work = self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op)
        self.reduce(group, output_tensor.device)
        return work

    def reduce(self, ranks: Any, device: torch.device) -> None:
        group, world = self._group(), dist.get_world_size(ranks)
        assert group is not None
        known = [
            (f, found)
            for f in group.fsdp_params
            if f.sharded_param.requires_grad and (found := self.observers.ledger_of(f.sharded_param)) is not None
        ]
        if not known:
            return
        divisor = group.gradient_divide_factor or world
        dtype = stat_dtype(known[0][0].sharded_param.dtype)
        pieces, told = [], []
        for f, (observer, ledger) in known:
            p = f.sharded_param
            count, groups, square, partial = ledger.own(p, observer.partition_of(p))
            told += [count, groups, partial, *ledger.signs(p)]
            pieces.append(_cut(square, f, world, dtype, device))
        behind = torch.tensor([told], dtype=dtype, device=device).expand(world, -1)
        rows = torch.cat([*pieces, behind], 1)
        mine = rows.new_empty(rows.shape[1])
        dist.reduce_scatter_single(mine, rows.flatten(), group=ranks)
        *parts, found_ = mine.split([*(piece.shape[1] for piece in pieces), len(told)])
        for (f, (_, ledger)), part, row in zip(known, parts, found_.view(-1, 5).tolist(), strict=True):
            count, groups, partial, gradient, gone = (round(x) for x in row)
            if gone and not gradient:  # zeros in place of a gradient that was not, or that somebody wrote: it was cleared
                ledger.merged = None
            shard = part.view(f.padded_sharded_param_size)[tuple(slice(n) for n in f.sharded_size)]
            ledger.merge(count, groups, shard.to(f.sharded_param.device).div(divisor**2), None)
            ledger.awaits_gradient = not partial


def _cut(square: Tensor | None, f: Any, world: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[world, elements of a padded shard]`, as FSDP cuts gradients."""
    out = torch.zeros(world, *f.padded_sharded_param_size, dtype=dtype, device=device)
    if square is not None:
        for rank, piece in enumerate(square.chunk(world, f.fsdp_placement.dim)):
            out[rank][tuple(slice(n) for n in piece.shape)] = piece
    return out.flatten(1)


def _param_groups(model: nn.Module) -> list[FSDPParamGroup]:
    return [group for m in model.modules() if isinstance(m, FSDPModule) for group in m._get_fsdp_state()._fsdp_param_groups]


def _pairs(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Each gathered parameter, and the sharded one that it stands for."""
    found = [f for group in _param_groups(model) for f in group.fsdp_params]
    return [(f._unsharded_param, f.sharded_param) for f in found if hasattr(f, "_unsharded_param")]


def attach(observer: Observer) -> None:
    """Called when a model is observed, and as a forward begins: has it sharded parameters?"""
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
        group._reduce_scatter_comm.observers.add(observer)
        observer.rank, observer.world = mesh.get_local_rank(), mesh.size()
    ours = {id(f.sharded_param) for group in groups for f in group.fsdp_params}
    for name, p in observer.model.named_parameters():
        if is_sharded(p) and id(p) not in ours:
            raise ValueError(
                f"varreg: '{name}' is sharded together with parameters outside of the observed module. Observe the module that was given to "
                "fully_shard, or the whole model."
            )
    if groups:
        observer.follow_shards(_pairs)
