"""The ledger of a parameter whose batch is shared by several processes (ranks).

Each rank adds up the contributions of its own samples. When DDP or FSDP reduces gradients, the sums
W of all ranks are reduced, too, and merged. From then on, `merged` has the sums of all ranks, and
`count`, `groups` and `square` are this rank's own sums since the reduction. `total` is the
gradient, which all ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from varreg.engine import deferred
from varreg.engine.cleared import is_zero
from varreg.engine.contribution import Contribution
from varreg.engine.ledger import GradientWatch, Ledger
from varreg.engine.mean_variance import Moments
from varreg.engine.partition import Partition
from varreg.shards import is_sharded, local


@dataclass(frozen=True)
class Merged:
    """Sums over all ranks at the last reduction of gradients."""

    count: int
    groups: int
    square: Tensor


@dataclass(frozen=True)
class LocalSums:
    """The sums of this rank since gradients were last reduced."""

    count: int
    groups: int
    square: Tensor | None
    is_partial: bool
    """True: `p.grad` has a part that is not in these sums."""


class ShardWatch(GradientWatch):
    """The state of a gradient that may be sharded: this rank watches its own shard."""

    __slots__ = ()

    @staticmethod
    def part(grad: Tensor) -> Tensor:
        return local(grad)

    def note(self, grad: Tensor | None, differs: bool = False) -> None:
        super().note(grad, differs)
        self.trace = None if grad is None else _trace(grad)

    def is_written(self, grad: Tensor) -> bool:
        return self.trace != _trace(grad) or not self.is_same(grad)


def _trace(grad: Tensor) -> tuple[int, int, int]:
    part = local(grad)
    return part.data_ptr(), grad._version, part._version


class SharedLedger(Ledger):
    """The sums of one parameter, over all ranks."""

    merged: Merged | None = None
    is_sharded = False
    """True: each rank has a shard of the parameter. `merged` and `total` are those of the shard."""
    awaits_gradient = False
    """True: `total` will be set to p.grad at the end of the window."""

    unread: list[tuple[Tensor, Tensor]]

    def __init__(self, name: str, reduction: str):
        super().__init__(name, reduction)
        self.gradient = ShardWatch()

    def restart(self, is_complete: bool = True) -> None:
        super().restart(is_complete)
        self.merged, self.awaits_gradient, self.unread = None, False, []

    @property
    def is_merged(self) -> bool:
        """Return whether the ledger has sums of all ranks."""
        return self.merged is not None or bool(self.unread)

    def release(self, p: Tensor) -> None:
        if not (self.is_sharded or self.is_merged):
            super().release(p)

    def restart_if_cleared(self, p: Tensor, zero: bool | None = None) -> bool:
        """Restart the sums if the gradient was cleared. FSDP keeps gradients that are not reduced
        yet outside of p.grad. So for a sharded parameter, only None means cleared here; zeros in
        all shards are found at the next reduction. Return whether the ledger cannot decide, as in
        `Ledger`.
        """
        grad = p.grad
        is_due = not self.is_checked or grad is None
        if not (is_due or grad is None or self.total is None or self.in_window):
            # This was checked at the start of the forward. DDP may have moved the gradient since,
            # so a write does not show that it was cleared; zeros do, if the sum is not zero.
            empty = is_zero(local(grad)) if zero is None else zero
            is_due = empty and not is_zero(local(self.total))
        if is_due and not self.in_window:
            mesh = getattr(p, "device_mesh", None)  # only sharded parameters have one
            self.is_sharded = mesh is not None and is_sharded(p) and mesh.size() > 1
            if self.is_sharded:
                if grad is None and not self.count:
                    self.restart()
            elif grad is None:
                if self.gradient.trace is not None or (
                    self.total is not None and not self.is_merged
                ):
                    self.restart()
                self.is_complete = True
            elif self.gradient.is_cleared(grad, self.total, True, zero):
                self.restart()
        self.is_checked = True
        is_counted = (self.count > 0 and self.total is None) or (
            self.is_merged and self.gradient.trace is None
        )
        return grad is None and is_counted and not self.is_sharded

    def _add_sums(self, contribution: Contribution, sums: Any = None) -> Tensor | None:
        if not (self.is_sharded and self.is_merged):
            return super()._add_sums(contribution, sums)
        # `total` is a shard and will be set to p.grad; the contribution is of the whole parameter
        shard, self.total = self.total, None
        try:
            return super()._add_sums(contribution, sums)
        finally:
            self.total = shard

    def close(self, p: Tensor) -> None:
        """Set the total to p.grad. A sharded gradient does not exist yet when the sums are merged,
        but only when the window ends.
        """
        if self.awaits_gradient and p.grad is not None:
            square = self.unread[-1][1] if self.unread else None
            if square is None and self.merged is not None:
                square = self.merged.square
            part = local(p.grad)
            self.total = None if square is None else part.to(square.dtype, copy=True)
            self.awaits_gradient = False
        super().close(p)

    def count_without_use(self, p: Tensor, partition: Partition, forwards: set[int]) -> None:
        if not self.is_sharded:
            super().count_without_use(p, partition, forwards)
            return
        is_counted = bool(forwards) and forwards <= self.forwards
        if not is_counted and (self.count or (self.is_merged and p.grad is not None)):
            self.count += partition.batch
            self.groups += partition.groups
            self.forwards |= forwards
        self.gradient.note(p.grad, self.precision > 0 or self.is_reused)

    def local_sums(self, p: Tensor, partition: Partition | None) -> LocalSums:
        """Return the sums to reduce over all ranks.

        If the parameter had no use in the open window, `partition` is the batch's partition: its
        samples count nevertheless.
        """
        self.add_pending(p)
        self.restart_if_cleared(p)
        if partition is not None:
            self.count += partition.batch
            self.groups += partition.groups
        return LocalSums(self.count, self.groups, self.square, not self.is_complete)

    def gradient_signs(self, p: Tensor) -> tuple[Tensor | bool, Tensor | bool]:
        """Return two flags of a sharded parameter, before gradients are reduced. The first: this
        rank's shard of the gradient is not zero now. The second: it was not zero at the last
        reduction, or was written to since.
        """
        now = False if p.grad is None else local(p.grad).any()
        if not self.is_merged:
            return now, False
        if p.grad is None or self.gradient.is_written(p.grad):
            return now, True
        return now, False if self.total is None else self.total.any()

    def merge(self, numbers: Tensor, square: Tensor, total: Tensor | None) -> None:
        """Add the sums of all ranks since the last reduction, and set `total`, the gradient that
        they now share.

        `numbers` are m, K, and the number of ranks that have more in p.grad than they measured; for
        a sharded parameter also the two flags of `gradient_signs`. They are read only when they are
        needed, since reading them now would wait for the other ranks.
        """
        self.unread.append((numbers, square))
        self.total = total
        self.count, self.groups, self.square = 0, 0, None

    def take_numbers(self, rows: list[list[float]]) -> None:
        """Add the numbers of all ranks, which were fetched from the device, to the merged sums."""
        for (_, square), row in zip(self.unread, rows, strict=True):
            count, groups, partial, *signs = map(round, row)
            if signs and signs[1] and not signs[0]:
                # the gradient is zero now, and was not before or was written to: it was cleared
                self.merged = None
            if self.merged is not None:
                count += self.merged.count
                groups += self.merged.groups
                square = self.merged.square + square
            self.merged = Merged(count, groups, square)
        if partial:
            self.total, self.awaits_gradient = None, False
        self.unread = []

    def is_measured(self, p: Tensor) -> bool:
        return p.grad is not None and (self.is_merged or self.gradient.is_same(p.grad))

    def is_unmeasured(self, p: Tensor) -> bool:
        if p.grad is None or self.total is not None or not p.requires_grad:
            return False
        return not (self.is_merged or self.awaits_gradient or is_zero(local(p.grad)))

    def read(self, p: Tensor, stepping: bool = False) -> Moments | None:
        """Return the moments; for a sharded parameter, those of this rank's shard."""
        deferred.take_numbers([self])
        if self.merged is None:
            # before a reduction, the sums of a sharded parameter have the shape of the whole
            # tensor, and cover only this rank's samples
            return None if self.is_sharded else super().read(p, stepping)
        if p.grad is None or (self.is_sharded and self.count):
            return None
        count, groups = self.merged.count + self.count, self.merged.groups + self.groups
        if count == 0 or self.total is None:
            return None
        if stepping and not local(p.grad).is_cpu:
            pass  # as in one process
        elif self.gradient.is_cleared(p.grad, self.total, search=False) and not (
            stepping and is_zero(self.total)
        ):
            return None
        square = self.merged.square if self.square is None else self.merged.square + self.square
        self.square_was_read = True
        return Moments(count, groups, self.total, square, self.reduction)


def share(ledger: Ledger) -> None:
    """Turn the ledger of one process into a shared one. It stays the same object: graphs of earlier
    forwards refer to it.
    """
    if not isinstance(ledger, SharedLedger):
        ledger.__class__ = SharedLedger
        ledger.unread = []
        before, ledger.gradient = ledger.gradient, ShardWatch()
        if before.trace is not None:  # of a plain tensor, which is its own shard
            ledger.gradient.trace = (*before.trace, before.trace[1])
            ledger.gradient.ref, ledger.gradient.was_zero = before.ref, before.was_zero
