"""Adadelta: the gradient over the root of an average of its squares, times the root of an average
of past squared increments.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from varreg.optim import increments
from varreg.optim.base import Regularized
from varreg.optim.increments import Increment
from varreg.optim.parameter_step import ParameterStep
from varreg.thresholds import TINY_DIVISOR


def _adadelta(step: ParameterStep) -> tuple[Tensor, Tensor]:
    """Return δ̄ = A·ḡ/p₂ and A²·Var(ḡ/p₂)."""
    group, g, s2 = step.group, step.g, step.s2
    rho, eps, direct = group["rho"], group["eps"], group["variance"] == "direct"
    gs2, ggs2 = increments.weighted(g, s2, direct)
    V = increments.accumulate_denominator(step["vr_denominator"], ggs2, rho)
    p2 = step["square_avg"].to(s2.dtype).add(eps).sqrt_()
    z = g / p2
    variance = increments.ratio(z, p2, p2, (s2, gs2 * (1 - rho), V), direct)
    # A² = a + eps, and the base's step has changed the average a to ρ·a + (1−ρ)·(a + eps)·z²: solve
    after, zz = step["acc_delta"].to(s2.dtype), z.square()
    divisor = (zz * (1 - rho)).add_(rho).clamp_(min=TINY_DIVISOR)
    A2 = (after - (1 - rho) * eps * zz).div_(divisor).clamp_(min=0).add_(eps)
    return z * A2.sqrt(), variance * A2


ADADELTA = Increment(_adadelta, ("square_avg", "acc_delta"), ("vr_denominator",))


class VRAdadelta(Regularized, torch.optim.Adadelta):
    r"""`torch.optim.Adadelta` with variance regularization: S2.4's derivation for δ̄ = A·ḡ/p₂, p₂²
    = EMA_ρ(ḡ²) + eps.

    A = √(EMA_ρ(δ̄²) + eps), from the earlier steps, counts as a constant. Then Var(δ̄) =
    A²·Var(ḡ/p₂), with Var(ḡ/p₂) as for RMSprop.

    The arguments are those of `torch.optim.Adadelta`, then the keyword-only ones of `VRAdam`.
    """

    _extra_options: ClassVar = increments.VERSIONS

    def _increment(self, group: dict[str, Any]) -> Increment:
        return ADADELTA
