"""The paper's problem in full: the solver, S1.5, Theorem 3 and the bounded forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from varreg import regularizer
from varreg.theory.claims.claim import LAMBDA0, Check
from varreg.theory.hindsight import at_mean_one
from varreg.theory.optimum import objective, optimal, unbounded
from varreg.theory.problems import changing
from varreg.theory.rates import exponent

SPREADS = [0.01 * 10 ** (k / 4) for k in range(9)]


def theorem_3_errors() -> list[tuple[float, float, float]]:
    """Return two errors of Theorem 3's solution for each spread of σ: its mean λ − 1, and the
    excess of its Q over the optimum at a mean λ of 1.
    """
    out = []
    for spread in SPREADS:
        sigma2 = changing(20_000, spread)
        lam = regularizer.affine(sigma2, sigma2.mean(), regularizer.DEFAULTS["s"])
        best = optimal(sigma2, LAMBDA0, high=LAMBDA0)
        kept = at_mean_one(lam.clamp(min=0), LAMBDA0)
        excess = float(objective(kept, sigma2, LAMBDA0) / objective(best, sigma2, LAMBDA0)) - 1
        out.append((spread, float(lam.mean()) - 1, excess))
    return out


def the_problem() -> list[Check]:
    """Return the checks of the solver, of the solution without bounds, of Theorem 3 and of the
    bounded forms.
    """
    return [*_check_solver(), _check_unbounded(), *_check_theorem_3(), *_check_bounded_forms()]


def _check_solver() -> list[Check]:
    """Check the constraint and the conditions for an optimum, for a million steps."""
    title, where = "The problem in full", "a million steps, spread of σ 1, λ in [0.1, 3]"
    sigma2, low, high = changing(1_000_000, 1.0), 0.1, 3.0
    lam = optimal(sigma2, LAMBDA0, low, high)
    off = abs(float(lam.sum()) - len(lam)) / len(lam)
    missed = _kkt(lam, sigma2, low, high)
    equal = "its marginal costs are equal inside, and in order at the bounds"
    return [
        Check(title, "the solver meets Σλ = T", where, off, "≤", 1e-12, off <= 1e-12),
        Check(title, equal, where, missed, "≤", 1e-12, missed <= 1e-12),
    ]


def _check_unbounded() -> Check:
    """Check S1.5's solution without bounds against the solver."""
    mild = changing(10_000, 0.05)
    gap = float((optimal(mild, LAMBDA0) - unbounded(mild, LAMBDA0)).abs().max())
    said = "without bounds, λ = (1+λ₀/2)σ̃²/σ_t² − λ₀/2"
    return Check("S1.5", said, "against the solver, spread 0.05", gap, "≤", 1e-12, gap <= 1e-12)


def _check_theorem_3() -> list[Check]:
    """Check the order of the errors of Theorem 3's solution in the spread of σ, and its mean λ at
    the smallest and at the largest spread.
    """
    errors = theorem_3_errors()
    spread, over, excess = (
        torch.tensor([e[i] for e in errors if e[0] <= 0.1 + 1e-9]) for i in range(3)
    )
    mean_said = "with σ̄² for σ̃², mean λ − 1 is of second order in the spread of σ: exponent"
    cost_said = "its Q at a mean λ of 1 is that of the optimum, but for sixth order: exponent"
    rows = []
    for said, values, order in ((mean_said, over, 2.0), (cost_said, excess, 6.0)):
        a, where = exponent(values, 2, spread), "spread 0.03 … 0.1"
        rows.append(Check("Theorem 3", said, where, a, "=", order, abs(a - order) < 0.1 * order))
    for at, mean, _ in (errors[0], errors[-1]):
        holds, where = abs(mean) < 0.01, f"spread {at:g}"
        check = ("Theorem 3", "Σλ = T: mean λ", where, 1 + mean, "=", 1.0, holds)
        rows.append(Check(*check, expected=at < 0.5))
    return rows


def _check_bounded_forms() -> list[Check]:
    """Check how the bounded forms of λ compare with the solution, to first order."""
    said = "to first order, the bounded form is the solution: ratio of slopes at σ² = σ̄²"
    solution, rows = _slope(regularizer.affine), []
    for form in (regularizer.sigmoid, regularizer.rational):
        share = _slope(form) / solution
        holds, where = abs(share - 1) < 0.01, f"{form.__name__}, s = 2"
        rows.append(Check("S2.1", said, where, share, "=", 1.0, holds, expected=False))
    return rows


def _kkt(lam: Tensor, sigma2: Tensor, low: float, high: float) -> float:
    """Return the largest violation, relative to ξ, of the conditions for an optimum: (1 + 2λ/λ₀)σ²
    = ξ between the bounds, at least ξ at λ_min, at most ξ at λ_max.
    """
    marginal = (1 + 2 * lam / LAMBDA0) * sigma2
    inside = (lam > low) & (lam < high)
    if not inside.any():
        return math.inf
    xi = float(marginal[inside].median())
    wrong = torch.where(lam <= low, (xi - marginal).clamp(min=0), (marginal - xi).abs())
    wrong = torch.where(lam >= high, (marginal - xi).clamp(min=0), wrong)
    return float(wrong.max()) / xi


def _slope(form: Callable[[Tensor, Tensor, float], Tensor], h: float = 1e-5) -> float:
    """Return −dλ/dr at r = σ²/σ̄² = 1."""
    r = torch.tensor([1 - h, 1 + h], dtype=torch.float64)
    below, above = form(r, torch.ones_like(r), regularizer.DEFAULTS["s"]).tolist()
    return float(below - above) / (2 * h)
