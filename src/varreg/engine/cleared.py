"""Find gradients that were cleared, and restart their sums.

Before a backward writes to any gradient, `Window.restart_cleared` calls `restart_if_cleared` of
every ledger, whose `GradientWatch` finds out whether the gradient was cleared since the last
backward. A gradient is cleared if it is None now, or zero and written to. On the CPU each gradient
is checked by itself; on a device, all of them are checked at once. A parameter that has no gradient
yet gives no evidence: then the gradients of the other parameters decide.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.engine import deferred
from varreg.errors import MeasurementError
from varreg.thresholds import PEEK

if TYPE_CHECKING:
    from varreg.engine.ledger import Ledger


def is_zero(t: Tensor) -> bool:
    """Return whether every element is zero."""
    if t.numel() > PEEK and t.is_contiguous() and bool(t.view(-1)[:PEEK].any()):
        return False
    return not bool(t.any())


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value in each of several tensors of one device and type."""
    return torch.stack(_torch.foreach_norm([t.detach() for t in tensors], torch.inf))


def look_on_devices(parameters: Iterable[tuple[Tensor, Ledger]]) -> dict[int, bool]:
    """Look at gradients on devices that were written to since the last window. Return whether each
    is zero, by the id of its parameter. There is one wait for all of them.

    Gradients without a known write are assumed not to be cleared. A later check confirms that.
    """
    written, kept = [], []
    for p, ledger in parameters:
        watch = ledger.gradient
        if p.grad is None or watch.trace is None or p.is_cpu:
            continue
        if watch.is_written(p.grad):
            written.append((id(p), watch.part(p.grad)))
        elif not watch.was_zero and ledger.total is not None:
            kept.append((ledger.name, watch.part(p.grad), ledger.total))
    for same in _by_type(kept, 1):
        names, grads, totals = zip(*same, strict=True)
        gone = (largest(grads) == 0) & (largest(totals) != 0)
        deferred.check(gone.any(), functools.partial(_refuse_cleared, names))
    zeros: dict[int, bool] = {}
    for same in _by_type(written, 1):
        keys, grads = zip(*same, strict=True)
        (sizes,) = deferred.fetch([largest(grads)])
        zeros.update(zip(keys, (size == 0 for size in sizes), strict=True))
    return zeros


def judge_by_others(ledgers: Sequence[Ledger], waiting: Iterable[Ledger]) -> None:
    """Decide, for ledgers whose parameter has no gradient, whether gradients were cleared.

    Such a parameter gives no evidence itself, so the other parameters decide. If none of them kept
    its gradient, the sums restart. If some were cleared and some were not, the ledger is marked as
    unclear. Parameters that were never cleared, since no optimizer has them, do not count.
    """
    cleared = [ledger for ledger in ledgers if ledger.was_cleared]
    kept = [ledger for ledger in ledgers if ledger.gradient.trace is not None]
    if cleared:
        kept = [ledger for ledger in kept if ledger.ever_cleared]
    for ledger in waiting:
        if not kept:
            ledger.restart()
        elif cleared:
            ledger.unclear = cleared[0].name, kept[0].name


def refuse_unclear(name: str, count: int, cleared: str, not_cleared: str) -> None:
    """Refuse the first gradient of a parameter after samples that did not reach it: it is not known
    whether these belong to the same accumulation.
    """
    raise MeasurementError(
        f"varreg: '{name}' has its first gradient after {count} samples that did "
        "not reach it, and varreg cannot tell whether they belong to the same "
        f"accumulation: the gradient of '{cleared}' was cleared since then, that of "
        f"'{not_cleared}' was not. Clear all gradients together, or use "
        "zero_grad(set_to_none=False), which leaves a trace."
    )


def _by_type(rows: list[Any], at: int) -> list[list[Any]]:
    """Return the rows grouped into lists by the device and type of their tensor at position
    `at`.
    """
    same: dict[Any, list[Any]] = {}
    for row in rows:
        same.setdefault((row[at].device, row[at].dtype), []).append(row)
    return list(same.values())


def _refuse_cleared(names: Sequence[str]) -> None:
    raise MeasurementError(
        f"varreg: gradients of {', '.join(names[:3])}, or of others, were cleared between two "
        "backward passes in a way that varreg notices too late on a device (for example, "
        "p.grad.data.zero_()). Clear them with optimizer.zero_grad()."
    )
