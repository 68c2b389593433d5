"""Deferred checks: results that are on a device are fetched later, all of them together.

On the CPU a check is made at once. On another device, reading a value means to wait until the
device has finished all earlier work. So the result stays on the device until `fetch` transfers it
together with other values: in an optimizer's step(), or when moments are read. A failed check still
raises, only later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from varreg.thresholds import MOST_CHECKS

if TYPE_CHECKING:
    from varreg.engine.ledger import Ledger

PENDING: list[tuple[Tensor, Callable[[], None]]] = []
"""Checks whose values are still on a device, each with the function to call if it is true."""


def check(is_wrong: Tensor, complain: Callable[[], None]) -> None:
    """Call `complain`, which raises, if a tensor of one value is true: at once on the CPU,
    otherwise at the next `fetch`.
    """
    if is_wrong.is_cpu:
        if bool(is_wrong):
            complain()
        return
    PENDING.append((is_wrong, complain))
    if len(PENDING) > MOST_CHECKS:  # neither step() nor moments() has fetched them
        fetch([])


def fetch(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the values of tensors, with one wait for each device. Make all pending checks."""
    checks = PENDING.copy()
    del PENDING[: len(checks)]
    flags = [flag.reshape(1) for flag, _ in checks]
    by_device: dict[torch.device, list[int]] = {}
    every = [*(t.reshape(-1) for t in tensors), *flags]
    for i, t in enumerate(every):
        by_device.setdefault(t.device, []).append(i)
    values: list[list[float]] = [[]] * len(every)
    for places in by_device.values():
        for i, row in zip(places, _fetch_from_one([every[i] for i in places]), strict=True):
            values[i] = row
    for (_, complain), (is_wrong,) in zip(checks, values[len(tensors) :], strict=True):
        if is_wrong:
            complain()
    return values[: len(tensors)]


def _fetch_from_one(tensors: list[Tensor]) -> list[list[float]]:
    """Return the values of flat tensors of one device, in one transfer."""
    dtype = torch.float32
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    joined = (
        torch.cat([t.to(dtype) for t in tensors]) if len(tensors) > 1 else tensors[0]
    ).tolist()
    rows, start = [], 0
    for t in tensors:
        rows.append(joined[start : start + len(t)])
        start += len(t)
    return rows


def take_numbers(ledgers: Iterable[Ledger]) -> None:
    """Give shared ledgers the counts of all processes, which the reductions left on the device.
    There is one wait for all of them.
    """
    waiting = [ledger for ledger in ledgers if ledger.unread]
    if waiting:
        values = iter(fetch([numbers for ledger in waiting for numbers, _ in ledger.unread]))
        for ledger in waiting:
            ledger.take_numbers([next(values) for _ in ledger.unread])  # type: ignore[attr-defined]
