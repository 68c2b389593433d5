"""NAdam: Adam with Nesterov's numerator."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from varreg.optim import increments
from varreg.optim.adam import READS, SUMS, Numerator, average_over_root
from varreg.optim.base import Regularized
from varreg.optim.increments import Increment
from varreg.optim.parameter_step import ParameterStep


def _nesterov(step: ParameterStep, N: Tensor, C: Tensor, gs2: Tensor) -> Numerator:
    """Return n = c₁ḡ + c₂m, Var(n) = c₂²N + (c₁² + 2c₁c₂(1−β₁))σ², and c₂C + c₁(1−β₂)gσ²."""
    (beta1, beta2), decay = map(float, step.group["betas"]), step.group["momentum_decay"]
    t, product = step.t, float(step["mu_product"])
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (k * decay)) for k in (t, t + 1))
    c1, c2 = (1 - mu) / (1 - product), mu_next / (1 - product * mu_next)
    n = torch.add(step.g * c1, step["exp_avg"].to(N.dtype), alpha=c2)
    variance = (N * c2**2).add_(step.s2, alpha=c1**2 + 2 * c1 * c2 * (1 - beta1))
    return n, variance, (C * c2).add_(gs2, alpha=c1 * (1 - beta2)), 1.0


def _nadam(step: ParameterStep) -> tuple[Tensor, Tensor]:
    return average_over_root(step, _nesterov)


NADAM = Increment(_nadam, READS, SUMS)


class VRNAdam(Regularized, torch.optim.NAdam):
    r"""`torch.optim.NAdam` with variance regularization.

    It is `VRAdam` with Nesterov's numerator n = c₁ḡ + c₂m, where c₁ = (1−μ_t)/(1−Πμ) and c₂ =
    μ_{t+1}/(1−Πμ·μ_{t+1}). In n, ḡ appears twice:

        Var(n) = c₂²N + (c₁² + 2c₁c₂(1−β₁))σ²        Cov(n, p₂²): c₂C + c₁(1−β₂)gσ²

    The arguments are those of `torch.optim.NAdam`, then the keyword-only ones of `VRAdam`. λ does
    not scale decoupled weight decay.
    """

    _extra_options: ClassVar = increments.VERSIONS

    def _increment(self, group: dict[str, Any]) -> Increment:
        return NADAM
