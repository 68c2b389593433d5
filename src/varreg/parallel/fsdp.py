"""Moments of parameters that `fully_shard` (FSDP2) has sharded: Σc² is reduced when FSDP reduces
gradients, and sharded as gradients are.

Gradients are averaged over ranks, as in `ddp.py`, but each rank needs only the sums of its own
shard: `_cut` cuts W as FSDP cuts gradients.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from varreg import _torch
from varreg.engine.contribution import stat_dtype
from varreg.errors import VarregError
from varreg.parallel.ddp import Observers
from varreg.shards import is_sharded

if TYPE_CHECKING:
    from varreg.engine.observer import Observer


class _SquareReduction:
    """Reduces Σc² of a group of sharded parameters when FSDP reduces their gradients. Each rank
    keeps the part for its shard.

    Each parameter's Σc² is cut into one piece per rank, as FSDP cuts gradients. The counts follow
    after the pieces, so that one reduce-scatter is enough.
    """

    def __init__(self, group: Any, inner: Any):
        self._group, self.inner = weakref.ref(group), inner
        self.observers = Observers()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        work = self.inner(
            output_tensor=output_tensor,
            input_tensor=input_tensor,
            group=group,
            op=op,
            async_op=async_op,
        )
        self.reduce(group, output_tensor.device)
        return work

    def reduce(self, ranks: Any, device: torch.device) -> None:
        """Reduce Σc² and the counts of all parameters of the group, and merge them into ledgers."""
        group, world = self._group(), dist.get_world_size(ranks)
        assert group is not None
        known = [
            (f, entry)
            for f in group.fsdp_params
            if f.sharded_param.requires_grad
            and (entry := self.observers.ledger_of(f.sharded_param)) is not None
        ]
        if not known:
            return
        divisor = group.gradient_divide_factor or world
        dtype = stat_dtype(known[0][0].sharded_param.dtype)
        pieces: list[Tensor] = []
        told: list[Tensor | float] = []
        for f, (observer, ledger) in known:
            p = f.sharded_param
            own = ledger.local_sums(p, observer.window.claim_partition(p))
            told += [own.count, own.groups, own.is_partial, *ledger.gradient_signs(p)]
            pieces.append(_cut(own.square, f, world, dtype, device))
        behind = _row(told, dtype, device).expand(world, -1)
        rows = torch.cat([*pieces, behind], 1)
        mine = rows.new_empty(rows.shape[1])
        dist.reduce_scatter_single(mine, rows.flatten(), group=ranks)
        *parts, numbers = mine.split([*(piece.shape[1] for piece in pieces), len(told)])
        for (f, (_, ledger)), part, row in zip(known, parts, numbers.view(-1, 5), strict=True):
            shard = part.view(f.padded_sharded_param_size)[tuple(slice(n) for n in f.sharded_size)]
            ledger.merge(row, shard.to(f.sharded_param.device).div(divisor**2), None)
            ledger.awaits_gradient = True


def _row(numbers: list[Tensor | float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a row on the device. Some of them are tensors on the device already; they
    are copied without waiting.
    """
    known = [0.0 if isinstance(x, Tensor) else float(x) for x in numbers]
    row = torch.tensor([known], dtype=dtype, device="cpu").to(device, non_blocking=True)
    for i, x in enumerate(numbers):
        if isinstance(x, Tensor):
            row[0, i] = x
    return row


def _cut(
    square: Tensor | None, f: Any, world: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return W as `[world, elements of a padded shard]`, as FSDP cuts gradients."""
    out = torch.zeros(world, *f.padded_sharded_param_size, dtype=dtype, device=device)
    if square is not None:
        for rank, piece in enumerate(square.chunk(world, f.fsdp_placement.dim)):
            out[rank][tuple(slice(n) for n in piece.shape)] = piece
    return out.flatten(1)


def _param_groups(model: nn.Module) -> list[Any]:
    return [
        group
        for m in model.modules()
        if isinstance(m, FSDPModule)
        for group in m._get_fsdp_state()._fsdp_param_groups
    ]


def _pairs(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return each gathered parameter with the sharded parameter from which it was gathered."""
    params = [f for group in _param_groups(model) for f in group.fsdp_params]
    return [(f._unsharded_param, f.sharded_param) for f in params if hasattr(f, "_unsharded_param")]


def attach(observer: Observer) -> None:
    """Make FSDP reduce the squares of a model, if its parameters are sharded."""
    if not _torch.CAN_JOIN_FSDP and any(
        isinstance(m, FSDPModule) for m in observer.model.modules()
    ):
        raise VarregError(
            "varreg: fully_shard needs torch 2.13 or newer, whose FSDP lets others reduce beside "
            f"it; this is torch {torch.__version__}. Update torch, or use DistributedDataParallel."
        )
    groups = _param_groups(observer.model)
    for group in groups:
        mesh = group.mesh_info.mesh
        if mesh.ndim != 1 or any(f.is_dtensor for f in group.fsdp_params):
            raise VarregError(
                "varreg: fully_shard is supported on a mesh of one dimension, and without tensor "
                "parallelism; this model has a mesh of shape "
                f"{tuple(mesh.shape)}. Shard over all ranks, or use DistributedDataParallel."
            )
        if not isinstance(group._reduce_scatter_comm, _SquareReduction):
            group._reduce_scatter_comm = _SquareReduction(group, group._reduce_scatter_comm)
        group._reduce_scatter_comm.observers.add(observer)
        observer.grouping.rank, observer.grouping.world = mesh.get_local_rank(), mesh.size()
    ours = {id(f.sharded_param) for group in groups for f in group.fsdp_params}
    for name, p in observer.model.named_parameters():
        if is_sharded(p) and id(p) not in ours:
            raise VarregError(
                f"varreg: '{name}' is sharded together with parameters outside of the observed "
                "module. Observe the module that was given to fully_shard, or the whole model."
            )
    if groups:
        observer.parameters.follow_shards(_pairs)
        for shard, ledger in observer.parameters:
            # set this before the first backward, since a trial of the forward must not use shards
            ledger.is_sharded = is_sharded(shard) and observer.grouping.world > 1
