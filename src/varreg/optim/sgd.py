"""SGD: plain, heavy ball, Nesterov."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from varreg.optim import increments
from varreg.optim.fused import Increment
from varreg.optim.parts import Part
from varreg.optim.regularized import Regularized

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from varreg.regularizer import Options


class VRSGD(Regularized, torch.optim.SGD):
    r"""`torch.optim.SGD` with variance regularization: the paper's Algorithm 1, and S2.4 for momentum.

    With ḡ the mean gradient and v² the variance of the per-sample gradients that `varreg.observe` measures,

        b ← μ·b + (1−d)·ḡ            V ← μ²·V + (1−d)²·v²          (heavy ball; without momentum b = ḡ, V = v²)
        ρ = V/b²    Ω ← Ω + ρ    λ = (1+s)/(1 + s·ρ/ρ̄), ρ̄ = Ω/t
        x ← x − α·λ·b

    and for Nesterov's momentum the increment is ḡ + μb, of variance μ²V + (1 + 2μ(1−d))v². All three are exact where gradients of
    different steps have independent errors. Coupled weight decay is part of the increment and has no variance.

    The arguments are those of `torch.optim.SGD`, then the keyword-only ones of the regularizer: `varreg.regularizer.Options`.

    >>> import varreg
    >>> model = torch.nn.Linear(2, 1)
    >>> observer = varreg.observe(model)
    >>> optimizer = varreg.VRSGD(model.parameters(), lr=0.1, momentum=0.9, s=2.0)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 2)).square().mean().backward()
    ...     optimizer.step()
    >>> optimizer.lambda_of(model.weight).shape
    torch.Size([1, 2])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **regularizer: Unpack[Options],
    ):
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            regularizer=regularizer,
        )

    def _accumulators(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("vr_variance",) if group["momentum"] else ()

    def _native(self, group: dict[str, Any]) -> Increment | None:
        mu, dampening, decay = group["momentum"], group["dampening"], float(group["weight_decay"])
        sign = -1.0 if group["maximize"] else 1.0

        def numbers(_: Mapping[str, Any], first: bool) -> tuple[float, ...]:
            keep, take, a = (0.0, 1.0, 1.0) if first else (mu**2, (1 - dampening) ** 2, 1 - dampening)
            return keep, take, sign, decay, mu, 1 + 2 * mu * a

        if mu and not group["nesterov"]:
            return Increment("heavy ball", ("momentum_buffer", "vr_variance"), numbers)
        if abs(decay * float(group["lr"])) > 0.5:
            return None  # where x was cannot be told well from where it is
        if mu:
            return Increment("nesterov", ("momentum_buffer", "vr_variance"), numbers, of_gradient=True)
        return Increment("gradient", (), numbers, of_gradient=True)

    def _increment(self, part: Part) -> tuple[Tensor, Tensor]:
        group = part.group
        mu, dampening = group["momentum"], group["dampening"]
        if not mu:
            return part.g, part.s2
        b, V = part["momentum_buffer"].to(part.s2.dtype), part["vr_variance"]
        increments.momentum(V, part.s2, mu, dampening, part.first)
        if not group["nesterov"]:
            return b, V
        return torch.add(part.g, b, alpha=mu), increments.nesterov(V, part.s2, mu, dampening, part.first)
