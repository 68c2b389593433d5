"""The paper's problem in full, solved exactly: the best regularizer in hindsight.

    minimize  Q = Σ λ_t (1 + λ_t/λ₀) σ_t²    subject to    Σ λ_t = T,   λ_min ≤ λ_t ≤ λ_max
    (section 3)

It is convex and separable. With ξ the multiplier of the sum, λ_t = clip((λ₀/2)(ξ/σ_t² − 1), λ_min,
λ_max), and ξ follows from Σ λ_t = T: one equation in one unknown, whose left side rises with ξ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from varreg.errors import VarregError


def objective(lam: Tensor, sigma2: Tensor, lambda0: float) -> Tensor:
    """Return Q = Σ λ_t (1 + λ_t/λ₀) σ_t²."""
    return (lam * (1 + lam / lambda0) * sigma2).sum()


def unbounded(sigma2: Tensor, lambda0: float) -> Tensor:
    """Return the solution without bounds (S1.5): (1 + λ₀/2)·σ̃²/σ_t² − λ₀/2, with σ̃² the harmonic
    mean. It may be negative.

    >>> import torch
    >>> from varreg.theory.optimum import unbounded
    >>> unbounded(torch.tensor([1.0, 2.0, 2.0]), lambda0=2.0)
    tensor([2.0000, 0.5000, 0.5000])
    """
    harmonic = 1 / (1 / sigma2).mean()
    return (1 + lambda0 / 2) * harmonic / sigma2 - lambda0 / 2


def optimal(sigma2: Tensor, lambda0: float, low: float = 0.0, high: float = math.inf) -> Tensor:
    """Return the solution, with bounds, to rounding.

    ξ is found by bisection; in the last interval no λ_t crosses a bound, so the equation is linear
    and is solved directly.

    >>> import torch
    >>> from varreg.theory.optimum import optimal
    >>> optimal(torch.tensor([1.0, 2.0, 2.0]), lambda0=2.0, high=1.5)
    tensor([1.5000, 0.7500, 0.7500])
    """
    _check(sigma2, lambda0, low, high)
    s = sigma2.double()
    if low == high:
        return torch.ones_like(sigma2)
    inverse, total, half = 1 / s, float(len(s)), lambda0 / 2

    def clipped(xi: float) -> Tensor:
        return (half * (xi * inverse - 1)).clamp(low, high)

    below, above = 0.0, float(s.max()) * (1 + 2 * max(1.0, low) / lambda0)  # where all λ_t ≥ 1
    xi = min(above, (1 + 2 / lambda0) * total / float(inverse.sum()))  # the solution without bounds
    for _ in range(200):
        lam = clipped(xi)
        excess = float(lam.sum()) - total
        below, above = (xi, above) if excess < 0 else (below, xi)
        inside = (lam > low) & (lam < high)
        slope = half * float(inverse[inside].sum())
        new = xi - excess / slope if slope else math.nan
        if not below < new < above:
            new = (below + above) / 2
        if new == xi or abs(excess) <= 4e-16 * total:
            break
        xi = new
    return clipped(xi).to(sigma2.dtype)


def _check(sigma2: Tensor, lambda0: float, low: float, high: float) -> None:
    """Raise if there is no solution."""
    if sigma2.dim() != 1 or not len(sigma2):
        raise VarregError(
            "varreg: variances must be a series, of one dimension and not empty; got shape "
            f"{tuple(sigma2.shape)}."
        )
    if not sigma2.isfinite().all() or not (sigma2 > 0).all():
        raise VarregError(
            "varreg: variances must be positive and finite: if one is 0, the optimum puts all of λ "
            "there."
        )
    if not 0 < lambda0 < math.inf:
        raise VarregError(f"varreg: λ₀ must be positive; got {lambda0}.")
    if not 0 <= low <= 1 <= high:
        raise VarregError(
            f"varreg: bounds must be 0 ≤ λ_min ≤ 1 ≤ λ_max, since the mean of λ is 1; got {low} "
            f"and {high}."
        )
