"""Adam, AdamW and NAdam: an average of gradients over the root of an average of their squares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from varreg.optim import increments
from varreg.optim.fused import Increment
from varreg.optim.parts import Part
from varreg.optim.regularized import Regularized

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from varreg.optim.adaptive import AdaptiveOptions


class _AdamLike(Regularized):
    """N, C and V of Adam's two averages. For amsgrad, C and V stay with the maximum: they are those of the steps that made it."""

    _extra: ClassVar = increments.VERSIONS

    def _accumulators(self, group: dict[str, Any]) -> tuple[str, ...]:
        maximum = ("vr_max_covariance", "vr_max_denominator") if group.get("amsgrad") else ()
        return ("vr_numerator", "vr_covariance", "vr_denominator", *maximum)

    def _native(self, group: dict[str, Any]) -> Increment | None:
        if group["variance"] == "direct" or group.get("amsgrad"):
            return None
        beta1, beta2 = map(float, group["betas"])
        keep = beta1**2, beta1 * beta2, beta2**2
        take = (1 - beta1) ** 2, (1 - beta1) * (1 - beta2), (1 - beta2) ** 2

        def numbers(state: Mapping[str, Any], _: bool) -> tuple[float, ...]:
            t, noise = float(state["step"]), increments.rounding(state["vr_numerator"].dtype)
            return *keep, *take, 1 / (1 - beta1**t), 1 / (1 - beta2**t), group["eps"], noise

        return Increment("adam", ("exp_avg", "exp_avg_sq", "vr_numerator", "vr_covariance", "vr_denominator"), numbers)

    def _increment(self, part: Part) -> tuple[Tensor, Tensor]:
        group = part.group
        beta1, beta2 = map(float, group["betas"])
        g, s2, direct = part.g, part.s2, group["variance"] == "direct"
        N, C, V = (part[f"vr_{name}"] for name in ("numerator", "covariance", "denominator"))
        gs2, ggs2 = increments.weighted(g, s2, direct)
        increments.accumulate_numerator(N, s2, beta1)
        increments.accumulate_covariance(C, gs2, beta1, beta2)
        increments.accumulate_denominator(V, ggs2, beta2)
        square = part["exp_avg_sq"].to(s2.dtype)
        if group.get("amsgrad"):
            square, C, V = self._of_maximum(part, square, C, V, beta1)
        correction = 1 - beta2 ** float(part["step"])
        p2 = (square / correction).sqrt_()
        n, N, C = self._numerator(part, group, N, C, gs2 * (1 - beta2))
        delta = n / (p2 + group["eps"])
        return delta, increments.ratio(delta, p2, group["eps"], (N, C / correction, V / correction**2), direct)

    def _numerator(self, part: Part, group: dict[str, Any], N: Tensor, C: Tensor, bgs2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """n, its variance, and its covariance sum: here the average over its bias correction."""
        correction = 1 - float(group["betas"][0]) ** float(part["step"])
        return part["exp_avg"].to(N.dtype) / correction, N / correction**2, C / correction

    @staticmethod
    def _of_maximum(part: Part, square: Tensor, C: Tensor, V: Tensor, beta1: float) -> tuple[Tensor, Tensor, Tensor]:
        """The running maximum of the average, and its C and V: renewed where it was reached now; else only n goes on, by β₁."""
        maximum = part["max_exp_avg_sq"].to(square.dtype)
        now = square >= maximum
        max_C, max_V = part["vr_max_covariance"], part["vr_max_denominator"]
        max_C.copy_(torch.where(now, C, max_C * beta1))
        max_V.copy_(torch.where(now, V, max_V))
        return maximum, max_C, max_V


class VRAdam(_AdamLike, torch.optim.Adam):
    r"""`torch.optim.Adam` with variance regularization (S2.4).

    With m̂ and v̂ Adam's bias-corrected averages, p₂ = √v̂ and the increment δ̄ = m̂/(p₂ + eps),

        Var(δ̄) ≈ (1/(p₂+eps)²) [N − 2|δ̄|C + δ̄²V]        ρ = Var(δ̄)/δ̄²,  and λ from ρ as for SGD
        N ← β₁²N + (1−β₁)²σ²,  C ← β₁β₂C + (1−β₁)(1−β₂)σ²,  V ← β₂²V + (1−β₂)²σ²

    which is S2.4's simplified version, with its misprints corrected (β₂² for V, σ² for σ, |δ̄| for δ̄), and N, C, V bias-corrected as m
    and v are. `variance="direct"` weights σ² with g/p₂ in C and its square in V, which S2.4 has before it simplifies. With `amsgrad`,
    C and V stay with the maximum. To first order in the errors, both; the docs say how far off it is.

    The arguments are those of `torch.optim.Adam`, then the keyword-only ones of the regularizer: `varreg.regularizer.Options`, and
    `variance`: `"simplified"` or `"direct"`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **regularizer: Unpack[AdaptiveOptions],
    ):
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            regularizer=regularizer,
        )


class VRAdamW(_AdamLike, torch.optim.AdamW):
    """`torch.optim.AdamW` with variance regularization: `VRAdam` with decoupled weight decay, which λ does not scale.

    The arguments are those of `torch.optim.AdamW`, then the keyword-only ones of `VRAdam`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **regularizer: Unpack[AdaptiveOptions],
    ):
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            regularizer=regularizer,
        )


class VRNAdam(_AdamLike, torch.optim.NAdam):
    r"""`torch.optim.NAdam` with variance regularization.

    As `VRAdam`, with Nesterov's numerator n = c₁ḡ + c₂m, c₁ = (1−μ_t)/(1−Πμ) and c₂ = μ_{t+1}/(1−Πμ·μ_{t+1}), in which ḡ comes twice:

        Var(n) = c₂²N + (c₁² + 2c₁c₂(1−β₁))σ²        Cov(n, p₂²): c₂C + c₁(1−β₂)gσ²

    The arguments are those of `torch.optim.NAdam`, then the keyword-only ones of `VRAdam`. Decoupled weight decay is not scaled.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **regularizer: Unpack[AdaptiveOptions],
    ):
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            momentum_decay,
            decoupled_weight_decay,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            regularizer=regularizer,
        )

    def _native(self, group: dict[str, Any]) -> None:
        """Its numerator is another one."""

    def _numerator(self, part: Part, group: dict[str, Any], N: Tensor, C: Tensor, bgs2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        beta1, t = float(group["betas"][0]), float(part["step"])
        mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (k * group["momentum_decay"])) for k in (t, t + 1))
        product = float(part["mu_product"])
        c1, c2 = (1 - mu) / (1 - product), mu_next / (1 - product * mu_next)
        n = torch.add(part.g * c1, part["exp_avg"].to(N.dtype), alpha=c2)
        return n, (N * c2**2).add_(part.s2, alpha=c1**2 + 2 * c1 * c2 * (1 - beta1)), (C * c2).add_(bgs2, alpha=c1)
