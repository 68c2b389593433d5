"""RMSprop: the gradient over the root of an average of its squares."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from varreg.optim import increments
from varreg.optim.base import Regularized
from varreg.optim.increments import Increment
from varreg.optim.parameter_step import ParameterStep


def _rmsprop(step: ParameterStep) -> tuple[Tensor, Tensor]:
    """Return δ̄ = ḡ/(p₂ + eps) and its variance; with momentum, b ← μb + δ̄ and that of b."""
    group, g, s2 = step.group, step.g, step.s2
    alpha, direct = group["alpha"], group["variance"] == "direct"
    gs2, ggs2 = increments.weighted(g, s2, direct)
    V = increments.accumulate_denominator(step["vr_denominator"], ggs2, alpha)
    squares = step["square_avg"].to(s2.dtype)
    if group["centered"]:
        mean = step["grad_avg"].to(s2.dtype)
        squares = torch.addcmul(squares, mean, mean, value=-1)
        if direct:  # Σb²(g − ḡ)²σ² = Σb²g²σ² − 2ḡ·Σb²gσ² + ḡ²·Σb²σ², with the present average ḡ
            V1 = increments.accumulate_denominator(step["vr_denominator_1"], gs2, alpha)
            V0 = increments.accumulate_denominator(step["vr_denominator_0"], s2, alpha)
            V = torch.addcmul(V, mean, V1, value=-2).addcmul_(mean.square(), V0).clamp_(min=0)
            gs2 = gs2 - mean * s2
    p2 = squares.sqrt()
    D = p2 + group["eps"]
    delta = g / D
    variance = increments.ratio(delta, p2, D, (s2, gs2 * (1 - alpha), V), direct)
    if not group["momentum"]:
        return delta, variance
    known = variance.nan_to_num(nan=0.0, posinf=0.0)
    total = increments.momentum(step["vr_variance"], known, group["momentum"], 0.0, step.first)
    return step["momentum_buffer"].to(s2.dtype), total


class VRRMSprop(Regularized, torch.optim.RMSprop):
    r"""`torch.optim.RMSprop` with variance regularization: S2.4's derivation for n = ḡ, p₂² =
    EMA_α(ḡ²).

        Var(ḡ/D) ≈ (1/D²) [σ² − 2|δ̄|(1−α)σ² + δ̄²V],  V ← α²V + (1−α)²σ²,  D = p₂ + eps

    `variance="direct"` weights σ² with g/p₂ and its square. With `centered`, p₂² = EMA(ḡ²) −
    EMA(ḡ)², and the direct weights are (g_τ − EMA(ḡ))/p₂. With `momentum`, b ← μb + δ̄ has Var(b) ←
    μ²Var(b) + Var(δ̄): the covariance between the denominators of different steps is neglected.

    The arguments are those of `torch.optim.RMSprop`, then the keyword-only ones of `VRAdam`.
    """

    _extra_options: ClassVar = increments.VERSIONS

    def _increment(self, group: dict[str, Any]) -> Increment:
        reads, sums = ["square_avg"], ["vr_denominator"]
        if group["centered"]:
            reads.append("grad_avg")
            if group["variance"] == "direct":
                sums += ["vr_denominator_1", "vr_denominator_0"]
        if group["momentum"]:
            reads.append("momentum_buffer")
            sums.append("vr_variance")
        return Increment(_rmsprop, tuple(reads), tuple(sums))
