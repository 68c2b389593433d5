"""The variance of an optimizer's increment δ̄, from the variances σ² of the gradients that went into it (paper, S2.4).

Gradients of different steps have independent errors, ḡ_τ = g_τ + ε_τ with Var(ε_τ) = σ_τ². An increment is n/D: a numerator linear in
the gradients, n = Σ a_τ ḡ_τ, over D = p₂ + eps with p₂² = Σ b_τ ḡ_τ². To first order in ε,

    Var(δ̄) = (1/D²) [N − 2δ̄·C/p₂ + δ̄²·V/p₂²]      N = Σ a²σ²   C = Σ a·b·g·σ²   V = Σ b²·g²·σ²          (direct)

and S2.4's simplified version sets |g_τ|/p₂ to 1, with δ̄·g_τ > 0:

    Var(δ̄) = (1/D²) [N − 2|δ̄|·C + δ̄²·V]            N = Σ a²σ²   C = Σ a·b·σ²     V = Σ b²·σ²             (simplified)

The sums obey short recursions, and are kept in the optimizer's state; the functions here update them in place. σ² may be in any unit
that stays the same, since λ depends on ρ/ρ̄ alone: what is used is v² = (m−1)σ² (S2.2).

Letters: V, N, C for the sums above; g the gradient as the optimizer sees it, with its sign and weight decay; s2 is σ²; p2 is p₂.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import threshold

VERSIONS = {"variance": ("simplified", "direct")}
"""The option `variance`: the paper's implemented version first."""


def momentum(V: Tensor, s2: Tensor, mu: float, dampening: float, first: bool) -> Tensor:
    """Var of the heavy ball b_t = μ·b_{t−1} + (1−d)·g_t, b_1 = g_1: V ← μ²V + (1−d)²σ², exact.

    With μ = d = β it is S2.4's σ²(p) = (1−β)²/(1−β²) · EMA_{β²}(σ²).
    """
    return V.copy_(s2) if first else V.mul_(mu**2).add_(s2, alpha=(1 - dampening) ** 2)


def nesterov(V: Tensor, s2: Tensor, mu: float, dampening: float, first: bool) -> Tensor:
    """Var of g_t + μ·b_t, given V = Var(b_t): g_t comes in twice, with weight 1 + μa where a = 1−d is its weight in b_t.

    μ²V + ((1 + μa)² − μ²a²)σ² = μ²V + (1 + 2μa)σ².
    """
    a = 1.0 if first else 1 - dampening
    return (V * mu**2).add_(s2, alpha=1 + 2 * mu * a)


def accumulate_numerator(N: Tensor, s2: Tensor, beta: float) -> Tensor:
    """Var of the average m_t = βm_{t−1} + (1−β)g_t: N ← β²N + (1−β)²σ²."""
    return N.mul_(beta**2).add_(s2, alpha=(1 - beta) ** 2)


def accumulate_covariance(C: Tensor, gs2: Tensor, beta1: float, beta2: float) -> Tensor:
    """Σ (1−β₁)β₁ᵏ (1−β₂)β₂ᵏ gσ², k steps ago: C ← β₁β₂C + (1−β₁)(1−β₂)gσ². Simplified: σ² for gσ²."""
    return C.mul_(beta1 * beta2).add_(gs2, alpha=(1 - beta1) * (1 - beta2))


def accumulate_denominator(V: Tensor, ggs2: Tensor, beta: float) -> Tensor:
    """Σ (1−β)²β²ᵏ g²σ², k steps ago: V ← β²V + (1−β)²g²σ². Simplified: σ² for g²σ². β = 1 stands for AdaGrad's plain sum."""
    return V.add_(ggs2) if beta == 1 else V.mul_(beta**2).add_(ggs2, alpha=(1 - beta) ** 2)


def weighted(g: Tensor, s2: Tensor, direct: bool) -> tuple[Tensor, Tensor]:
    """gσ² and g²σ², or σ² twice for the simplified version."""
    if not direct:
        return s2, s2
    gs2 = g * s2
    return gs2, gs2 * g


def ratio(delta: Tensor, p2: Tensor, eps: float, sums: tuple[Tensor, Tensor, Tensor], direct: bool) -> Tensor:
    """Var(n/D) from N, C and V, which are not changed; nan where it is not known.

    That is where nothing has come in yet, and where the bracket is as small as rounding leaves it: Adam's first step, m̂/√v̂ = ±1, has no
    variance to first order, and a history must take neither noise nor 0 for it.
    """
    N, C, V = sums
    slope = delta / p2 if direct else delta.abs()
    size = torch.addcmul(N, slope.square(), V)
    left = torch.addcmul(size, slope, C, value=-2).div_(size)
    left = threshold(left, rounding(left.dtype), torch.nan)
    return left.mul_(size).div_((p2 + eps).square_())


def rounding(dtype: torch.dtype) -> float:
    """What rounding may leave of the bracket, relative to what is added in it."""
    return max(32 * torch.finfo(dtype).eps, 1e-9)
