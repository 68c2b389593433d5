"""Test problems with known constants, and noise with known variance, for checks of the paper's
claims.

All functions work on many points at once, [runs, d], so that a claim about an expectation is
checked over many runs at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from varreg.errors import VarregError

Batched = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """A convex function with its minimum and its constants."""

    name: str
    value: Batched
    """f, from [runs, d] to [runs]."""
    gradient: Batched
    """∇f, from [runs, d] to [runs, d]."""
    minimum: Tensor
    """x*, [d]."""
    L: float
    """∇f is Lipschitz with this constant."""
    l: float  # noqa: E741
    """f is strongly convex with this constant."""

    @property
    def dimension(self) -> int:
        """Return the number of coordinates."""
        return len(self.minimum)

    def regret(self, x: Tensor) -> Tensor:
        """Return R = f(x) − f(x*), [runs]."""
        return self.value(x) - self.value(self.minimum[None])


def quadratic(
    dimension: int = 10,
    L: float = 1.0,
    l: float = 0.1,  # noqa: E741
    seed: int = 0,
) -> Problem:
    """Return ½ (x − x*)ᵀ A (x − x*), with eigenvalues of A spread evenly from l to L, in random
    directions.
    """
    if not 0 < l <= L:
        raise VarregError(f"varreg: a quadratic needs 0 < l ≤ L; got l = {l} and L = {L}.")
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(_normal(dimension, dimension, generator=generator)).Q
    A: Tensor = (
        directions @ torch.diag(torch.linspace(l, L, dimension, dtype=torch.float64)) @ directions.T
    )
    minimum = _normal(dimension, generator=generator)

    def gradient(x: Tensor) -> Tensor:
        return (x - minimum) @ A

    return Problem(
        "quadratic", lambda x: 0.5 * ((x - minimum) * gradient(x)).sum(-1), gradient, minimum, L, l
    )


def ridge(samples: int = 200, dimension: int = 10, mu: float = 0.1, seed: int = 0) -> Problem:
    """Return (1/2n)|Xw − y|² + (μ/2)|w|²: a quadratic whose constants come from the data."""
    X, y, _ = _data(samples, dimension, mu, seed)
    H = X.T @ X / samples + mu * torch.eye(dimension, dtype=torch.float64)
    eigenvalues = torch.linalg.eigvalsh(H)
    minimum = torch.linalg.solve(H, X.T @ y / samples)

    def value(w: Tensor) -> Tensor:
        return 0.5 * (w @ X.T - y).square().mean(-1) + 0.5 * mu * w.square().sum(-1)

    def gradient(w: Tensor) -> Tensor:
        return (w @ X.T - y) @ X / samples + mu * w

    return Problem(
        "ridge regression", value, gradient, minimum, float(eigenvalues[-1]), float(eigenvalues[0])
    )


def logistic(samples: int = 200, dimension: int = 10, mu: float = 0.1, seed: int = 0) -> Problem:
    """Return (1/n) Σ log(1 + exp(−yᵢ xᵢ·w)) + (μ/2)|w|². L is a quarter of the largest eigenvalue
    of XᵀX/n, plus μ; l is μ; x* comes from Newton's method.
    """
    X, _, sign = _data(samples, dimension, mu, seed)
    Z = X * sign[:, None]
    L = float(torch.linalg.eigvalsh(X.T @ X / samples)[-1]) / 4 + mu
    identity = torch.eye(dimension, dtype=torch.float64)

    def value(w: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-(w @ Z.T)).mean(-1) + 0.5 * mu * w.square().sum(-1)

    def gradient(w: Tensor) -> Tensor:
        return -torch.sigmoid(-(w @ Z.T)) @ Z / samples + mu * w

    w = torch.zeros(1, dimension, dtype=torch.float64)
    for _ in range(50):
        p = torch.sigmoid(w @ Z.T)[0]
        w = w - torch.linalg.solve(
            (Z.T * (p * (1 - p))) @ Z / samples + mu * identity, gradient(w)[0]
        )
    return Problem("logistic regression", value, gradient, w[0], L, mu)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "quadratic": quadratic,
    "ridge": ridge,
    "logistic": logistic,
}


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Draw standard normal numbers."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _data(samples: int, dimension: int, mu: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw inputs, targets of a noisy linear law, and their signs."""
    if not mu > 0:
        raise VarregError(
            f"varreg: μ must be positive, or the problem is not strongly convex; got {mu}."
        )
    generator = torch.Generator().manual_seed(seed)
    X = _normal(samples, dimension, generator=generator)
    y = X @ _normal(dimension, generator=generator) + 0.5 * _normal(samples, generator=generator)
    return X, y, torch.where(y > 0, 1.0, -1.0).double()


@dataclass(frozen=True)
class Noise:
    """Errors of the gradient: independent from step to step, with mean 0 and E|ε_t|² = σ_t²,
    divided evenly among coordinates.
    """

    sigma2: Tensor
    """σ_t², [T]."""
    shape: str = "normal"
    """`normal`, which is symmetric, or `exponential`, which is not."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise VarregError(
                f"varreg: the shape of noise must be one of {', '.join(SHAPES)}; got "
                f"{self.shape!r}."
            )
        if self.sigma2.dim() != 1 or not (self.sigma2 >= 0).all():
            raise VarregError(
                "varreg: the variances of noise must be a series of numbers that are not negative."
            )

    def __len__(self) -> int:
        return len(self.sigma2)

    def sample(self, t: int, runs: int, dimension: int, generator: torch.Generator) -> Tensor:
        """Draw ε_t for many runs, [runs, d]."""
        unit = SHAPES[self.shape](runs, dimension, generator)
        return unit * math.sqrt(float(self.sigma2[t]) / dimension)

    def fourth(self, dimension: int) -> Tensor:
        """Return η_t⁴ = E|ε_t|⁴, [T]."""
        kurtosis = {"normal": 3.0, "exponential": 9.0}[self.shape]
        return self.sigma2.square() * (1 + (kurtosis - 1) / dimension)


def _exponential(runs: int, dimension: int, generator: torch.Generator) -> Tensor:
    """Draw numbers of mean 0 and variance 1, skewed to the right."""
    return torch.empty(runs, dimension, dtype=torch.float64).exponential_(generator=generator) - 1


SHAPES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "normal": lambda runs, dimension, generator: _normal(runs, dimension, generator=generator),
    "exponential": _exponential,
}


def steady(T: int, sigma2: float = 1.0) -> Tensor:
    """Return the same variance for every step."""
    return torch.full((T,), sigma2, dtype=torch.float64)


def changing(T: int, spread: float = 1.0, sigma2: float = 1.0, seed: int = 0) -> Tensor:
    """Draw variances that change: log σ_t² is normal with standard deviation 2·`spread`, and the
    mean of σ_t² is `sigma2`.
    """
    z = _normal(T, generator=torch.Generator().manual_seed(seed))
    return sigma2 * torch.exp(2 * spread * z - 2 * spread**2)


def drifting(
    T: int, spread: float = 1.0, sigma2: float = 1.0, memory: float = 0.98, seed: int = 0
) -> Tensor:
    """Return variances that change slowly: log σ_t² is an autoregression, whose next value is
    `memory` times the current one, plus noise.
    """
    z = _normal(T, generator=torch.Generator().manual_seed(seed)).tolist()
    at = [z[0]]
    for new in z[1:]:
        at.append(memory * at[-1] + math.sqrt(1 - memory**2) * new)
    return sigma2 * torch.exp(2 * spread * torch.tensor(at, dtype=torch.float64) - 2 * spread**2)
