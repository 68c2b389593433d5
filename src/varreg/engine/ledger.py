"""The ledger of a parameter: the sums over samples since its gradient was last cleared.

A *window* is one backward pass. Within it, all uses of a parameter are added up per sample before
squaring; between windows (micro-batches), sums and counts add up, until the gradient is cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from varreg.devices import without_autocast
from varreg.engine import processes
from varreg.engine.cleared import is_zero, refuse_unclear
from varreg.engine.combined import combine
from varreg.engine.contribution import Contribution, Sums, Weight
from varreg.engine.mean_variance import Moments
from varreg.engine.number_range import sums_in_range
from varreg.engine.on_device import copy_shared_totals
from varreg.engine.partition import Partition
from varreg.few_launches import finish_squares


class GradientWatch:
    """The state of one parameter's gradient, noted when a window closed."""

    __slots__ = ("ref", "trace", "was_zero")

    def __init__(self) -> None:
        self.trace: tuple[Any, ...] | None = None  # address and version; None: no gradient
        self.ref: TensorWeakRef | None = None  # the gradient itself
        self.was_zero = False  # True: the gradient was zero, though the measured sum may not be

    @staticmethod
    def part(grad: Tensor) -> Tensor:
        """Return the part of the gradient that this process holds (all of it unless sharded)."""
        return grad

    def note(self, grad: Tensor | None, differs: bool = False) -> None:
        """Note a gradient's state, so that a later write can be detected.

        A gradient that `differs` from the measured sum may be zero where the sum is a rounding
        error. On a device, varreg does not look, and assumes that it is zero.
        """
        if grad is None:
            self.trace = self.ref = None
            self.was_zero = False
        else:
            self.trace = grad.data_ptr(), grad._version
            self.ref = TensorWeakRef(grad)  # a new tensor may reuse an address
            self.was_zero = differs and (not grad.is_cpu or is_zero(self.part(grad)))

    def is_written(self, grad: Tensor) -> bool:
        """Return whether `grad` is not the noted tensor, or was written to since."""
        is_other = self.ref is None or self.ref() is not grad
        return is_other or self.trace != (grad.data_ptr(), grad._version)

    def is_same(self, grad: Tensor) -> bool:
        """Return whether `grad` is the noted tensor. Its values may have changed."""
        return self.ref is not None and self.ref() is grad

    def is_cleared(
        self, grad: Tensor | None, total: Tensor | None, search: bool, zero: bool | None = None
    ) -> bool:
        """Return whether the gradient was cleared since it was noted: set to None, or overwritten
        with zeros. `total` is the sum that was measured for the noted gradient.

        Zeros (`zero`, if that is known) count as cleared if the gradient was not zero before, or if
        it was written to. If clipping writes zeros over zeros before a step, the gradient looks
        cleared, and the sums restart. With `search`, zeros also count without a known write
        (`p.grad.data`, NumPy). On a device, `Window.restart_cleared` searches later, and raises.
        """
        if grad is None:
            return self.trace is not None
        written = self.is_written(grad)
        if not (written or (search and grad.is_cpu)):
            return False
        if not (is_zero(self.part(grad)) if zero is None else zero):
            return False
        return written or not (self.was_zero or total is None or is_zero(total))


class Ledger:
    """The sums of one parameter. Holds no reference to the parameter itself."""

    is_sharded = False  # True: each of several processes holds a part of the parameter
    # counts of all processes that are still unread on the device, each with its W
    unread: Sequence[tuple[Tensor, Tensor]] = ()
    recorder: Any = None  # records the norms of samples, if norms=True
    sums_only = by_gradient = False  # True: keeps sums over elements only; S is p.grad, not kept

    def __init__(self, name: str, reduction: str):
        self.name, self.reduction = name, reduction
        self.rules: dict[str, None] = {}  # names of the rules that measured it, oldest first
        self.was_warned = False  # True: the user was warned that a use of it is not seen
        self.gradient = GradientWatch()

        self.uses: set[int] = set()  # ids of uses whose graph exists: a backward may reach them
        self.awaited = 0  # uses that a re-entrant checkpoint will add; they have no graph yet
        self.is_reused = False  # True: some window had several uses; always wait for all
        self.may_share_total = False  # True: S may share the memory of p.grad in this window
        self.is_total_shared = False  # True: S does share it
        self.pending: list[Contribution] = []  # contributions that wait for others of the window
        self.arrived = 0  # number of uses that arrived in this window
        self.arriving: set[int] = set()  # numbers of their forwards, without those of checkpoints

        self.in_window = False  # True: a use arrived in the running backward
        self.is_checked = False  # True: this backward knows whether p.grad was cleared before it
        self.was_cleared = self.ever_cleared = False  # since the last window closed; at any time

        self.is_float64 = False  # True: sums are float64; float32 would overflow or underflow
        self.is_check_due = True  # True: the next window compares p.grad with the sums
        self.distinct_rows: dict[int, bool] = {}  # on devices, by number: rows looked up differ
        self.is_used_unseen = False  # True: some use is not seen; compare in every window
        self.restart(is_complete=False)

    def restart(self, is_complete: bool = True) -> None:
        """Drop all sums. The new sums are complete if p.grad starts together with them."""
        if self.gradient.trace is not None:  # the noted gradient is gone
            self.was_cleared = self.ever_cleared = True
            self.gradient.trace = self.gradient.ref = None
            self.gradient.was_zero = False
        self.is_complete = is_complete
        self.count = self.groups = 0  # m and K
        self.total: Tensor | None = None  # S
        self.square: Tensor | None = None  # W
        self.square_was_read = False  # True: a reader may hold W, so add to a copy
        self.norms: list[Any] = []  # norms of samples, written by the recorder
        self.forwards: set[int] = set()  # numbers of the forwards whose samples are counted
        self.used: set[int] = set()  # those among these forwards that contributed
        # Σ|C_u| of all contributions before they cancel; computed where a check is due
        self.added_size: Tensor | float = 0.0
        # rounding error of p.grad where autograd computes it beside the sums; else 0
        self.precision = 0.0
        # names of two parameters, if the start of the count is uncertain: the gradient of the first
        # was cleared since then, and that of the second was not
        self.unclear: tuple[str, str] | None = None

    def release(self, p: Tensor) -> None:
        """Drop the sums if the gradient is None: the forward pass may need the memory."""
        if p.grad is None and self.total is not None and not self.in_window:
            self.restart()

    def restart_if_cleared(self, p: Tensor, zero: bool | None = None) -> bool:
        """Restart the sums if the gradient was cleared. Return whether the ledger cannot decide:
        it has counted samples, and the parameter had no gradient yet. `zero`, if known, says
        whether the gradient is zero.

        Each backward calls this once, before it writes to any gradient. A later call would be too
        late if gradients are views of one buffer, as in DDP: a write to one counts as a write to
        all.
        """
        grad = p.grad
        if not (self.is_checked or self.in_window):
            if grad is None:
                if self.total is not None or self.gradient.trace is not None:
                    self.restart()
                self.is_complete = True
            elif self.gradient.is_cleared(grad, self.total, True, zero):
                self.restart()
        self.is_checked = True
        return grad is None and self.count > 0 and self.total is None

    def open(self, p: Tensor) -> None:
        """Begin a window: a use of the parameter arrives."""
        if not self.is_checked:
            self.restart_if_cleared(p)
        if self.unclear is not None:
            refuse_unclear(self.name, self.count, *self.unclear)
        self.in_window = True
        has_hooks = bool(p._post_accumulate_grad_hooks)
        self.may_share_total = not (p.is_cpu or has_hooks or processes.are_several())

    @property
    def must_wait(self) -> bool:
        """Return whether nothing is squared before other uses have arrived."""
        # a use that a checkpoint will add may have arrived already: waiting is right in any case
        return self.is_reused or bool(self.pending) or len(self.uses) + self.awaited > 1

    def sums_with_bias(self, weight: Weight, is_beside: bool = False) -> tuple[Any, Any]:
        """Return the sums of a weight and of its bias, from one pass; None where it gives none."""
        weight.kernels = self.recorder and self.recorder.kernels(weight)
        return (None, None) if self.must_wait or self.is_float64 else weight.sums_with_bias()

    def add(self, use: Contribution, dtype: torch.dtype, sums: Any = None) -> Tensor | None:
        """Add the contributions of a use, with the result of `sums_with_bias`, if it is known.
        Return their sum, the gradient for autograd.
        """
        self.arrived += 1
        if self.must_wait:
            copy_shared_totals([self])  # this backward may write to p.grad before the end
            self.pending.append(use)
            total = use.total() if sums is None else sums[0]
            if self.is_check_due:
                self.added_size = self.added_size + use.size()
        else:
            total = self._add_sums(use, sums)
        return total if total is None or total.dtype == dtype else total.to(dtype)

    def _add_sums(self, contribution: Contribution, sums: Sums | None = None) -> Tensor | None:
        """Add S and W (`sums`, if they are known) of a window's contributions, and count its
        samples. Return S; or its second copy, if there is one, which p.grad can own.
        """
        if sums is None or self.is_float64:
            contribution.kernels = self.recorder and self.recorder.kernels(contribution)
            sums = contribution.precise_sums() if self.is_float64 else contribution.sums()
        total, square, *copies = sums
        if total is not None and square is not None:
            if (self.is_float64 or self.is_check_due) and square.is_cpu:
                total, square, *copies = sums_in_range(self, contribution, total, square, copies)
            # never in place: the tensor may be p.grad by now
            if self.total is None:
                self.is_total_shared = self.may_share_total and not copies
                self.total = total.detach() if self.is_total_shared else total
            else:
                self.total = self.total + total
            if not (square.is_cpu or (self.may_share_total and self.square is None)):
                finish_squares()
            if self.square is None:
                self.square = square
            elif self.square_was_read:
                self.square = self.square + square
            else:
                self.square.add_(square)
            self.square_was_read = False
        if self.recorder is not None:
            self.recorder.record(self, contribution)
        # two losses of one forward have the same samples, which count once
        if not (self.arriving and self.arriving <= self.forwards):
            self.count += contribution.partition.batch
            self.groups += contribution.partition.groups
        return copies[0] if copies else total

    def add_pending(self, p: Tensor) -> None:
        """Add the contributions that waited: all uses have arrived."""
        if self.pending:
            self.is_reused |= len(self.pending) > 1
            self.may_share_total = False  # S is a sum of several uses: p.grad has other memory
            with without_autocast(p.device):  # backward() may have been called under autocast
                self._add_sums(combine(self.pending))
            self.pending = []

    def close(self, p: Tensor) -> None:
        """End the window, and note the state of `p.grad`."""
        if self.pending:
            self.add_pending(p)
        # uses of a checkpoint that have arrived are no longer awaited
        self.awaited, self.arrived = max(0, self.awaited - self.arrived), 0
        self.forwards |= self.arriving
        self.used |= self.arriving
        self.arriving = set()
        self.in_window = False
        self.gradient.note(p.grad, self.precision > 0 or self.is_reused)

    def count_without_use(self, p: Tensor, partition: Partition, forwards: set[int]) -> None:
        """Count the samples of a window without a use of the parameter: they contribute 0. They
        also count before the first use of the parameter, which may be in a later micro-batch.
        """
        is_counted = bool(forwards) and forwards <= self.forwards
        if not is_counted and (p.requires_grad or p.grad is not None):
            self.count += partition.batch
            self.groups += partition.groups
            self.forwards |= forwards
        self.gradient.note(p.grad, self.precision > 0 or self.is_reused)

    def is_measured(self, p: Tensor) -> bool:
        """Return whether `p.grad` is still the tensor that was measured, clipped or not."""
        return p.grad is not None and self.gradient.is_same(p.grad)

    def is_unmeasured(self, p: Tensor) -> bool:
        """Return whether the parameter has a gradient of which nothing was measured."""
        if p.grad is None or self.total is not None or not p.requires_grad:
            return False
        return not is_zero(p.grad)

    def read(self, p: Tensor, stepping: bool = False) -> Moments | None:
        """Return the moments; None if there are none, or if the gradient was cleared.

        An optimizer that is `stepping` uses p.grad as it is: zeros that were measured as zeros
        still count as measured, also if a clip or an unscaling wrote them again.
        """
        if self.in_window and not p.is_cpu:
            copy_shared_totals([self])
            finish_squares()
        total, square, grad = self.total, self.square, p.grad
        if self.count == 0 or total is None or square is None:
            return None
        stepping = stepping and grad is not None
        # on a device, the step finds a cleared gradient by the products that it fetches
        cleared = (p.is_cpu or not stepping) and self.gradient.is_cleared(grad, total, search=False)
        if cleared and not (stepping and is_zero(total)):
            return None
        self.square_was_read = True
        return Moments(self.count, self.groups, total, square, self.reduction)
