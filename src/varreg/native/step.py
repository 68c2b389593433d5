"""λ, what it is made of, and the step that it scales, in one pass over memory.

Twins, and definitions: `Moments`, varreg/regularizer.py, and varreg/optim/.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varreg.native import library

_KINDS = {"sum": 0, "mean": 1, "harmonic": 2}
_FORMS = {"rational": 0, "affine": 1}
_INCREMENTS = {"gradient": 0, "heavy ball": 1, "nesterov": 2, "adam": 3}
_BLOCK = 512  # as in step.h
_TASK = struct.Struct("5q12P15d")  # as in step.h
_PLAIN = (Tensor, torch.nn.Parameter)


def lambdas(
    variance: Tensor,
    delta: Tensor,
    history: Tensor,
    count: Tensor,
    present: Tensor | None,
    limit: float | None,
    options: Mapping[str, Any],
) -> Tensor | None:
    """λ, with ρ entered into its history; None where it takes PyTorch: another device, form or history, or memory in different orders."""
    tensors = (variance, delta, history, count, *(() if present is None else (present,)))
    if not knows(options) or not serves(*tensors):
        return None
    lam = torch.empty_like(delta)
    kinds = (int(present is not None), *_kinds(options))
    library.run(
        "lambda", (*tensors[:4], variance if present is None else present, lam), kinds, _numbers(options, limit), lam.numel()
    )
    return lam


def variance(total: Tensor, square: Tensor, m: int, factor: float, rounding: float, out: Tensor) -> bool:
    """(m·W − S²)·factor into `out`, and 0 where that is no more than rounding; False where it takes PyTorch."""
    if not serves(total, square, out):
        return False
    library.run("variance", (total, square, out), (), (m, factor, rounding), out.numel())
    return True


def compare(rows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[float, ...]]:
    """S·S, g·S, g·g and ΣW of each (S, g, W), all of which must be served; in double precision, and in one pass for all of one type."""
    out: list[tuple[float, ...]] = []
    for dtype, alike in groupby(rows, lambda row: row[0].dtype):
        tensors = list(alike)
        sizes = [S.numel() for S, _, _ in tensors]
        sums = torch.empty(sum(-(-n // _BLOCK) for n in sizes), 4, dtype=torch.float64)  # for each block; then, for each tensor
        room = sums.data_ptr()
        tasks = [_task(n, (), (*(t.data_ptr() for t in row), room), ()) for n, row in zip(sizes, tensors, strict=True)]
        library.run_tasks("compare", dtype, tasks, sum(sizes))
        out += map(tuple, sums[: len(tasks)].tolist())
    return out


class Update(NamedTuple):
    """What `update` needs to know of a parameter whose base step is done."""

    total: Tensor
    square: Tensor
    x: Tensor
    """The parameter, to be changed."""
    history: Tensor
    number: Tensor
    """How many values are in the history."""
    lam: Tensor
    """Where λ is written to."""
    grad: Tensor
    """As the base saw it."""
    own: tuple[Tensor, ...]
    """What the increment is made of, in the order of step.h."""
    increment: str
    options: Mapping[str, Any]
    limit: float | None
    variance: tuple[float, float, float]
    """m, κ²(m−1)/(K−1), and how much of m·W is rounding."""
    lr: float
    numbers: tuple[float, ...]
    """The increment's, in the order of step.h."""


def update(updates: Iterable[Update]) -> None:
    """Variance, increment, λ with its history, and x + λ(x' − x): all that comes after the base's step, in one pass over memory."""
    for dtype, alike in groupby(updates, lambda u: u.x.dtype):
        tasks, elements = [], 0
        for u in alike:
            n = u.x.numel()
            elements += n
            kinds = (_INCREMENTS[u.increment], *_kinds(u.options))
            tensors = (u.total, u.square, u.x, u.history, u.number, u.lam, u.grad, *u.own)
            numbers = (*u.variance, *_numbers(u.options, u.limit), u.lr, *u.numbers)
            tasks.append(_task(n, kinds, tuple(t.data_ptr() for t in tensors), numbers))
        library.run_tasks("update", dtype, tasks, elements)


def knows(options: Mapping[str, Any]) -> bool:
    """Is there a kernel for this form and history?"""
    return options["history"] in _KINDS and options["form"] in _FORMS


def serves(*tensors: Tensor) -> bool:
    """Can the library serve these: alike, and in one order?"""
    shape = tensors[0].shape
    return all(type(t) in _PLAIN and t.shape == shape and t.is_contiguous() for t in tensors) and library.serves(*tensors)


def _kinds(options: Mapping[str, Any]) -> tuple[int, int, int]:
    return _KINDS[options["history"]], _FORMS[options["form"]], int(options["scale_free"])


def _numbers(options: Mapping[str, Any], limit: float | None) -> tuple[float, ...]:
    from varreg.regularizer import bounds, lambda0_of

    low, high = bounds(options)
    s = float(options["s"])
    return (
        s,
        lambda0_of(s) / 2,
        math.inf if limit is None else limit,
        -math.inf if low is None else low,
        math.inf if high is None else high,
    )


def _task(n: int, kinds: tuple[int, ...], pointers: tuple[int, ...], numbers: tuple[float, ...]) -> bytes:
    """A `Task` of step.h; what it has no use for is 0."""
    fill = (0,) * 15
    return _TASK.pack(n, *(kinds + fill)[:4], *(pointers + fill)[:12], *(numbers + fill)[:15])
