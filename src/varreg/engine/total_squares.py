"""S and ΣW = Σ_i |c_i|² of contributions. Where that saves time, W itself, with a number for each
element, is not computed.

Letters as in contribution.py. `squared` in sample_norms.py has |c_i|² of each sample.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varreg import native
from varreg.backends import BACKENDS
from varreg.devices import widest
from varreg.engine.combined import Scattered
from varreg.engine.contribution import (
    Bias,
    Contribution,
    Dense,
    Outer,
    Weight,
    stat_dtype,
)
from varreg.engine.rules.embedding import SparseRows
from varreg.engine.rules.linear import are_few
from varreg.engine.rules.normalization import Stacked
from varreg.engine.sample_norms import squared
from varreg.few_launches import finish_squares
from varreg.native import spread

TotalAndSpread = tuple[Tensor | None, Tensor | float]
"""S, and ΣW; S is None where it was not asked for, or for an empty batch."""


def has_kernels() -> bool:
    """Return whether native code serves the CPU."""
    kernels: object = BACKENDS["cpu"]
    return kernels is native


def precise(c: Contribution) -> Tensor | float:
    """Return ΣW in float64: the definition, a few samples at a time."""
    return sum((widest(chunk).square().sum() for _, chunk in c.chunks()), 0.0)


@functools.singledispatch
def measured(contribution: Any, with_total: bool) -> TotalAndSpread:
    """Return S, if it is wanted, and ΣW, in the fastest way for a kind of contribution."""
    return _in_chunks(contribution, with_total)


def _in_chunks(c: Contribution, with_total: bool) -> TotalAndSpread:
    """Return S and ΣW from the contributions of a few samples at a time."""
    total = None
    square: Tensor | float = 0.0
    for _, chunk in c.chunks():
        values = chunk.to(stat_dtype(chunk.dtype))
        if with_total:
            total = values.sum(0) if total is None else total.add_(values.sum(0))
        square = square + _sum_of_squares(values)
    return total, square


def _sum_of_squares(t: Tensor) -> Tensor:
    """Return Σ t² of all elements, in float64 if the device has it."""
    norm: Tensor = torch.linalg.vector_norm(t)
    return widest(norm).square()


@measured.register
def _(c: Dense, with_total: bool) -> TotalAndSpread:
    if not c.partition.batch:
        return None, 0.0
    values = c.values.to(stat_dtype(c.values.dtype))
    total = Dense(c.partition, values).total() if with_total else None
    found = native.lengths([values]) if values.is_cpu and has_kernels() else None
    return total, _sum_of_squares(values) if found is None else found[0][1]


@measured.register
def _(c: Weight, with_total: bool) -> TotalAndSpread:
    return measured_with_bias(c, with_total)[0]


@measured.register
def _(c: Bias, with_total: bool) -> TotalAndSpread:
    return measured(c.made, with_total)


@measured.register
def _(c: Scattered, with_total: bool) -> TotalAndSpread:
    total, square = measured(c.looked_up, with_total)
    return c.scatter(total), square  # each row is looked up once: nothing is added up


@measured.register
def _(c: SparseRows, with_total: bool) -> TotalAndSpread:
    if not c.partition.batch:
        return None, 0.0
    if c.shape[0] <= c.ids.numel():  # W has fewer rows than the samples looked up
        total, square, *_ = c.sums()
        assert square is not None
        return total, square.sum(dtype=widest(square).dtype)
    return c.total() if with_total else None, squared(c).sum()


# ---- weights, whose biases are measured in the same pass -----------------------------------------


@functools.singledispatch
def measured_with_bias(
    c: Any, with_total: bool = True
) -> tuple[TotalAndSpread, TotalAndSpread | None]:
    """Return S, if it is wanted, and ΣW of a weight; and S and ΣW of its bias, or None if there is
    no bias, or if it has to be measured by itself.
    """
    source = c.source()
    if source is None or source.is_cpu:
        both = c.sums_in_one_pass(spread) if has_kernels() and c.partition.batch else None
        if both is None:
            return _in_chunks(c, with_total), None
        weight: TotalAndSpread = both.total.view(c.shape), both.square.sum()
        return weight, None if both.bias is None else _summed_up(both.bias)
    (total, square, *copies), bias = c.sums_with_bias()
    if square is None:
        return (total, 0.0), None
    finish_squares()
    weight = copies[0] if copies else total, square.sum(dtype=widest(square).dtype)
    return weight, None if bias is None else _summed_up(bias)


def _summed_up(sums: Sequence[Tensor] | Tensor) -> TotalAndSpread:
    """Return S and ΣW, from S and W."""
    return sums[0], sums[1].sum(dtype=widest(sums[1]).dtype)


@measured_with_bias.register
def _(c: Stacked, with_total: bool = True) -> tuple[TotalAndSpread, TotalAndSpread | None]:
    return measured(Dense(c.partition, c.values[0]), with_total), None


@measured_with_bias.register
def _(c: Outer, with_total: bool = True) -> tuple[TotalAndSpread, TotalAndSpread | None]:
    dtype = stat_dtype(c.delta.dtype)
    if c.delta.dtype != dtype or c.a.dtype != dtype:
        c = Outer(c.partition, c.delta.to(dtype), c.a.to(dtype), c.shape, c.bias)
    (b, r, o), i = c.delta.shape, c.a.shape[2]
    if not b:
        return (None, 0.0), None
    is_native = r == 1 and c.delta.is_cpu and has_kernels()
    if is_native and (found := native.single(c.delta, c.a)) is not None:
        total = c.total() if with_total else None
        if c.bias is None:
            return (total, found[0]), None
        return (total, found[0]), (c.bias.total() if with_total else None, found[1])
    if are_few(r, o, i):
        return (c.total() if with_total else None, squared(c).sum()), None
    return measured_with_bias.dispatch(Weight)(c, with_total)
