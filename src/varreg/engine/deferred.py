"""Checks whose answer lies on a device: all of them are asked for together, and late.

On the CPU a check is made at once. On another device, to look at a value is to wait for all that
the device was given before. So the answer stays there until `fetch` brings it, with whatever else
is wanted: in an optimizer's step(), or when moments are read. What is wrong is an error all the
same, only later.
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
    """Call `complain`, which raises, if a single value is true: at once on the CPU, else when
    values are next fetched.
    """
    if is_wrong.is_cpu:
        if bool(is_wrong):
            complain()
        return
    PENDING.append((is_wrong, complain))
    if len(PENDING) > MOST_CHECKS:  # no step or moments() fetched them
        fetch([])


def fetch(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the values of some tensors, waiting once for each device; and make all checks that
    are pending.
    """
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
    """Let ledgers that are shared by several processes have the numbers of all of them, which the
    reductions left on the device: one wait for all.
    """
    waiting = [ledger for ledger in ledgers if ledger.unread]
    if waiting:
        values = iter(fetch([numbers for ledger in waiting for numbers, _ in ledger.unread]))
        for ledger in waiting:
            ledger.take_numbers([next(values) for _ in ledger.unread])  # type: ignore[attr-defined]
