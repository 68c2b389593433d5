"""The increment δ̄ of an optimizer. Its variance follows from the variances σ² of the gradients
that went into it (paper, S2.4). Some increments have a kernel.

Gradients of different steps have independent errors, ḡ_τ = g_τ + ε_τ with Var(ε_τ) = σ_τ². An
increment is n/D: a numerator linear in the gradients, n = Σ a_τ ḡ_τ, over D = p₂ + eps with p₂² = Σ
b_τ ḡ_τ². To first order in ε,

    Var(δ̄) = (1/D²) [N − 2δ̄·C/p₂ + δ̄²·V/p₂²]                                        (direct)
    N = Σ a²σ²   C = Σ a·b·g·σ²   V = Σ b²·g²·σ²

and S2.4's simplified version sets |g_τ|/p₂ to 1, with δ̄·g_τ > 0:

    Var(δ̄) = (1/D²) [N − 2|δ̄|·C + δ̄²·V]                                         (simplified)
    N = Σ a²σ²   C = Σ a·b·σ²   V = Σ b²·σ²

The sums obey short recursions. They are in the optimizer's state, and the functions here update
them in place. σ² may have any constant unit, since λ depends on ρ/ρ̄ alone: the optimizers use
v² = (m−1)σ² (S2.2).

Each optimizer writes its own formula in its file (sgd.py, adam.py, …), with the functions here.

Letters: V, N, C for the sums above; g the gradient as the optimizer sees it, with its sign and
weight decay; s2 is σ²; p2 is p₂.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from varreg import _torch
from varreg.few_launches import where_positive
from varreg.native import contract
from varreg.options import Options
from varreg.thresholds import BRACKET

if TYPE_CHECKING:
    from varreg.optim.parameter_step import ParameterStep


@dataclass(frozen=True)
class Kernel:
    """Native code that computes an increment and its variance, and takes the whole step."""

    kind: contract.Increment
    fill: Callable[[contract.Task, Mapping[str, Any], Mapping[str, Any], bool, bool], None]
    """Fills the fields of a task that are specific to this increment. Its arguments are the task,
    the param group, the state, whether the sums for the variance are new, and whether native code
    takes the base's step, too: then the state is that from before it.
    """
    knows_base: bool = False
    """Whether native code can take the base's own step, too. `fill` fills the fields for it."""
    takes_gradient: bool = False
    """Whether the kernel reads the gradient itself."""
    can_repeat: bool = False
    """Whether native code can compute λ of the last step again from the state. Then λ is not
    stored.
    """
    shares_count: bool = False
    """Whether all elements share one count as long as they have a ρ in the same steps. Adam's ρ is
    unknown where rounding hides it: its counts differ from the first steps on.
    """


@dataclass(frozen=True)
class Increment:
    """The increment δ̄ of an optimizer with certain options. The base moves to x' = x − lr·δ̄,
    apart from decoupled weight decay.

    Variance and kernel belong together. PyTorch computes an increment that has no kernel.
    """

    variance: Callable[[ParameterStep], tuple[Tensor, Tensor]]
    """Return δ̄ and its variance, after the base's step. `step.g` is the gradient with its sign and
    coupled weight decay, `step.s2` its σ²; `step[name]` is the entry of the state under that name.

    It updates its sums in place. If `step.first`, the sums are new, and 0.
    """
    reads: tuple[str, ...] = ()
    """Names of the entries of the base's state that it reads, each of the parameter's shape."""
    sums: tuple[str, ...] = ()
    """Names of the sums that it keeps in the state, each of the parameter's shape."""
    kernel: Kernel | None = None
    is_linear: bool = False
    """Whether it is linear in the gradients: then sums over elements obey the same recursions."""


class AdaptiveOptions(Options, total=False):
    """The options of optimizers with a denominator: those of the regularizer, and `variance`."""

    variance: Literal["simplified", "direct"]
    """Which of S2.4's two versions of the increment's variance."""


VERSIONS = {"variance": ("simplified", "direct")}
"""The option `variance`: the paper's implemented version first."""


def coupled_decay(group: Mapping[str, Any]) -> float:
    """Return the weight decay that the base adds to the gradient; 0 if decay is decoupled."""
    return 0.0 if group.get("decoupled_weight_decay") else float(group.get("weight_decay", 0))


def momentum(V: Tensor, s2: Tensor, mu: float, dampening: float, first: bool) -> Tensor:
    """Return Var of the heavy ball b_t = μ·b_{t−1} + (1−d)·g_t, b_1 = g_1: V ← μ²V + (1−d)²σ²,
    exact.

    With μ = d = β it is S2.4's σ²(p) = (1−β)²/(1−β²) · EMA_{β²}(σ²).
    """
    if first:
        return V.copy_(s2)
    if dampening == 0:
        return torch.add(s2, V, alpha=mu**2, out=V)
    return V.mul_(mu**2).add_(s2, alpha=(1 - dampening) ** 2)


def nesterov(V: Tensor, s2: Tensor, mu: float, dampening: float, first: bool) -> Tensor:
    """Return Var of g_t + μ·b_t, given V = Var(b_t): g_t appears twice, with total weight 1 + μa,
    where a = 1−d is its weight in b_t.

    μ²V + ((1 + μa)² − μ²a²)σ² = μ²V + (1 + 2μa)σ².
    """
    a = 1.0 if first else 1 - dampening
    return (V * mu**2).add_(s2, alpha=1 + 2 * mu * a)


Weights = tuple[float, float]
"""The factor of the old sum, and the weight of a new value."""


def numerator_weights(beta: float) -> Weights:
    """Return the weights of Var of the average m_t = βm_{t−1} + (1−β)g_t: N ← β²N + (1−β)²σ²."""
    return beta**2, (1 - beta) ** 2


def covariance_weights(beta1: float, beta2: float) -> Weights:
    """Return the weights of Σ_k (1−β₁)β₁ᵏ (1−β₂)β₂ᵏ gσ², with gσ² of k steps ago:
    C ← β₁β₂C + (1−β₁)(1−β₂)gσ². The simplified version has σ² in place of gσ².
    """
    return beta1 * beta2, (1 - beta1) * (1 - beta2)


def denominator_weights(beta: float) -> Weights:
    """Return the weights of Σ_k (1−β)²β²ᵏ g²σ², with g²σ² of k steps ago: V ← β²V + (1−β)²g²σ².
    The simplified version has σ² in place of g²σ². β = 1 stands for AdaGrad's plain sum.
    """
    return (1.0, 1.0) if beta == 1 else (beta**2, (1 - beta) ** 2)


def accumulate_denominator(V: Tensor, ggs2: Tensor, beta: float) -> Tensor:
    """Add the g²σ² of this step to V in place, and return V."""
    keep, take = denominator_weights(beta)
    return V.mul_(keep).add_(ggs2, alpha=take)


def accumulate(sums: list[Tensor], new: list[Tensor], weights: Sequence[Weights]) -> None:
    """Update several sums in place, each with its own weights, of which no first one is 1."""
    # keep·sum + take·new = sum + (1 − keep)·(take/(1 − keep)·new − sum)
    ends = _torch.foreach_mul(new, [take / (1 - keep) for keep, take in weights])
    _torch.foreach_lerp_into(sums, ends, [1 - keep for keep, _ in weights])


def weighted(g: Tensor, s2: Tensor, direct: bool) -> tuple[Tensor, Tensor]:
    """Return gσ² and g²σ², or σ² twice for the simplified version."""
    if not direct:
        return s2, s2
    gs2 = g * s2
    return gs2, gs2 * g


def ratio(delta: Tensor, p2: Tensor, D: Tensor, sums: Sequence[Tensor], direct: bool) -> Tensor:
    """Return Var(n/D) from N, C and V, which do not change; nan where the variance is not known."""
    slope = delta / p2 if direct else delta.abs()
    return bracket(slope, sums).div_(D.square())


def bracket(slope: Tensor, sums: Sequence[Tensor], unit: float = 1.0) -> Tensor:
    """Return N − 2kC + k²V for k = unit·slope; nan where it is not known.

    It is not known if no gradient has arrived yet, or if it is within rounding errors of 0. For
    example, Adam's first step m̂/√v̂ = ±1 has no variance to first order; a history must record
    neither rounding errors nor 0 for it.
    """
    N, C, V = sums
    half = torch.addcmul(C, slope, V, value=-unit / 2)
    found = torch.addcmul(N, slope, half, value=-2 * unit)
    # the positive terms are N + k²V = found + 2kC: this is above 0 where found > r·(found + 2kC)
    r = rounding(N.dtype)
    above = torch.addcmul(found, slope, C, value=-2 * unit * r / (1 - r), out=half)
    return where_positive(found, above)


def rounding(dtype: torch.dtype) -> float:
    """Return the bound on the rounding error of the bracket, relative to its positive terms."""
    return max(BRACKET[0] * torch.finfo(dtype).eps, BRACKET[1])
