"""λ, what it is made of, and the step that it scales, in one pass over memory.

Twins, and definitions: `Moments`, varreg/regularizer.py, and varreg/optim/.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from varreg.native import library

_KINDS = {"sum": 0, "mean": 1, "harmonic": 2}
_FORMS = {"rational": 0, "affine": 1}
_INCREMENTS = {"gradient": 0, "heavy ball": 1, "nesterov": 2, "adam": 3}
_BLOCK = 512  # as in step.h
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
    given = (*tensors[:4], variance if present is None else present, lam)
    sizes = lam.numel(), int(present is not None), *kinds(options)
    library.call("lambda", given, sizes, numbers(options, limit), library.threads_for(lam.numel()))
    return lam


def variance(total: Tensor, square: Tensor, m: int, factor: float, rounding: float, out: Tensor) -> bool:
    """(m·W − S²)·factor into `out`, and 0 where that is no more than rounding; False where it takes PyTorch."""
    if not serves(total, square, out):
        return False
    library.call("variance", (total, square, out), (out.numel(),), (m, factor, rounding), library.threads_for(out.numel()))
    return True


def compare(rows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[list[float]]:
    """S·S, g·S, g·g and ΣW of each (S, g, W), all of which must be served; in double precision, and in one pass for all of one type."""
    out: list[list[float]] = []
    for dtype, alike in groupby(rows, lambda row: row[0].dtype):
        tensors = list(alike)
        sizes = [S.numel() for S, _, _ in tensors]
        sums = torch.empty(sum([-(-n // _BLOCK) for n in sizes]), 4, dtype=torch.float64)  # for each block; then, for each tensor
        room = sums.data_ptr()
        pack = _layout(0, 4, 0).pack
        tasks = [pack(n, S.data_ptr(), g.data_ptr(), W.data_ptr(), room) for n, (S, g, W) in zip(sizes, tensors, strict=True)]
        library.call_for_all("compare", dtype, tasks, library.threads_for(sum(sizes)))
        out += sums[: len(tasks)].tolist()
    return out


Update = tuple[tuple[Tensor, ...], tuple[int, ...], tuple[float, ...]]
"""What `update` needs of a parameter whose base step is done, in the order of step.h: S, W, x, the history and its count, λ, the gradient, the
number of steps, and what the increment is made of; `kinds`; and the numbers of variance, λ and increment."""


def update(updates: Iterable[Update]) -> None:
    """Variance, increment, λ with its history, and x + λ(x' − x): all that comes after the base's step, in one pass over memory."""
    for dtype, alike in groupby(updates, lambda u: u[0][0].dtype):
        tasks, elements = [], 0
        for tensors, kinds, numbers in alike:
            elements += (n := tensors[0].numel())
            pack = _layout(len(kinds), len(tensors), len(numbers)).pack
            tasks.append(pack(n, *kinds, *[t.data_ptr() for t in tensors], *numbers))
        library.call_for_all("update", dtype, tasks, library.threads_for(elements))


def knows(options: Mapping[str, Any]) -> bool:
    """Is there a kernel for this form and history?"""
    return options["history"] in _KINDS and options["form"] in _FORMS


def serves(*tensors: Tensor) -> bool:
    """Can the library serve these: alike, and in one order?"""
    shape, dtype = tensors[0].shape, tensors[0].dtype
    for t in tensors:  # for every parameter at every step: no generator
        if t.dtype != dtype or t.shape != shape or not t.is_contiguous() or type(t) not in _PLAIN or not t.is_cpu:
            return False
    return library.serves(tensors[0])


def kinds(options: Mapping[str, Any], increment: str | None = None) -> tuple[int, ...]:
    """An increment, history, form, and whether it is free of scale."""
    first = () if increment is None else (_INCREMENTS[increment],)
    return *first, _KINDS[options["history"]], _FORMS[options["form"]], int(options["scale_free"])


def numbers(options: Mapping[str, Any], limit: float | None) -> tuple[float, ...]:
    """What λ is computed with: s, λ₀/2, and the bounds of ρ and λ."""
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


@functools.cache
def _layout(kinds: int, pointers: int, numbers: int) -> struct.Struct:
    """A `Task` of step.h. What it has no use for is 0."""
    return struct.Struct(f"q{kinds}q{8 * (4 - kinds)}x{pointers}q{8 * (13 - pointers)}x{numbers}d{8 * (19 - numbers)}x")
