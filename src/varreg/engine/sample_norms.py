"""|c_i|² of every sample, computed when the contributions to each parameter arrive.

A sample's contributions to one parameter are added up over all of its uses before anything is
squared; |c_i|² then adds up over parameters. Letters as in contribution.py.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from varreg.backends import BACKENDS
from varreg.devices import widest
from varreg.engine.combined import Scattered
from varreg.engine.contribution import Bias, Contribution, Dense, Outer
from varreg.engine.rules.embedding import SparseRows
from varreg.engine.trace.layout import as_rows
from varreg.thresholds import WORKSPACE

if TYPE_CHECKING:
    from varreg.engine.ledger import Ledger
    from varreg.engine.window import Window


class NormsOfWindow(NamedTuple):
    """The norms of one backward for one parameter."""

    window: int
    """The number of the window."""
    forwards: frozenset[int]
    """The numbers of the forwards whose samples these are; a checkpoint's have none."""
    squares: Tensor
    """|c_i|², `[batch]`."""


class NormRecorder:
    """Records |c_i|² in each ledger, until its gradient is cleared."""

    def __init__(self, window: Window):
        self.window = window

    def kernels(self, c: Contribution) -> Any:
        """Return kernels that compute |c_i|² in the pass that computes S and W; None if there are
        none, or if another way is faster.
        """
        source = None if isinstance(c, Outer) and _has_few_rows(c) else c.source()
        known = None if source is None else BACKENDS[source.device.type]
        return getattr(known, "WITH_NORMS", None)

    def record(self, ledger: Ledger, contribution: Contribution) -> Tensor:
        """Record |c_i|² of all uses of a parameter in the running backward, and return them."""
        if ledger.is_float64:
            squares = from_chunks(contribution, True)
        else:
            known = contribution.norms  # from the pass that computed S and W
            squares = squared(contribution) if known is None else known
        part = NormsOfWindow(self.window.number, frozenset(ledger.arriving), widest(squares))
        ledger.norms.append(part)
        return part.squares


def from_chunks(c: Contribution, precise: bool = False) -> Tensor:
    """Return |c_i|², `[batch]`: the definition, a few samples at a time."""
    found = [_squares(widest(t) if precise else t) for _, t in c.chunks()]
    return torch.cat(found) if found else torch.zeros(0)


@functools.singledispatch
def squared(contribution: Any) -> Tensor:
    """Return |c_i|², `[batch]`, in the fastest way for a kind of contribution."""
    return from_chunks(contribution)


def _squares(t: Tensor) -> Tensor:
    """Return Σ t² over all dimensions but the first."""
    norms: Tensor = torch.linalg.vector_norm(as_rows(t), dim=1)
    return widest(norms).square()


@squared.register
def _(c: Dense) -> Tensor:
    return _squares(c.values) if len(c.values) else from_chunks(c)


@squared.register
def _(c: Bias) -> Tensor:
    return squared(c.made)


@squared.register
def _(c: Scattered) -> Tensor:
    return squared(c.looked_up)  # each row is looked up once: nothing is added up


def _has_few_rows(c: Outer) -> bool:
    """Return whether the products of a sample's rows are fewer numbers than its c_b."""
    (_, r, o), i = c.delta.shape, c.a.shape[2]
    return r * (o + i) < o * i


@squared.register
def _(c: Outer) -> Tensor:
    """Return |δ|²|a|² for one row; Σ_rs (δ_r·δ_s)(a_r·a_s) where rows are few."""
    b, r, _ = c.delta.shape
    if r == 1:
        return _squares(c.delta) * _squares(c.a)
    if not _has_few_rows(c) or not b:
        return from_chunks(c)
    step = max(1, WORKSPACE // (r * r))
    found = []
    for delta, a in zip(c.delta.split(step), c.a.split(step), strict=True):
        grams = torch.bmm(delta, delta.mT).mul_(torch.bmm(a, a.mT))
        found.append(grams.sum((1, 2)).clamp_(min=0))
    return torch.cat(found)


@squared.register
def _(c: SparseRows) -> Tensor:
    """Return the squares of the rows that a sample looked up. Contributions to one row are added up
    first. No size depends on values, which a device would have to wait for.
    """
    b, r = c.ids.shape
    if not c.ids.numel():
        return c.dy.new_zeros(b)
    ids, order = c.ids.sort(1)
    is_next = ids.new_zeros(b, r)  # 1 where a row begins that the sample has not looked up before
    is_next[:, 1:] = ids[:, 1:] != ids[:, :-1]
    first = torch.arange(0, b * r, r, device=ids.device).unsqueeze(1)
    place = torch.empty_like(ids).scatter_(1, order, is_next.cumsum(1) + first)
    rows = c.dy.new_zeros(b * r, c.shape[1]).index_add_(0, place.flatten(), c.dy.flatten(0, 1))
    return _squares(rows).view(b, r).sum(1)
