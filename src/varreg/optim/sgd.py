"""SGD: plain, heavy ball, Nesterov."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from varreg.native import contract
from varreg.optim import increments
from varreg.optim.base import Regularized
from varreg.optim.increments import Increment, Kernel
from varreg.optim.parameter_step import ParameterStep


def _gradient(step: ParameterStep) -> tuple[Tensor, Tensor]:
    """Return ḡ and σ²."""
    return step.g, step.s2


def _heavy_ball(step: ParameterStep) -> tuple[Tensor, Tensor]:
    """Return b = μ·b + (1−d)·ḡ, which the base has updated, and V ← μ²·V + (1−d)²·σ²."""
    mu, dampening = step.group["momentum"], step.group["dampening"]
    V = increments.momentum(step["vr_variance"], step.s2, mu, dampening, step.first)
    return step["momentum_buffer"].to(step.s2.dtype), V


def _nesterov(step: ParameterStep) -> tuple[Tensor, Tensor]:
    """Return ḡ + μb and μ²V + (1 + 2μ(1−d))σ²."""
    mu, dampening = step.group["momentum"], step.group["dampening"]
    b, V = _heavy_ball(step)
    variance = increments.nesterov(V, step.s2, mu, dampening, step.first)
    return torch.add(step.g, b, alpha=mu), variance


def _fill(
    task: contract.Task,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    first: bool,
    with_base_step: bool,
) -> None:
    task.sign = -1.0 if group["maximize"] else 1.0
    task.decay, task.take = float(group["weight_decay"]), 1 - group["dampening"]
    if mu := group["momentum"]:
        a = 1.0 if first else 1 - group["dampening"]  # b starts as the first gradient
        task.average = state["momentum_buffer"].data_ptr()
        task.V = state["vr_variance"].data_ptr()
        task.keep_V, task.take_V = 0.0 if first else mu**2, a**2
        task.mu, task.again = mu, 1 + 2 * mu * a


_BUFFERS: Any = {"reads": ("momentum_buffer",), "sums": ("vr_variance",), "is_linear": True}
GRADIENT = Increment(
    _gradient,
    kernel=Kernel(contract.Increment.GRADIENT, _fill, knows_base=True, takes_gradient=True),
    is_linear=True,
)
HEAVY_BALL = Increment(
    _heavy_ball,
    **_BUFFERS,
    kernel=Kernel(
        contract.Increment.HEAVY_BALL, _fill, knows_base=True, can_repeat=True, shares_count=True
    ),
)
NESTEROV = Increment(
    _nesterov,
    **_BUFFERS,
    kernel=Kernel(contract.Increment.NESTEROV, _fill, knows_base=True, takes_gradient=True),
)


class VRSGD(Regularized, torch.optim.SGD):
    r"""`torch.optim.SGD` with variance regularization: the paper's Algorithm 1, and S2.4 for
    momentum.

    With ḡ the mean gradient and v² the variance of the per-sample gradients that `varreg.observe`
    measures,

        b ← μ·b + (1−d)·ḡ     V ← μ²·V + (1−d)²·v²     (heavy ball; without momentum b = ḡ, V = v²)
        ρ = V/b²     Ω ← Ω + ρ     λ = (1+s)/(1 + s·ρ/ρ̄), ρ̄ = Ω/t
        x ← x − α·λ·b

    and for Nesterov's momentum the increment is ḡ + μb, of variance μ²V + (1 + 2μ(1−d))v². All
    three are exact where gradients of different steps have independent errors. Coupled weight decay
    is part of the increment and has no variance.

    The arguments are those of `torch.optim.SGD`, then the keyword-only ones of the regularizer:
    `varreg.options.Options`.

    >>> import torch, varreg
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

    def _increment(self, group: dict[str, Any]) -> Increment:
        if group["momentum"] and not group["nesterov"]:
            return HEAVY_BALL
        increment = NESTEROV if group["momentum"] else GRADIENT
        if abs(float(group["weight_decay"]) * float(group["lr"])) > 0.5:
            # the kernel divides by 1 − lr·decay to find the old x: that must not be near 0
            return replace(increment, kernel=None)
        return increment
