"""Is λ_t independent of the error ε_t that it multiplies? The theory assumes so: there γ_t is
given, E[γ_t ε_t] = 0 and E[γ_t ε_t²] = γ_t σ_t².

But λ_t is computed from the same mini-batch as ε_t. The variance v² of samples is independent of
their mean if samples are normal (Cochran), but not if they are skewed. If the rare large samples
point along the gradient, a batch with such a sample has a large v² and a large ḡ, and λ shortens
its step. And ρ = v²/ḡ² always depends on the mean: if ε_t makes |ḡ_t| large, ρ is small and λ
large. Such steps have a larger error, and are longer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from varreg import regularizer
from varreg.errors import VarregError
from varreg.theory.convergence import Measured
from varreg.theory.problems import SHAPES


class OwnBatch(NamedTuple):
    """Two ratios, which are 1 if λ and ε are independent."""

    progress: Measured
    """E[λ ḡ]/(E[λ] g)."""
    noise: Measured
    """E[λ ε²]/(E[λ] σ²)."""


def own_batch(
    scale_free: bool,
    shape: str = "normal",
    along: bool = True,
    noise: float = 1.0,
    m: int = 8,
    history: regularizer.History = "mean",
    runs: int = 40_000,
) -> OwnBatch:
    """Return both ratios, measured over many runs with a true gradient of 1 (−1 with
    `along=False`). The mean gradient of m samples has the standard error `noise`.

    Skewed noise has its long tail on the positive side: `along` the gradient, or against it. λ is
    that of VR-SGD, after a history of 20 steps.
    """
    if shape not in SHAPES:
        raise VarregError(
            f"varreg: the shape of noise must be one of {', '.join(SHAPES)}; got {shape!r}."
        )
    options = {**regularizer.DEFAULTS, "scale_free": scale_free, "history": history}
    generator, g = torch.Generator().manual_seed(0), 1.0 if along else -1.0
    past, count = torch.zeros(2, runs, dtype=torch.float64)
    for _ in range(20):
        errors = noise * m**0.5 * SHAPES[shape](m, runs, generator)
        epsilon = errors.mean(0)
        lam = regularizer.lambdas(errors.var(0, correction=0), g + epsilon, past, count, m, options)
    return OwnBatch(
        _ratio(lam * (g + epsilon) / g, lam), _ratio(lam * epsilon.square() / noise**2, lam)
    )


def _ratio(a: Tensor, b: Tensor) -> Measured:
    """Return E[a]/E[b], which is claimed to be 1."""
    value = float(a.mean() / b.mean())
    return Measured(value, float((a - value * b).std() / (b.mean() * len(a) ** 0.5)), 1.0)
