"""Lemma 1: along every path of SGD, the average regret stays below a bound that can be computed
from the path.

For convex f with ∇f L-Lipschitz, γ_t ≤ 1/L and |x_t − x*| ≤ M, with ε_t the error of the gradient
g_t at x_t, t = 0 … T−1,

    (1/T) Σ [f(x_{t+1}) − f*]  ≤  S_T

    S_T = (1/T) [ W·M²/2 + ½ Σ γ_t(1 + Lγ_t)ε_t² − Σ ε_t·(x_t − Lγ_t²g_t − x*) ]

The paper has W = 1/γ_{T−1}. Its proof ends with (1/γ₀)|x₀−x*|² + Σ (1/γ_t − 1/γ_{t−1})|x_t−x*|² and
replaces every |x_t−x*|² by M². That is an upper bound only if no (1/γ_t − 1/γ_{t−1}) is negative,
that is, if γ_t never grows. A regularized step γ_t = αλ_t does grow at times. For any steps, the
bound holds with W = 1/γ₀ + Σ max(0, 1/γ_t − 1/γ_{t−1}), which is the paper's W if γ_t never grows.
If γ_t rises and falls, W grows in proportion to T, and W·M²/2T does not fall: for VR-SGD, this
bound never forgets the start.

The same proof with each step weighted by γ_t does forget the start: then the distances telescope
for any sequence of steps, and no M is needed,

    (1/Σγ_t) Σ γ_t[f(x_{t+1}) − f*]  ≤                                          (weighted)
        (1/Σγ_t) [ ½|x₀ − x*|² + ½ Σ γ_t²(1 + Lγ_t)ε_t² − Σ γ_tε_t·(x_t − Lγ_t²g_t − x*) ]

for γ_t ≤ 1/L. If γ_t is independent of ε_t, the expectation of this bound has Σ γ_t²(1 + Lγ_t)σ_t²
in place of the paper's Σ γ_t(1 + Lγ_t)σ_t². With Σγ_t given and Lγ_t small, the right side is
smallest for γ_t ∝ 1/σ_t². (The left side then gives more weight to the steps with large γ_t.) As
always, the term of noise vanishes only if γ_t → 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varreg.errors import VarregError
from varreg.theory.problems import Noise, Problem


@dataclass(frozen=True)
class Paths:
    """Results of many runs of SGD, [runs] each."""

    criterion: Tensor
    """(1/T) Σ [f(x_{t+1}) − f*]."""
    noise: Tensor
    """(1/T) [½ Σ γ_t(1 + Lγ_t)ε_t² − Σ ε_t·(x_t − Lγ_t²g_t − x*)]: the contribution of noise to
    S_T.
    """
    reach: Tensor
    """The largest |x_t − x*| on the way: M."""
    weighted: Tensor
    """(1/Σγ_t) Σ γ_t[f(x_{t+1}) − f*]."""
    weighted_bound: Tensor
    """The right side of the weighted version."""


def walk(
    problem: Problem, noise: Noise, gamma: Tensor, start: Tensor, runs: int, seed: int = 0
) -> Paths:
    """Run x_{t+1} = x_t − γ_t(g_t + ε_t) from `start`, many times; return the results."""
    if len(gamma) != len(noise) or not (gamma > 0).all():
        raise VarregError(
            f"varreg: one positive step is needed for each of {len(noise)} variances; got "
            f"{len(gamma)}."
        )
    generator = torch.Generator().manual_seed(seed)
    x = start.double().expand(runs, -1).clone()
    criterion, made, weighted = torch.zeros(3, runs, dtype=torch.float64)
    reach = (x - problem.minimum).norm(dim=1)
    above = 0.5 * reach.square()
    for t, step in enumerate(gamma.double().tolist()):
        g, error = problem.gradient(x), noise.sample(t, runs, problem.dimension, generator)
        now = 0.5 * step * (1 + problem.L * step) * error.square().sum(1)
        now -= (error * (x - problem.L * step**2 * g - problem.minimum)).sum(1)
        x = x - step * (g + error)
        regret = problem.regret(x)
        made, criterion = made + now, criterion + regret
        above, weighted = above + step * now, weighted + step * regret
        reach = torch.maximum(reach, (x - problem.minimum).norm(dim=1))
    T, total = len(gamma), float(gamma.sum())
    return Paths(criterion / T, made / T, reach, weighted / total, above / total)


def weight(gamma: Tensor, as_printed: bool = False) -> float:
    """Return W: 1/γ_{T−1} as printed; 1/γ₀ + Σ max(0, 1/γ_t − 1/γ_{t−1}) in the version that holds.

    >>> import torch
    >>> from varreg.theory.lemma1 import weight
    >>> falling, growing = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    >>> weight(falling), weight(falling, as_printed=True)
    (4.0, 4.0)
    >>> weight(growing), weight(growing, as_printed=True)
    (4.0, 2.0)
    """
    inverse = 1 / gamma.double()
    return (
        float(inverse[-1]) if as_printed else float(inverse[0] + inverse.diff().clamp(min=0).sum())
    )


def bound(paths: Paths, gamma: Tensor, as_printed: bool = False) -> Tensor:
    """Return S_T of each path, with M its reach."""
    return weight(gamma, as_printed) * paths.reach.square() / (2 * len(gamma)) + paths.noise
