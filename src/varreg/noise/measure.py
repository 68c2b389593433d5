"""Compute tr Σ and |Ĝ|² of each parameter from S and W, in one pass over both and without waiting
for a device.

For a loss that is a mean over m samples in K groups:

    tr Σ = m/(K−1) · (m·ΣW − S·S),   |Ĝ|² = S·S − tr Σ/m

tr Σ is the unbiased variance of one sample's gradient, |Ĝ|² is unbiased for the square of the true
gradient. For a loss that is a sum, both are divided by m².
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varreg import native
from varreg.engine.ledger import Ledger
from varreg.engine.mean_variance import Moments
from varreg.engine.number_range import choose_precision
from varreg.engine.totals import Totals, refuse_elements
from varreg.optim.gradient import products
from varreg.optim.synchronized import check_synchronized
from varreg.shards import is_sharded, total
from varreg.thresholds import LARGEST_SQUARE, SMALLEST_SQUARE


class Measured(NamedTuple):
    """A parameter, its ledger, and its moments; for a sharded parameter, those of this rank's
    shard.
    """

    parameter: Tensor
    ledger: Ledger
    moments: Moments | Totals | None


def read(parameters: Sequence[tuple[Tensor, Ledger]]) -> list[Measured]:
    """Return the moments of parameters over all processes. Raise a MeasurementError if they cover
    the samples of one process only.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        check_synchronized((p for p, _ in parameters), steps=False)
    return [Measured(p, ledger, ledger.read(p, stepping=True)) for p, ledger in parameters]


def samples(found: Sequence[Measured]) -> int:
    """Return m, the samples since gradients were cleared; 0 if nothing was measured."""
    m = 0
    for f in found:  # at every step: no generator
        if f.moments is not None and f.moments.count > m:
            m = f.moments.count
    return m


def has_variance(found: Sequence[Measured]) -> bool:
    """Return whether all moments are of at least two samples, in at least two groups."""
    for f in found:
        if f.moments is not None and (f.moments.count < 2 or f.moments.groups < 2):
            return False
    return True


def estimates(found: Sequence[Measured], l1: bool = False) -> Tensor:
    """Return tr Σ and |Ĝ|² of each parameter, `[n, 2]`; with `l1`, also its `l1_sums`, `[n, 5]`.

    The result stays on the device of the first parameter; no value is copied to the CPU. All
    sharded parameters together need one reduction. A parameter without moments has zeros, since no
    sample had a gradient there.
    """
    home = found[0].parameter.device
    rows = _native_rows(found, l1) if home.type == "cpu" else None
    if rows is not None:
        return _over_shards(found, torch.tensor(rows, dtype=torch.float64))
    with torch.no_grad():
        return _over_shards(found, _tensor_rows(found, l1, home))


def numbers(found: Sequence[Measured], l1: bool = False) -> list[list[float]] | None:
    """Return `estimates` as Python numbers; None unless native code serves all moments, and no
    parameter is sharded. For small models, tensors would take longer than the sums.
    """
    for f in found:  # at every step: no generator
        if f.ledger.is_sharded:
            return None
    return _native_rows(found, l1) if found[0].parameter.is_cpu else None


def _over_shards(found: Sequence[Measured], rows: Tensor) -> Tensor:
    """Return `estimates` over all ranks, from those of this rank's shards."""
    sharded = [i for i, f in enumerate(found) if is_sharded(f.parameter)]
    if sharded:
        first: Any = found[sharded[0]].parameter
        rows[sharded] = total(rows[sharded], first)
    return rows


def _native_rows(found: Sequence[Measured], l1: bool) -> list[list[float]] | None:
    """Return `estimates` of this rank's shards as Python numbers; None unless native code serves
    all moments.
    """
    rows = []
    known: list[tuple[list[float], Moments | Totals, float, float]] = []  # S·S and ΣW
    by_kernel: list[tuple[list[float], Ledger, Moments]] = []
    for f in found:
        m, row = f.moments, [0.0] * (5 if l1 else 2)
        rows.append(row)
        if m is None:
            continue
        if isinstance(m, Totals):
            if l1:
                refuse_elements("NoiseScale(l1=True)")
            if isinstance(m.length2, Tensor) or isinstance(m.spread, Tensor):
                return None
            known.append((row, m, m.length2, m.spread))
        elif not m.total.numel():
            continue
        elif native.serves(m.total, m.square):
            by_kernel.append((row, f.ledger, m))
        else:
            return None
    found_sums = _native_sums([m for *_, m in by_kernel], l1)
    for (row, ledger, m), sums in zip(by_kernel, found_sums, strict=True):
        SS, W, row[2:] = sums[0], sums[1], sums[2:] if l1 else ()
        if not SMALLEST_SQUARE <= W <= LARGEST_SQUARE:
            choose_precision(ledger, m, SS, W)
        known.append((row, m, SS, W))
    key: Any = None
    for row, m, SS, W in known:
        if key != (now := (m.count, m.groups, m.reduction)):
            key, ((a, b), (c, d)) = now, _factors_of(m)
        row[0], row[1] = a * SS + b * W, c * SS + d * W
    return rows


def _native_sums(measured: Sequence[Moments], l1: bool) -> list[list[float]]:
    """Return S·S and ΣW of moments, and with `l1` their `l1_sums`, in one pass of native code."""
    key: Any = None
    needed = no = (0.0, 0.0, 0.0, 0.0)
    rows = []
    for m in measured:
        if l1 and key != (now := (m.count, m.groups, m.reduction, m.square.dtype)):
            key, needed = now, _l1_numbers(m)
        rows.append((m.total, m.square, needed if l1 else no))
    sums = native.noise_sums(rows, l1) if rows else []
    for each in sums:
        each[4] *= _NOISE_OF_ZERO
    return sums


def _tensor_rows(found: Sequence[Measured], l1: bool, home: torch.device) -> Tensor:
    """Return `estimates` of moments on any device, without waiting for it."""
    precise = torch.float32 if home.type == "mps" else torch.float64
    rows = torch.stack([row.to(home, precise, non_blocking=True) for row in _squares(found)])
    rows = (rows.unsqueeze(1) * _factors(found).to(rows, non_blocking=True)).sum(2)
    if l1:
        parts = [row.to(home, precise, non_blocking=True) for row in _l1_sums(found)]
        rows = torch.cat([rows, torch.stack(parts)], 1)
    return rows


def _squares(found: Sequence[Measured]) -> list[Tensor]:
    """Return S·S and ΣW of each parameter."""
    out: list[Tensor] = [torch.zeros(2)] * len(found)
    fast = []
    for i, f in enumerate(found):
        m = f.moments
        if m is None or not m.elements:
            continue
        if isinstance(m, Totals):
            out[i] = torch.stack([*map(torch.as_tensor, (m.length2, m.spread))])
        elif native.serves(m.total, m.square):
            fast.append(i)
        else:
            out[i] = products(m, m.total)[[0, 3]]
    measured: list[Any] = [found[i].moments for i in fast]
    for i, m, (SS, W, *_) in zip(fast, measured, _native_sums(measured, False), strict=True):
        choose_precision(found[i].ledger, m, SS, W)
        out[i] = torch.tensor([SS, W], dtype=torch.float64)
    return out


def _factors(found: Sequence[Measured]) -> Tensor:
    """Return the factors of S·S and ΣW in tr Σ and in |Ĝ|²: `[n, 2, 2]`."""
    none = [[0.0, 0.0], [0.0, 0.0]]
    rows = [none if f.moments is None else _factors_of(f.moments) for f in found]
    return torch.tensor(rows, dtype=torch.float64)


def _factors_of(moments: Moments | Totals) -> list[list[float]]:
    """Return the factors of S·S and ΣW in tr Σ, and those in |Ĝ|²."""
    m, K = moments.count, moments.groups
    scale = 1.0 if moments.reduction == "mean" else 1.0 / m**2
    a = scale * m / (K - 1) if min(m, K) > 1 else math.nan
    return [[-a, a * m], [scale + a / m, -a]]


def _l1_sums(found: Sequence[Measured]) -> list[Tensor]:
    """Return `l1_sums` of each parameter. Native code computes those on the CPU in one pass."""
    out: list[Tensor] = [torch.zeros(3)] * len(found)
    fast = []
    for i, f in enumerate(found):
        m = f.moments
        if m is None or not m.elements:
            continue
        if isinstance(m, Totals):
            refuse_elements("NoiseScale(l1=True)")
        if native.serves(m.total, m.square):
            fast.append(i)
        else:
            out[i] = l1_sums(m)
    measured: list[Any] = [found[i].moments for i in fast]
    for i, sums in zip(fast, _native_sums(measured, True), strict=True):
        out[i] = torch.tensor(sums[2:], dtype=torch.float64)
    return out


def _l1_numbers(m: Moments) -> tuple[float, float, float, float]:
    """Return m, the factor from m·W − S² to s², its rounding error, and the factor from S to ḡ."""
    factor, rounding = m.constants
    scale = 1.0 if m.reduction == "mean" else 1.0 / m.count
    return m.count, factor * scale**2 * m.count / (m.count - 1), rounding, scale


_NOISE_OF_ZERO = 3 * math.sqrt(2 / math.pi)


def l1_sums(m: Moments) -> Tensor:
    """Return Σ s, Σ|ḡ|, and an upper bound of the excess of Σ|ḡ| over Σ|G|, over all elements.

    |G| has no unbiased estimate, since |·| has a corner at 0. Let e = s/√m be the standard error of
    ḡ, and z = ḡ/e. For a normal ḡ, the mean of e|z| = |ḡ| is never below |G|. The mean of the
    second estimate, e(|z| − 3√(2/π)·exp(−4z²)), is never above |G|: it is 0 where G is 0, and
    nearly that of |ḡ| where |G| is several standard errors.
    """
    s = (m.variance * (m.count / (m.count - 1))).sqrt_()
    e, size = s / math.sqrt(m.count), m.mean.abs()
    excess = (size / e).square_().mul_(-4).exp_().mul_(e).nan_to_num_(nan=0.0)
    return torch.stack([s.sum(), size.sum(), _NOISE_OF_ZERO * excess.sum()])
