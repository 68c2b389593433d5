"""The window: one backward pass, the parameters that it reached, and its end.

Before a backward writes to any gradient, `restart_cleared` restarts the sums of all gradients that
were cleared (cleared.py).
"""

from __future__ import annotations

import functools
import math
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from varreg import _torch
from varreg.devices import refuse_fake_mode
from varreg.engine import deferred, processes
from varreg.engine.cleared import judge_by_others, look_on_devices
from varreg.engine.ledger import Ledger
from varreg.engine.on_device import copy_sums
from varreg.engine.parameters import Parameters, warn_unmeasured
from varreg.engine.partition import Partition
from varreg.engine.totals_ledger import TotalsLedger, sum_up
from varreg.engine.trace.eager import runs_as_it_is, uncompiled
from varreg.errors import MeasurementError
from varreg.few_launches import finish_squares
from varreg.thresholds import COARSE, UNSEEN_AT_MOST, UNSEEN_ROUNDING


class Window:
    """The running backward pass. The window opens when the first contribution arrives, and closes
    when the pass ends. Then it is ready for the next pass.
    """

    def __init__(self, parameters: Parameters):
        self.parameters = parameters
        self.last_partition: Partition | None = None  # of the last forward's batch
        # marks of inputs that a re-entrant checkpoint needs again in this backward
        self.recalled: dict[nn.Module, list[list[Any]]] = {}
        self.number = 0  # number of closed windows
        self._restart()

    def _restart(self) -> None:
        self._reached: dict[int, tuple[Tensor, Ledger]] = {}  # parameters that a use reached
        self._counted: set[int] = set()  # ids of parameters without a use, already counted
        self._partition: Partition | None = None  # the partition of the batch
        self._forwards: set[int] = set()  # numbers of forwards whose uses arrived; 0: a checkpoint
        self._are_checked = False  # True: cleared gradients were found, and their sums restarted
        self._is_queued = False  # True: the running backward will close the window when it ends
        self._thread: int | None = None  # runs the parts of this backward that are on the CPU

    @property
    def is_open(self) -> bool:
        """Return whether a backward runs, or failed before it could close the window."""
        return self._is_queued or bool(self._reached)

    def open(self, leaves: list[tuple[Tensor, Ledger]], partition: Partition, forward: int) -> None:
        """Prepare for contributions to these parameters, from a use in the forward with this
        number. The number 0 stands for a use that a checkpoint runs again.
        """
        if not self._is_queued:
            if _torch.dispatch_modes():
                refuse_fake_mode("backward()")
            self.queue()
        if leaves[0][0].is_cpu:  # a device has a thread of its own
            here = get_ident()
            if self._thread is None:
                self._thread = here
            elif self._thread != here:
                raise MeasurementError(_two_threads(leaves[0][1].name))
        if not self._are_checked:
            self.restart_cleared()
        if self._partition is None:
            self._partition = partition
        elif self._partition != partition:
            raise MeasurementError(
                f"varreg: in one backward(), '{leaves[0][1].name}' was used for {partition.batch} "
                f"samples, and another parameter or use for {self._partition.batch}: samples "
                "cannot be matched. Call backward() once for each batch. If a layer's input folds "
                "other dimensions into the batch, fold them inside of the model's own forward()."
            )
        self._forwards.add(forward)
        for t, ledger in leaves:
            p = self.parameters.shard_of(t) if self.parameters.gathered else t
            if id(p) not in self._reached:
                ledger.open(p)
                self._reached[id(p)] = p, ledger
            if forward:
                if forward in ledger.used:
                    raise MeasurementError(_second_backward(ledger.name))
                ledger.arriving.add(forward)

    def claim_partition(self, p: Tensor) -> Partition | None:
        """Mark a parameter without a use in this backward as counted. Return the partition of the
        batch the first time; None after that, or if the parameter has a use.
        """
        if id(p) in self._reached or id(p) in self._counted:
            return None
        self.queue()
        self.restart_cleared()
        self._counted.add(id(p))
        return self._partition or self.last_partition

    def restart_cleared(self) -> None:
        """Restart the sums of all parameters whose gradients were cleared: once, before this
        backward writes to any gradient.
        """
        if not self._are_checked:
            self._are_checked = True
            waiting = []
            zeros: dict[int, bool] = {}
            for p, _ in self.parameters.known.values():
                if not p.is_cpu:
                    zeros = look_on_devices(self.parameters.known.values())
                    break
            for key, (p, ledger) in self.parameters.known.items():
                if ledger.restart_if_cleared(p, zeros.get(key)):
                    waiting.append(ledger)
            if waiting:
                judge_by_others([ledger for _, ledger in self.parameters], waiting)

    def check_again(self) -> None:
        """Make the next backward check for cleared gradients, though they were checked before."""
        self._are_checked = False

    def queue(self) -> None:
        """Close the window when the running backward pass ends; if passes are nested, when the
        outermost one ends.
        """
        if not self._is_queued:
            _torch.queue_callback(self._close)
            self._is_queued = True

    def abort(self) -> None:
        """Close the window of a backward pass that failed. Contributions that arrived stay counted,
        as their gradients stay in `p.grad`.
        """
        self._close(check=False)

    @runs_as_it_is  # else a compiled training step would compile it
    def _close(self, check: bool = True) -> None:
        if is_dynamo_compiling() or _torch.get_eval_frame_callback() is not None:
            _close_uncompiled(self, check)
            return
        reached, counted, partition = self._reached, self._counted, self._partition
        forwards = self._forwards - {0}
        self._restart()  # first, since the checks below may raise
        self.recalled = {}
        self.number += 1
        others: list[tuple[Tensor, Ledger]] = []
        measured: set[int] = set()  # ids of parameters whose gradient is S itself
        # also for parameters that this backward did not reach: the next backward checks again
        for key, (p, ledger) in self.parameters.known.items():
            ledger.is_checked = ledger.was_cleared = False
            if key not in reached:
                others.append((p, ledger))
        on_device = False
        for p, ledger in reached.values():
            ledger.close(p)
            on_device |= not p.is_cpu
        if on_device:
            finish_squares()
        if self.parameters.ledger_type is TotalsLedger:
            sum_up(reached.values())
        if on_device:
            known = self.parameters.known
            measured = copy_sums([known[key] for key in known if key in reached])
        for p, ledger in others:
            if id(p) in counted:
                ledger.close(p)
            elif partition is not None:
                ledger.count_without_use(p, partition, forwards)
        if others and others[0][0].is_cpu:  # on a device, moments() and step() warn
            warn_unmeasured(others)
        if processes.are_several() and _torch.current_graph_task() != -1:
            _torch.queue_callback(self._note_reduced_gradients)
        if check and reached:
            self._check_nothing_unseen(list(reached.values()), measured)

    def _note_reduced_gradients(self) -> None:
        """Note the state of all gradients after the last writes of DDP and FSDP in a backward."""
        for p, ledger in self.parameters:
            ledger.gradient.note(p.grad, ledger.precision > 0 or ledger.is_reused)

    def _check_nothing_unseen(
        self, reached: list[tuple[Tensor, Ledger]], measured: set[int]
    ) -> None:
        """Check that p.grad has no part that was not measured: for every parameter in its first
        window, then for one parameter in each window, in turn. Ids in `measured` need no check.
        """
        due = []
        for p, ledger in reached:
            if ledger.is_check_due:
                due.append((p, ledger))
                ledger.is_check_due = ledger.is_used_unseen
        # the next parameter in turn: each window compares one, and many windows compare all
        reached[self.number % len(reached)][1].is_check_due = True
        for p, ledger in due:
            if id(p) not in measured:
                _refuse_unseen_gradient(p, ledger)
            if isinstance(ledger, TotalsLedger):
                ledger.end_check()


_close_uncompiled = uncompiled(Window._close)


def _two_threads(name: str) -> str:
    return (
        f"varreg: at '{name}', two threads run a backward() of one observed model at once, and "
        "their samples would be counted together. Let one thread at a time call backward() of a "
        "model. Several models may train in several threads."
    )


def _second_backward(name: str) -> str:
    return (
        "varreg: backward() ran a second time through the same forward pass, and gradients of "
        f"'{name}' were not cleared in between: varreg cannot add up the contributions of one "
        "sample to both. Add the losses and call backward() once."
    )


def _refuse_unseen_gradient(p: Tensor, ledger: Ledger) -> None:
    """Refuse a gradient that has a part that was not measured: varreg does not see a use of the
    parameter outside of the model's forward.

    Hooks on the parameter and reductions over ranks change `p.grad` on purpose: then there is no
    check.
    """
    total = ledger.kept_total if isinstance(ledger, TotalsLedger) else ledger.total
    if p.grad is None or total is None or not ledger.is_complete or p._backward_hooks:
        return
    if processes.are_several():
        return
    grad = p.grad.to(total.dtype)
    if total.is_cpu and torch.equal(total, grad):
        return  # the usual case, in one pass over both tensors
    eps = max(torch.finfo(p.grad.dtype).eps, ledger.precision)
    if eps > COARSE and ledger.is_reused:
        # several uses may cancel in each sample, and the sums do not show that: rounding has no
        # bound
        return
    gap, sizes = (total - grad).norm(), (grad.norm(), total.norm())
    slack = min(UNSEEN_AT_MOST, math.sqrt(eps))  # an unmeasured part up to here stays unnoticed
    allowed = slack * torch.maximum(*sizes) + UNSEEN_ROUNDING[0] * _rounding(ledger, eps)
    deferred.check(
        torch.isfinite(gap) & (gap > allowed),
        functools.partial(_refuse_gradient_from_outside, ledger.name, *sizes),
    )


def _refuse_gradient_from_outside(name: str, size: Tensor, measured: Tensor) -> None:
    raise MeasurementError(
        f"varreg: '{name}' received a gradient from outside of the observed model's "
        f"forward (the gradient's norm is {float(size):.4g}; that of the measured part is "
        f"{float(measured):.4g}). Move that use of the parameter into a forward() of the "
        "model, or clear gradients before the first observed backward(). For a penalty on "
        "weights, use the optimizer's weight_decay: a penalty belongs to no sample."
    )


def _rounding(ledger: Ledger, eps: float) -> Tensor:
    """Return how far rounding alone may move a gradient from the measured sum.

    The bound is relative to the size of the terms, since the sum itself may be small if terms
    cancel. Terms of different samples have the size √(m·ΣW). If uses, or pieces of a pull-back, may
    cancel within a sample, their size is added.
    """
    assert ledger.square is not None
    cancelled = UNSEEN_ROUNDING[1] * ledger.added_size
    return eps * ((ledger.count * ledger.square.sum()).sqrt() + cancelled)
