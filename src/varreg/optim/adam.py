"""Adam and AdamW: an average of gradients over the root of an average of their squares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from varreg.native import contract
from varreg.native.torch_root import MODE, torch_root
from varreg.optim import increments
from varreg.optim.base import Regularized
from varreg.optim.increments import Increment, Kernel
from varreg.optim.parameter_step import ParameterStep

Numerator = tuple[Tensor, Tensor, Tensor, float]
"""The numerator n, its variance N, its covariance sum C with the denominator, and the bias
correction: the number by which n has yet to be divided.
"""
READS = ("exp_avg", "exp_avg_sq")
SUMS = ("vr_numerator", "vr_covariance", "vr_denominator")


def average_over_root(
    step: ParameterStep, numerator: Callable[[ParameterStep, Tensor, Tensor, Tensor], Numerator]
) -> tuple[Tensor, Tensor]:
    """Return δ̄ = n/(c₁(p₂ + eps)) and its variance, with p₂² Adam's average of squares over its
    bias correction c₂.

    Update N, C and V with the decay rates of the two averages. `numerator` returns n, with N and C
    for this n. With the corrections of N, C and V taken out of it, the variance's bracket is N −
    2kC + k²V, with k = |n|/(c₂(p₂ + eps)); or n/p₂ for |n| in the direct version.
    """
    group, g, s2 = step.group, step.g, step.s2
    (beta1, beta2), direct = map(float, group["betas"]), group["variance"] == "direct"
    N, C, V = sums = [step[name] for name in SUMS]
    gs2, ggs2 = increments.weighted(g, s2, direct)
    weights = (
        increments.numerator_weights(beta1),
        increments.covariance_weights(beta1, beta2),
        increments.denominator_weights(beta2),
    )
    increments.accumulate(sums, [s2, gs2, ggs2], weights)
    squares = step["exp_avg_sq"].to(s2.dtype)
    if group.get("amsgrad"):
        squares, C, V = _of_maximum(step, squares, C, V, beta1)
    n, N, C, c1 = numerator(step, N, C, gs2)
    root, root_c2 = squares.sqrt(), math.sqrt(1 - beta2**step.t)  # p₂ = root/root_c2
    D = root + group["eps"] * root_c2  # root_c2·(p₂ + eps)
    if direct:
        bracket = increments.bracket((n / D).div_(root), (N, C, V))
    else:
        bracket = increments.bracket(n.abs().div_(D), (N, C, V), unit=1 / root_c2)
    if step.in_any_unit:  # of each element: 1/(c₁(p₂ + eps)) is a factor of δ̄, its square of Var
        return n, bracket
    D.mul_(c1 / root_c2)
    return n / D, bracket.div_(D.square())


def _average(step: ParameterStep, N: Tensor, C: Tensor, gs2: Tensor) -> Numerator:
    """Return n = m, with its bias correction."""
    return step["exp_avg"].to(N.dtype), N, C, 1 - float(step.group["betas"][0]) ** step.t


def _of_maximum(
    step: ParameterStep, squares: Tensor, C: Tensor, V: Tensor, beta1: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the running maximum of the average of squares, with its C and V. Where this step
    reached the maximum, C and V are the current ones; elsewhere V stays, and C decays by β₁.
    """
    maximum = step["max_exp_avg_sq"].to(squares.dtype)
    now = squares >= maximum
    max_C, max_V = step["vr_max_covariance"], step["vr_max_denominator"]
    max_C.copy_(torch.where(now, C, max_C * beta1))
    max_V.copy_(torch.where(now, V, max_V))
    return maximum, max_C, max_V


def _adam(step: ParameterStep) -> tuple[Tensor, Tensor]:
    return average_over_root(step, _average)


def _fill(
    task: contract.Task,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    first: bool,
    with_base_step: bool,
) -> None:
    (beta1, beta2), t = map(float, group["betas"]), float(state["step"]) + with_base_step
    N = state["vr_numerator"]
    task.average, task.squares = state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()
    task.N, task.C = N.data_ptr(), state["vr_covariance"].data_ptr()
    task.V = state["vr_denominator"].data_ptr()
    task.keep_N, task.keep_C, task.keep_V = beta1**2, beta1 * beta2, beta2**2
    task.take_N, task.take_V = (1 - beta1) ** 2, (1 - beta2) ** 2
    task.take_C = (1 - beta1) * (1 - beta2)
    task.unbias_n, task.unbias_p = 1 / (1 - beta1**t), 1 / (1 - beta2**t)
    task.eps, task.known = group["eps"], increments.rounding(N.dtype)
    if with_base_step:
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        is_decoupled = bool(group["decoupled_weight_decay"])
        task.sign, task.decay = (-1.0 if group["maximize"] else 1.0), 0.0 if is_decoupled else decay
        task.shrink = 1 - lr * decay if is_decoupled else 1.0
        task.blend, task.keep_p, task.take_p = 1 - beta1, beta2, 1 - beta2
        task.root_c2, task.step_size = (1 - beta2**t) ** 0.5, lr / (1 - beta1**t)
        task.root, task.root_threads = torch_root(N.dtype)
        task.root_mode = MODE


KERNEL = Kernel(contract.Increment.ADAM, _fill, knows_base=True, can_repeat=True)
SIMPLIFIED = Increment(_adam, READS, SUMS, KERNEL)
DIRECT = Increment(_adam, READS, SUMS)
AMSGRAD = Increment(
    _adam, (*READS, "max_exp_avg_sq"), (*SUMS, "vr_max_covariance", "vr_max_denominator")
)


class _Adam(Regularized):
    """The common base of `VRAdam` and `VRAdamW`."""

    _extra_options: ClassVar = increments.VERSIONS

    def _increment(self, group: dict[str, Any]) -> Increment:
        if group["amsgrad"]:
            return AMSGRAD
        return DIRECT if group["variance"] == "direct" else SIMPLIFIED


class VRAdam(_Adam, torch.optim.Adam):
    r"""`torch.optim.Adam` with variance regularization (S2.4).

    With m̂ and v̂ Adam's bias-corrected averages, p₂ = √v̂ and the increment δ̄ = m̂/(p₂ + eps),

        Var(δ̄) ≈ (1/(p₂+eps)²) [N − 2|δ̄|C + δ̄²V]        ρ = Var(δ̄)/δ̄²,  and λ from ρ as for SGD
        N ← β₁²N + (1−β₁)²σ²,  C ← β₁β₂C + (1−β₁)(1−β₂)σ²,  V ← β₂²V + (1−β₂)²σ²

    This is S2.4's simplified version, with its misprints corrected (β₂² for V, σ² for σ, |δ̄| for
    δ̄), and N, C, V bias-corrected as m and v are. `variance="direct"` weights σ² with g/p₂ in C
    and its square in V: S2.4's version before it is simplified. With `amsgrad`, C and V are those
    of the step that reached the maximum. Both versions are right to first order in the errors; the
    docs say how accurate they are.

    The arguments are those of `torch.optim.Adam`, then the keyword-only ones of the regularizer:
    `varreg.options.Options`, and `variance`: `"simplified"` or `"direct"`.
    """


class VRAdamW(_Adam, torch.optim.AdamW):
    """`torch.optim.AdamW` with variance regularization: `VRAdam` with decoupled weight decay, which
    λ does not scale.

    The arguments are those of `torch.optim.AdamW`, then the keyword-only ones of `VRAdam`.
    """
