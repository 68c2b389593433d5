"""RMSprop, Adagrad and Adadelta: the gradient over the root of an average, or a sum, of its squares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from varreg.optim import increments
from varreg.optim.parts import Part
from varreg.optim.regularized import Regularized
from varreg.regularizer import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AdaptiveOptions(Options, total=False):
    """What optimizers with a denominator have beside the regularizer's options."""

    variance: Literal["simplified", "direct"]
    """Which of S2.4's two versions of the increment's variance."""


class VRRMSprop(Regularized, torch.optim.RMSprop):
    r"""`torch.optim.RMSprop` with variance regularization: S2.4's derivation for n = ḡ, p₂² = EMA_α(ḡ²).

        Var(ḡ/D) ≈ (1/D²) [σ² − 2|δ̄|(1−α)σ² + δ̄²V],  V ← α²V + (1−α)²σ²,  D = p₂ + eps

    `variance="direct"` weights with g/p₂ and its square. `centered`: p₂² = EMA(ḡ²) − EMA(ḡ)², where direct weights are (g_τ − EMA(ḡ))/p₂. With
    `momentum`, b ← μb + δ̄ has Var(b) ← μ²Var(b) + Var(δ̄): what two steps' denominators have in common is left out.

    The arguments are those of `torch.optim.RMSprop`, then the keyword-only ones of `VRAdam`.
    """

    _extra: ClassVar = increments.VERSIONS

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **regularizer: Unpack[AdaptiveOptions],
    ):
        super().__init__(
            params,
            lr,
            alpha,
            eps,
            weight_decay,
            momentum,
            centered,
            capturable,
            foreach,
            maximize,
            differentiable,
            regularizer=regularizer,
        )

    def _accumulators(self, group: dict[str, Any]) -> tuple[str, ...]:
        centered = ("vr_denominator_1", "vr_denominator_0") if group["centered"] and group["variance"] == "direct" else ()
        return ("vr_denominator", *centered, *(("vr_variance",) if group["momentum"] else ()))

    def _increment(self, part: Part) -> tuple[Tensor, Tensor]:
        group = part.group
        alpha, g, s2, direct = group["alpha"], part.g, part.s2, group["variance"] == "direct"
        gs2, ggs2 = increments.weighted(g, s2, direct)
        V = increments.accumulate_denominator(part["vr_denominator"], ggs2, alpha)
        square = part["square_avg"].to(s2.dtype)
        if group["centered"]:
            mean = part["grad_avg"].to(s2.dtype)
            square = torch.addcmul(square, mean, mean, value=-1)
            if direct:  # Σb²(g − ḡ)²σ² = Σb²g²σ² − 2ḡ·Σb²gσ² + ḡ²·Σb²σ², with the average ḡ of now
                V1 = increments.accumulate_denominator(part["vr_denominator_1"], gs2, alpha)
                V0 = increments.accumulate_denominator(part["vr_denominator_0"], s2, alpha)
                V = torch.addcmul(V, mean, V1, value=-2).addcmul_(mean.square(), V0).clamp_(min=0)
                gs2 = gs2 - mean * s2
        p2 = square.sqrt()
        delta = g / (p2 + group["eps"])
        variance = increments.ratio(delta, p2, group["eps"], (s2, gs2 * (1 - alpha), V), direct)
        if not group["momentum"]:
            return delta, variance
        known = variance.nan_to_num(nan=0.0, posinf=0.0)
        return part["momentum_buffer"].to(s2.dtype), increments.momentum(
            part["vr_variance"], known, group["momentum"], 0.0, part.first
        )


class VRAdagrad(Regularized, torch.optim.Adagrad):
    r"""`torch.optim.Adagrad` with variance regularization: S2.4's derivation for n = ḡ, p₂² = Σḡ².

        Var(ḡ/D) ≈ (1/D²) [σ² − 2|δ̄|σ² + δ̄²V],  V ← V + σ²,  D = p₂ + eps

    `variance="direct"` weights with g/p₂ and its square. That is the default here, other than for the averages: replacing |g_τ|/p₂ by 1 makes sense
    where p₂ is an average of |g|, and here it is a sum over all steps.

    The arguments are those of `torch.optim.Adagrad`, then the keyword-only ones of `VRAdam`.
    """

    _extra: ClassVar = {"variance": ("direct", "simplified")}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **regularizer: Unpack[AdaptiveOptions],
    ):
        super().__init__(
            params,
            lr,
            lr_decay,
            weight_decay,
            initial_accumulator_value,
            eps,
            foreach,
            maximize=maximize,
            differentiable=differentiable,
            fused=fused,
            regularizer=regularizer,
        )

    def _accumulators(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("vr_denominator",)

    def _increment(self, part: Part) -> tuple[Tensor, Tensor]:
        group = part.group
        g, s2, direct = part.g, part.s2, group["variance"] == "direct"
        gs2, ggs2 = increments.weighted(g, s2, direct)
        V = increments.accumulate_denominator(part["vr_denominator"], ggs2, 1)
        p2 = part["sum"].to(s2.dtype).sqrt()
        delta = g / (p2 + group["eps"])
        return delta, increments.ratio(delta, p2, group["eps"], (s2, gs2, V), direct)


class VRAdadelta(Regularized, torch.optim.Adadelta):
    r"""`torch.optim.Adadelta` with variance regularization: S2.4's derivation for δ̄ = A·ḡ/p₂, p₂² = EMA_ρ(ḡ²) + eps.

    A = √(EMA_ρ(δ̄²) + eps), of the steps before, is taken as given; then Var(δ̄) = A²·Var(ḡ/p₂), the latter as for RMSprop.

    The arguments are those of `torch.optim.Adadelta`, then the keyword-only ones of `VRAdam`.
    """

    _extra: ClassVar = increments.VERSIONS

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        **regularizer: Unpack[AdaptiveOptions],
    ):
        super().__init__(
            params,
            lr,
            rho,
            eps,
            weight_decay,
            foreach,
            capturable=capturable,
            maximize=maximize,
            differentiable=differentiable,
            regularizer=regularizer,
        )

    def _accumulators(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("vr_denominator",)

    def _increment(self, part: Part) -> tuple[Tensor, Tensor]:
        group = part.group
        rho, eps, g, s2, direct = group["rho"], group["eps"], part.g, part.s2, group["variance"] == "direct"
        gs2, ggs2 = increments.weighted(g, s2, direct)
        V = increments.accumulate_denominator(part["vr_denominator"], ggs2, rho)
        p2 = part["square_avg"].to(s2.dtype).add(eps).sqrt_()
        z = g / p2
        variance = increments.ratio(z, p2, 0.0, (s2, gs2 * (1 - rho), V), direct)
        # The average has moved on to ρ·a + (1−ρ)·(a + eps)·z²; A² = a + eps is what it was before
        acc, zz = part["acc_delta"].to(s2.dtype), z.square()
        A2 = (acc - (1 - rho) * eps * zz).div_((zz * (1 - rho)).add_(rho).clamp_(min=1e-30)).clamp_(min=0).add_(eps)
        return z * A2.sqrt(), variance * A2
