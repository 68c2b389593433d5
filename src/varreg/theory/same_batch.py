"""Is λ_t independent of the error ε_t that it multiplies? The theory takes it so: γ_t is given, and E[γ_t ε_t²] = γ_t σ_t².

But λ_t comes out of the same mini-batch as ε_t. The variance v² of samples is independent of their mean where samples are normal (Cochran), and not
where they are skewed. ρ = v²/ḡ² has the mean in it: where ε_t makes |ḡ_t| large, ρ is small and λ large, so that large errors get long steps.
"""

from __future__ import annotations

import torch

from varreg import regularizer
from varreg.theory.convergence import Measured
from varreg.theory.problems import SHAPES


def share_of_error(
    scale_free: bool,
    shape: str = "normal",
    noise: float = 1.0,
    m: int = 8,
    history: regularizer.History = "mean",
    runs: int = 40_000,
) -> Measured:
    """E[λ ε²]/(E[λ] σ²), over many runs of a true gradient of 1 whose mean over m samples has a standard error of `noise`; 1 is claimed.

    λ is VR-SGD's, with a history of 20 steps behind it.
    """
    if shape not in SHAPES:
        raise ValueError(f"varreg: the shape of noise must be one of {', '.join(SHAPES)}; got {shape!r}.")
    options = {**regularizer.DEFAULTS, "scale_free": scale_free, "history": history}
    generator = torch.Generator().manual_seed(0)
    past, count = torch.zeros(2, runs, dtype=torch.float64)
    for _ in range(20):
        errors = noise * m**0.5 * SHAPES[shape](m, runs, generator)
        epsilon = errors.mean(0)
        lam = regularizer.lambdas(errors.var(0, correction=0), 1 + epsilon, past, count, m, options)
    value = lam * epsilon.square() / (lam.mean() * noise**2)
    return Measured(float(value.mean()), float(value.std() / runs**0.5), 1.0)
