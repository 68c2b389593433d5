"""Adagrad: the gradient over the root of the sum of its squares."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from varreg.optim import increments
from varreg.optim.base import Regularized
from varreg.optim.increments import Increment
from varreg.optim.parameter_step import ParameterStep


def _adagrad(step: ParameterStep) -> tuple[Tensor, Tensor]:
    """Return δ̄ = ḡ/(p₂ + eps) and its variance, with V ← V + σ²."""
    group, g, s2 = step.group, step.g, step.s2
    direct = group["variance"] == "direct"
    gs2, ggs2 = increments.weighted(g, s2, direct)
    V = increments.accumulate_denominator(step["vr_denominator"], ggs2, 1)
    p2 = step["sum"].to(s2.dtype).sqrt()
    D = p2 + group["eps"]
    delta = g / D
    return delta, increments.ratio(delta, p2, D, (s2, gs2, V), direct)


ADAGRAD = Increment(_adagrad, ("sum",), ("vr_denominator",))


class VRAdagrad(Regularized, torch.optim.Adagrad):
    r"""`torch.optim.Adagrad` with variance regularization: S2.4's derivation for n = ḡ, p₂² = Σḡ².

        Var(ḡ/D) ≈ (1/D²) [σ² − 2|δ̄|σ² + δ̄²V],  V ← V + σ²,  D = p₂ + eps

    `variance="direct"` weights σ² with g/p₂ and its square. It is the default here, unlike for
    Adam: replacing |g_τ|/p₂ by 1 makes sense if p₂ is an average of |g|, but here p₂ is a sum over
    all steps.

    The arguments are those of `torch.optim.Adagrad`, then the keyword-only ones of `VRAdam`.
    """

    _extra_options: ClassVar = {"variance": ("direct", "simplified")}

    def _increment(self, group: dict[str, Any]) -> Increment:
        return ADAGRAD
