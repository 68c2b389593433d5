"""Theorem S0, its corollary and the trade-off: rates of convergence.

With γ_t = 1/(tl), t = 1, 2, …, R_t = |x_t − x*|² and G² ≥ E|ḡ_t|² for all t, theorem S0 says E[R_t]
≤ max{R₁, G²/l²}/t. Its induction multiplies E[R_t] ≤ R/t by 1 − 2/t, which at t = 1 is negative, so
that the step from 1 to 2 is not proved. It can fail: `tests/theory/test_rates.py` has an example
with noise at one step only. From t = 2 on the induction is sound, and since E[R₂] ≤ G²/l², the
bound E[R_t] ≤ 2G²/(l²t) holds. (R₁ is not needed: G² ≥ |g₁|² ≥ l²R₁.)

The corollary says that Var(R_t) falls faster than γ_t². Its formula is the variance of one step,
given the previous point; for this variance the claim is true, with rate t^−3. The variance over
whole runs falls as t^−2, which is not faster than γ_t².
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from varreg.errors import VarregError
from varreg.theory.problems import Noise, Problem


@dataclass(frozen=True)
class Distances:
    """Statistics of the distance R_t over many runs, at t = 1 … T, [T] each."""

    mean: Tensor
    """E[R_t]."""
    error: Tensor
    """Its standard error."""
    variance: Tensor
    """Var(R_t), over whole runs."""
    one_step: Tensor
    """The mean of Var(R_{t+1} | x_t), by the paper's formula for symmetric noise."""
    second_moment: Tensor
    """E|ḡ_t|²."""


def distances(problem: Problem, noise: Noise, start: Tensor, runs: int, seed: int = 0) -> Distances:
    """Run SGD with γ_t = 1/(tl); return the statistics of the distance."""
    generator = torch.Generator().manual_seed(seed)
    x, d = start.double().expand(runs, -1).clone(), problem.dimension
    rows = []
    for i in range(len(noise)):
        gamma, sigma2 = 1 / ((i + 1) * problem.l), float(noise.sigma2[i])
        R, g = (x - problem.minimum).square().sum(1), problem.gradient(x)
        step = g + noise.sample(i, runs, d, generator)
        ahead = (x - gamma * g - problem.minimum).square().sum(1)  # |d_t|²
        fourth = float(noise.fourth(d)[i]) - sigma2**2
        one_step = gamma**4 * fourth + 4 * gamma**2 * sigma2 / d * ahead.mean()
        rows.append(
            [R.mean(), R.std() / math.sqrt(runs), R.var(), one_step, step.square().sum(1).mean()]
        )
        x = x - gamma * step
    return Distances(*torch.tensor(rows, dtype=torch.float64).T)


def theorem_s0(runs: Distances, l: float, as_printed: bool = False) -> Tensor:  # noqa: E741
    """Return the bound on E[R_t], t = 1 … T, with G² the largest E|ḡ_t|² that was measured."""
    G2 = float(runs.second_moment.max())
    t = torch.arange(1, len(runs.mean) + 1, dtype=torch.float64)
    return (max(float(runs.mean[0]), G2 / l**2) if as_printed else 2 * G2 / l**2) / t


def exponent(values: Tensor, first: int, times: Tensor | None = None) -> float:
    """Return a in values ∝ t^a, by least squares of logarithms, from the `first` value on.

    >>> round(exponent(torch.arange(1, 100).double() ** -1.5, 10), 6)
    -1.5
    """
    t = torch.arange(1, len(values) + 1, dtype=torch.float64) if times is None else times.double()
    x, y = t[first:].log(), values[first:].double().log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def trade_off(
    alpha: float, T: int, M: float = 1.0, sigma2: float = 1.0, L: float = 1.0
) -> tuple[float, float]:
    """Return the two terms of E[S_T] for γ_t = t^−α/L and steady noise: the term of the start,
    M²/(2γ_T T), and the term of noise.
    """
    if not 0 < alpha < 1:
        raise VarregError(f"varreg: the trade-off is for α between 0 and 1; got {alpha}.")
    gamma = torch.arange(1, T + 1, dtype=torch.float64) ** -alpha / L
    return M**2 / (2 * float(gamma[-1]) * T), float((gamma * (1 + L * gamma)).mean()) * sigma2 / 2
