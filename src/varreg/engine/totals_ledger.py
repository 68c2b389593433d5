"""A ledger that keeps only sums over the elements of a parameter: |S|² and ΣW.

S itself is `p.grad`: its length is read when a window closes. The ledger keeps an S of its own only
if `p.grad` may differ from S: hooks may change it, it began before the sums, it is in half
precision, or it is on a device. It also keeps S for a window that compares S with `p.grad`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from varreg import _torch, native
from varreg.devices import has_float64
from varreg.engine.contribution import Contribution, Weight, stat_dtype
from varreg.engine.ledger import Ledger
from varreg.engine.mechanisms.pull_back import eps_of
from varreg.engine.total_squares import (
    has_kernels,
    measured,
    measured_with_bias,
    precise,
)
from varreg.engine.totals import Totals
from varreg.errors import MeasurementError
from varreg.few_launches import by_type
from varreg.thresholds import LARGEST_SQUARE, SAME_LENGTH, SMALLEST_SQUARE

_ZERO, _ONE = torch.zeros((), device="cpu"), torch.ones((), device="cpu")


class TotalsLedger(Ledger):
    """The sums over the elements of one parameter. `total` and `square` only say whether there are
    sums, and whether S is zero.
    """

    sums_only = True
    is_check_missed = False  # True: a comparison of p.grad with S was due, but S was not kept
    is_overwritten = False  # True: S was lost, since torch wrote to the memory that it shared

    def restart(self, is_complete: bool = True) -> None:
        super().restart(is_complete)
        self.kept_total: Tensor | None = None  # S, where it is kept
        self._version = 0  # of S when it was kept
        self.spread: Tensor | float = 0.0  # ΣW
        self.length1: Tensor | float = 0.0  # Σ|S_p|
        self.length2: Tensor | float = 0.0  # |S|²

    def open(self, p: Tensor) -> None:
        super().open(p)
        is_plain = (
            p.is_cpu
            and self.is_complete
            and p.dtype in (torch.float32, torch.float64)
            and not (p._backward_hooks or p._post_accumulate_grad_hooks or self.is_used_unseen)
        )
        if self.total is None:
            self.by_gradient = is_plain
            self.is_check_due |= self.is_check_missed
            self.is_check_missed = False
        elif self.by_gradient:
            if not (is_plain and self._is_unchanged(p.grad)):
                self._refuse_changed()
            self.end_check()  # if an earlier window had an error
        self.keeps = not self.by_gradient or (self.is_check_due and self.total is None)

    def sums_with_bias(self, weight: Weight, is_beside: bool = False) -> tuple[Any, Any]:
        if self.must_wait or self.recorder is not None:
            return None, None
        return measured_with_bias(weight, self.keeps or not is_beside)

    def _add_sums(self, contribution: Contribution, sums: Any = None) -> Tensor | None:
        """Add ΣW of a window's contributions, and S where it is kept, and count its samples. Return
        S; None if `add` has returned it before, use by use. `sums` are S and ΣW, if known.
        """
        needs_total = self.keeps or not self.pending
        total: Tensor | None
        if self.recorder is None and sums is not None:
            total, square = sums
        elif self.recorder is None:
            total, square = measured(contribution, needs_total)
        else:
            total = contribution.total() if needs_total else None
            square = self.recorder.record(self, contribution).sum()
        if isinstance(square, float) or square.is_cpu:
            square = float(square)
            least = SMALLEST_SQUARE * contribution.shape.numel()
            if not least <= square <= LARGEST_SQUARE:
                S = contribution.total() if total is None else total
                if S is not None and bool(S.any()):
                    square = self._in_float64(contribution)
        is_first = isinstance(self.spread, float) and not self.spread
        self.spread = square if is_first else self.spread + square
        if self.keeps and total is not None:
            # for a comparison alone, share the memory of S, which becomes p.grad
            shares = self.by_gradient and not self.is_overwritten
            kept = total.detach() if shares else total
            self.kept_total = kept if self.kept_total is None else self.kept_total + total
            self._version = self.kept_total._version
        if not (self.arriving and self.arriving <= self.forwards):
            self.count += contribution.partition.batch
            self.groups += contribution.partition.groups
        return total

    def _in_float64(self, contribution: Contribution) -> float:
        """Return ΣW of contributions whose squares leave the range of float32."""
        if self.recorder is None:
            return float(precise(contribution))
        self.norms.pop()
        self.is_float64 = True
        squares = self.recorder.record(self, contribution)
        self.is_float64 = False
        return float(squares.sum())

    def close(self, p: Tensor) -> None:
        if self.in_window:
            S = self.kept_total
            if self.by_gradient and S is not None and S._version != self._version:
                self.kept_total, self.is_overwritten = None, True
            self.is_check_missed |= self.is_check_due and self.kept_total is None
        super().close(p)

    def end_check(self) -> None:
        """Drop S if it was kept for a comparison alone: its memory may be p.grad's, which users
        clear.
        """
        if self.by_gradient:
            self.kept_total = None

    def note_lengths(self, length1: float, length2: float) -> None:
        """Note Σ|S_p| and |S|²."""
        self.length1, self.length2 = length1, length2
        self.total, self.square = _ONE if length2 else _ZERO, _ONE

    def _is_unchanged(self, grad: Tensor | None) -> bool:
        """Return whether a gradient is still as long as it was when it was measured."""
        return grad is not None and math.isclose(
            lengths([grad])[0][1], self.length2, rel_tol=SAME_LENGTH, abs_tol=0.0
        )

    def read(self, p: Tensor, stepping: bool = False) -> Any:
        """Return the totals; None if there are none, or if the gradient was cleared."""
        if self.in_window:
            if self.by_gradient:
                raise MeasurementError(
                    f"varreg: moments of '{self.name}' were read during backward(). With "
                    "per='model' or per='tensor' they are complete when backward() has returned."
                )
            sum_up([(p, self)])
        m = super().read(p, stepping)
        if m is None:
            return None
        spread = self.spread
        # it is not known yet whether squares left their range; a step looks at the number itself
        if isinstance(spread, Tensor) and not stepping:
            known = (spread >= SMALLEST_SQUARE * p.numel()) & (spread <= LARGEST_SQUARE)
            spread = spread.where(known | ((spread == 0) & (m.total == 0)), torch.nan)
        rounding = eps_of(stat_dtype(p.dtype))
        return Totals(
            *(m.count, m.groups, self.length2, spread, self.reduction),
            *(p.shape, rounding, self.name),
        )

    def _refuse_changed(self) -> NoReturn:
        raise MeasurementError(
            f"varreg: the gradient of '{self.name}' was changed, or got a hook, between two "
            "backward() calls that accumulate it. With per='model' or per='tensor' varreg takes "
            "the sum of all contributions from p.grad. Clip and unscale after the last of them, or "
            "observe the model with varreg.observe(model)."
        )


def sum_up(reached: Iterable[tuple[Tensor, Ledger]]) -> None:
    """Note |S|² of parameters and their ledgers, those of one type together: on the CPU in one
    native call, on a device in few launches.
    """
    on_cpu: dict[torch.dtype, list[tuple[TotalsLedger, Tensor]]] = {}
    on_devices: dict[int, tuple[TotalsLedger, Tensor]] = {}
    for p, ledger in reached:
        if isinstance(ledger, TotalsLedger):
            S = p.grad if ledger.by_gradient and not ledger.in_window else ledger.kept_total
            if S is None:
                continue
            if S.is_cpu:
                on_cpu.setdefault(S.dtype, []).append((ledger, S))
            else:
                on_devices[id(S)] = ledger, S
    for pairs in on_cpu.values():
        for (ledger, _), both in zip(pairs, lengths([S for _, S in pairs]), strict=True):
            ledger.note_lengths(*both)
    for alike in by_type([S for _, S in on_devices.values()]):
        sums = lengths_on_device(alike).unbind(1)
        for S, (length1, length2) in zip(alike, map(torch.unbind, sums), strict=True):
            ledger, _ = on_devices[id(S)]
            ledger.length1, ledger.length2 = length1, length2
            ledger.total = ledger.square = length2


def lengths_on_device(tensors: list[Tensor]) -> Tensor:
    """Return Σ|t_p| and |t|² of tensors of one type and device, `[2, n]`, in float64 if the device
    has it.
    """
    wide = torch.float64 if has_float64(tensors[0].device) else None
    norms = [norm for n in (1, 2) for norm in _torch.foreach_norm(tensors, n, wide)]
    both = torch.stack(norms).view(2, -1)
    both[1].square_()
    return both


def lengths(tensors: list[Tensor]) -> list[tuple[float, float]]:
    """Return Σ|t_p| and |t|² of tensors on the CPU, of one type, summed up in float64."""
    found = native.lengths(tensors) if has_kernels() else None
    if found is None and len(tensors) > 1:  # native code may know some of them
        return [lengths([t])[0] for t in tensors]
    if found is None:
        return list(map(_lengths_by_torch, tensors))
    # where squares leave the range of float32, they are computed in float64
    return [
        both if both[0] == 0 or SMALLEST_SQUARE < both[1] < LARGEST_SQUARE else _lengths_by_torch(t)
        for t, both in zip(tensors, found, strict=True)
    ]


def _lengths_by_torch(t: Tensor) -> tuple[float, float]:
    size, root = (float(torch.linalg.vector_norm(t, n, dtype=torch.float64)) for n in (1, 2))
    return size, root**2
