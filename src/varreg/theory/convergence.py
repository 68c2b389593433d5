"""Theorems 1 and 2: the expectation and the variance of the bound S_T of Lemma 1, over many runs.

With M a bound of |x_t − x*| for all runs, and steps that never grow,

    E[S_T] = M²/(2γ_{T−1}T) + (1/2T) Σ γ_t(1 + Lγ_t)σ_t²
           ≤ M²/(2γ_{T−1}T) + (Σγ_t/T)·σ₀²    where σ_t² ≤ σ₀²                  (theorem 1)
    Var(S_T) ≤ (1/T) [4M²σ̄² + η̄⁴/L²]                                            (theorem 2)

where σ̄² and η̄⁴ are the means over time of E|ε_t|² and E|ε_t|⁴.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from varreg.theory.lemma1 import Paths
from varreg.theory.problems import Noise, Problem


@dataclass(frozen=True)
class Measured:
    """A value measured over many runs, with its standard error, and the claimed value or bound."""

    value: float
    error: float
    claimed: float

    @property
    def is_below(self) -> bool:
        """Return whether the value is at most the claimed bound, within three standard errors."""
        return self.value <= self.claimed + 3 * self.error

    @property
    def is_equal(self) -> bool:
        """Return whether the value equals the claimed one, within four standard errors."""
        return abs(self.value - self.claimed) <= 4 * self.error

    @property
    def slack(self) -> float:
        """Return the claimed value over the measured one: 1 is tight."""
        return self.claimed / self.value if self.value else math.inf


def _mean(values: Tensor, claimed: float) -> Measured:
    """Return the mean with its standard error."""
    return Measured(float(values.mean()), float(values.std() / math.sqrt(len(values))), claimed)


def noise_expectation(noise: Noise, gamma: Tensor, L: float) -> float:
    """Return (1/2T) Σ γ_t(1 + Lγ_t)σ_t², the contribution of noise to E[S_T]."""
    return float((gamma * (1 + L * gamma) * noise.sigma2).mean() / 2)


def expectation(paths: Paths, noise: Noise, gamma: Tensor, L: float) -> Measured:
    """Return the contribution of noise to E[S_T], measured and by the formula. The rest of S_T is a
    constant.
    """
    return _mean(paths.noise, noise_expectation(noise, gamma, L))


def theorem1(paths: Paths, gamma: Tensor, sigma0_2: float) -> Measured:
    """Return the measured contribution of noise to E[S_T], and its bound. The constant term is the
    same in both.
    """
    return _mean(paths.noise, float(gamma.mean()) * sigma0_2)


def theorem2(paths: Paths, problem: Problem, noise: Noise, reach: float | None = None) -> Measured:
    """Return the measured Var(S_T), and its bound. `reach` is M; by default the largest distance of
    all runs.
    """
    M = float(paths.reach.max()) if reach is None else reach
    fourth = noise.fourth(problem.dimension)
    bound = (4 * M**2 * float(noise.sigma2.mean()) + float(fourth.mean()) / problem.L**2) / len(
        noise
    )
    centered = (paths.noise - paths.noise.mean()).square()
    return _mean(centered, bound)
