"""Moments of the global batch under DistributedDataParallel: Σc² is reduced together with the
gradients. This costs one more number per gradient element and step.

p.grad is the sum of the contributions c_i over samples, micro-batches and ranks.
DistributedDataParallel averages gradients over R ranks, so that a sample contributes c_i/R to the
average. So

    S = the averaged gradient,   Σc² = (1/R²) Σ_ranks Σc²,   m = Σ_ranks m

and only Σc² and m have to be reduced. A communication hook reduces them for each of DDP's buckets,
when the bucket is ready, so that the reduction overlaps with the backward pass. Since it is a hook,
`no_sync`, unused parameters and `join` work as in DDP. A rank that has joined sends zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from varreg import _torch
from varreg.engine.contribution import stat_dtype
from varreg.errors import VarregError
from varreg.parallel.shared_ledger import SharedLedger

if TYPE_CHECKING:
    from varreg.engine.observer import Observer

Hook = Callable[[Any, GradBucket], Future[Tensor]]
_REDUCTIONS: weakref.WeakKeyDictionary[DistributedDataParallel, Reduction] = (
    weakref.WeakKeyDictionary()
)


def register_comm_hook(ddp: DistributedDataParallel, state: Any, hook: Hook) -> None:
    """Register a communication hook of your own for gradients, and keep varreg's hook beside it.
    Call this in place of `ddp.register_comm_hook(state, hook)`.

    Args:
        ddp: The model that `DistributedDataParallel` wraps.
        state: The first argument of the hook.
        hook: A communication hook of DDP. It must average over ranks, as DDP itself does: moments
            are scaled for an average.

    """
    if not isinstance(ddp, DistributedDataParallel):
        raise VarregError(
            "varreg: register_comm_hook expects a DistributedDataParallel model, got "
            f"{type(ddp).__name__}."
        )
    reduction_of(ddp).inner = lambda bucket: hook(state, bucket)


def reduction_of(ddp: DistributedDataParallel) -> Reduction:
    """Return the `Reduction` of a DDP model. The first call creates and registers it. DDP accepts
    only one hook, which cannot be removed.
    """
    if ddp not in _REDUCTIONS:
        if ddp._use_python_reducer:
            raise VarregError(
                "varreg: DistributedDataParallel under compiled autograd is not supported. Switch "
                "compiled autograd off."
            )
        if ddp._comm_hooks:
            raise VarregError(
                "varreg: this DistributedDataParallel has a communication hook, and there can be "
                "one only. Register it with varreg.distributed.register_comm_hook(ddp, state, "
                "hook), which runs it and reduces moments beside it."
            )
        made = Reduction(ddp)
        ddp.register_comm_hook(made, _reduce)
        ddp.register_forward_pre_hook(made.refresh)
        _REDUCTIONS[ddp] = made
    return _REDUCTIONS[ddp]


class Observers:
    """The observers of a model, or of parts of it, held by weak references."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Observer] = weakref.WeakSet()

    def add(self, observer: Observer) -> None:
        self._all.add(observer)

    def ledger_of(self, p: Tensor) -> tuple[Observer, SharedLedger] | None:
        """Return the ledger of a parameter with its observer; None if the parameter is not
        observed.
        """
        for observer in self._all:
            ledger = observer.parameters.ledger_of(p) if observer.is_on else None
            if isinstance(ledger, SharedLedger):
                return observer, ledger
        return None

    def __bool__(self) -> bool:
        return any(o.is_on for o in self._all)

    def restart_cleared(self) -> None:
        """Restart the sums of all parameters whose gradients were cleared. The backward checks
        again, since gradients may still be cleared before it.
        """
        for o in self._all:
            o.window.restart_cleared()
            o.window.check_again()


class Reduction:
    """The communication hook of one DDP model."""

    def __init__(self, ddp: DistributedDataParallel):
        self._ddp = weakref.ref(ddp)
        self.group: Any = ddp.process_group
        self.observers = Observers()
        self.inner: Callable[[GradBucket], Future[Tensor]] = self.average
        self.takes_part = False

    def refresh(self, *_: Any) -> None:
        """Decide whether moments are reduced. This is decided only at the start of a forward: all
        ranks must agree, and a rank that has joined runs no forward.
        """
        self.takes_part = bool(self.observers)
        ddp = self._ddp()
        if ddp is not None and not getattr(ddp, "_has_rebuilt_buckets", True):
            # DDP may now move gradients into other buckets: that does not clear them
            self.observers.restart_cleared()

    @property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    def average(self, bucket: GradBucket) -> Future[Tensor]:
        """Reduce a bucket exactly as DDP does without a hook, including rounding."""
        buffer = bucket.buffer().mul_(1 / self.world)
        done: Future[Any] = dist.all_reduce(buffer, group=self.group, async_op=True).get_future()
        return done.then(lambda summed: summed.value()[0])

    @property
    def divides_by_those_left(self) -> bool:
        """Return whether an average is over the ranks that have not joined, as in
        `join(divide_by_initial_world_size=False)`.
        """
        ddp = self._ddp()
        return (
            ddp is not None
            and ddp._join_config.enable
            and getattr(ddp, "_divide_by_initial_world_size", True) is False
        )

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copy of the model has no reduction


def _reduce(reduction: Reduction, bucket: GradBucket) -> Future[Tensor]:
    """Reduce the gradients of a bucket. Reduce at the same time one tensor with Σc² of all
    parameters; then, for each parameter, m, the number of groups, and whether its sums are partial;
    and last, a 1 from each rank that has not joined.
    """
    if not reduction.takes_part:
        return reduction.inner(bucket)
    world, parameters = reduction.world, bucket.parameters()
    # a rank that has joined is called outside of any backward pass
    active = _torch.current_graph_task() != -1
    sizes = [p.numel() for p in parameters]
    sums = torch.zeros(
        sum(sizes) + 3 * len(sizes) + 1,
        dtype=stat_dtype(bucket.buffer().dtype),
        device=bucket.buffer().device,
    )
    *squares, counts, at_work = sums.split([*sizes, 3 * len(sizes), 1])
    known: list[tuple[int, SharedLedger]] = []
    told: list[float] = [0.0] * (3 * len(sizes))
    if active:
        at_work.fill_(1)
        for i, p in enumerate(parameters):
            if (entry := reduction.observers.ledger_of(p)) is not None:
                observer, ledger = entry
                known.append((i, ledger))
                own = ledger.local_sums(p, observer.window.claim_partition(p))
                if own.square is not None:
                    squares[i].copy_(own.square.reshape(-1))
                told[3 * i : 3 * i + 3] = own.count, own.groups, own.is_partial
        # without waiting for the device
        counts.copy_(torch.tensor(told, dtype=sums.dtype, device="cpu"), non_blocking=True)
    by_those_left = reduction.divides_by_those_left
    gradients = reduction.inner(bucket)
    moments = dist.all_reduce(sums, group=reduction.group, async_op=True).get_future()

    def done(both: Future[list[Future[Any]]]) -> Tensor:
        both.value()  # raises the error of either reduction
        averaged: Tensor = gradients.value()
        ranks: Any = at_work[0] if by_those_left else world
        if by_those_left:
            averaged.mul_((world / ranks).to(averaged.dtype))
        views = list(_views(averaged, parameters))
        for i, ledger in known:
            square = squares[i].view(parameters[i].shape).div_(ranks**2)
            total = views[i].to(sums.dtype, copy=True)
            ledger.merge(counts[3 * i : 3 * i + 3], square, total)
        return averaged

    return torch.futures.collect_all([gradients, moments]).then(done)


_reduce.__annotations__.clear()  # DDP expects types there, not strings


def _views(flat: Tensor, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
    """Yield each parameter's part of a bucket. DDP lays it out with the parameter's own strides,
    for example channels last.
    """
    offset = 0
    for p in parameters:
        dense = torch.ops.aten.is_non_overlapping_and_dense(p)
        yield (
            flat.as_strided(p.shape, p.stride(), offset)
            if dense
            else flat[offset : offset + p.numel()].view(p.shape)
        )
        offset += p.numel()


def attach(observer: Observer) -> None:
    """Make DDP reduce the squares of an observed model, if the model is a DDP model, contains one,
    or is inside one.
    """
    inside = DistributedDataParallel._get_active_ddp_module()
    models = [m for m in observer.model.modules() if isinstance(m, DistributedDataParallel)]
    for ddp in {id(d): d for d in ([inside] if inside is not None else []) + models}.values():
        reduction = reduction_of(ddp)
        reduction.observers.add(observer)
        reduction.takes_part = True
        observer.grouping.rank = dist.get_rank(reduction.group)
        observer.grouping.world = reduction.world
