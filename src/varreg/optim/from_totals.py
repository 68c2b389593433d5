"""Steps on a model that is measured by sums over elements only (`observe(model, per="model")`).

λ of a tensor or of the model needs Σσ² and Σδ̄² only. If the increment is linear in the gradients,
the variance of each element may be replaced by the mean variance: no sum changes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from varreg import _torch
from varreg.devices import constant, has_float64
from varreg.engine import Moments, Totals, deferred
from varreg.engine.contribution import stat_dtype
from varreg.engine.on_device import joined, joined_copies
from varreg.engine.totals_ledger import TotalsLedger, lengths, lengths_on_device
from varreg.errors import VarregError
from varreg.optim.parameter_names import names
from varreg.optim.scopes import SCOPES
from varreg.thresholds import LARGEST_SQUARE, SAME_LENGTH, SMALLEST_SQUARE

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from varreg.optim.parameter_step import ParameterStep


class _Found(NamedTuple):
    """What follows from the sums of one parameter."""

    kappa: float
    """κ: the gradient is κS."""
    each: float
    """The mean over elements of m·ΣW − S·S."""
    products: tuple[float, ...]
    """S·S, g·S, g·g and ΣW."""
    is_zero: bool
    """Whether S is 0."""


def set_moments(optimizer: Optimizer, steps: list[ParameterStep]) -> None:
    """Give moments that have the measured sums to steps that have `Totals`. On a device, take one
    wait and few kernels for all steps. Raise a VarregError if a step needs more than sums.
    """
    by_kind: dict[Any, list[ParameterStep]] = {}
    for step in steps:
        _refuse_elements(optimizer, step)
        if not step.parameter.is_cpu:
            by_kind.setdefault((step.grad.device, step.grad.dtype), []).append(step)
            continue
        found = _judge(optimizer, step, *lengths([step.grad])[0], *map(float, _measured(step)))
        total = step.grad.detach().to(stat_dtype(step.grad.dtype), copy=True)
        if found.is_zero:
            total.zero_()
        elif found.kappa != 1:
            total.div_(found.kappa)
        square = total.square().add_(found.each).div_(_totals(step).count)
        _replace(step, total, square)
    if by_kind:
        _set_on_devices(optimizer, list(by_kind.values()))


def _set_on_devices(optimizer: Optimizer, kinds: list[list[ParameterStep]]) -> None:
    """Set the moments and the products of steps. The steps of each list are alike in type and
    device.
    """
    asked = []
    for steps in kinds:
        grads = lengths_on_device([step.grad.detach() for step in steps])
        sums = [value for step in steps for value in _measured(step)]
        asked += [grads, torch.stack([_like(grads, value) for value in sums])]
    values = iter(deferred.fetch(asked))
    for steps in kinds:
        lengths_of_g, measured = next(values), next(values)
        n, wanted = len(steps), stat_dtype(steps[0].grad.dtype)
        rows = zip(
            lengths_of_g[:n], lengths_of_g[n:], *(measured[i::3] for i in range(3)), strict=True
        )
        found = [_judge(optimizer, step, *row) for step, row in zip(steps, rows, strict=True)]
        totals = joined_copies([step.grad.detach().to(wanted) for step in steps])
        block: Any = joined(totals)
        if any(each.kappa != 1 for each in found):
            _torch.foreach_div_into(totals, [each.kappa or 1.0 for each in found])
        for total, each in zip(totals, found, strict=True):
            if each.is_zero:
                total.zero_()
        squares = block.square().split([total.numel() for total in totals])
        _torch.foreach_add_into(squares, [each.each for each in found])
        _torch.foreach_div_into(squares, [float(_totals(step).count) for step in steps])
        for step, total, square, each in zip(steps, totals, squares, found, strict=True):
            _replace(step, total, square.view(total.shape).data)
            step.products = each.products


def _like(t: Tensor, value: Tensor | float) -> Tensor:
    return value.to(t) if isinstance(value, Tensor) else constant(value, t)


def _totals(step: ParameterStep) -> Totals:
    m: Any = step.moments
    assert isinstance(m, Totals)
    return m


def _replace(step: ParameterStep, total: Tensor, square: Tensor) -> None:
    m = _totals(step)
    step.moments = Moments(m.count, m.groups, total, square, m.reduction)


def _measured(step: ParameterStep) -> tuple[Tensor | float, ...]:
    """Return Σ|S_p|, |S|² and ΣW."""
    m, ledger = _totals(step), step.ledger
    assert isinstance(ledger, TotalsLedger)
    return ledger.length1, m.length2, m.spread


def _refuse_elements(optimizer: Optimizer, step: ParameterStep) -> None:
    """Raise a VarregError if the step needs the variance of each element."""
    kind, name = type(optimizer).__name__, _totals(step).name
    per = step.group["per"]
    if SCOPES[per].needs_elements:
        raise VarregError(
            f"varreg: {kind} with per={per!r} needs the variance of each element, and "
            f"'{name}' is observed with per='model' or per='tensor', which keep sums over "
            f"elements alone. Use {kind}(..., per='model'), or varreg.observe(model)."
        )
    if not step.increment.is_linear:
        raise VarregError(
            f"varreg: the increment of {kind} divides each element by a number of its own, so that "
            f"its variance needs that of each element, and '{name}' is observed with "
            "per='model' or per='tensor', which keep sums over elements alone. Use "
            "varreg.observe(model), or VRSGD."
        )


def _judge(
    optimizer: Optimizer,
    step: ParameterStep,
    g1: float,
    g2: float,
    S1: float,
    S2: float,
    spread: float,
) -> _Found:
    """Return what follows from Σ|g| and |g|² of the gradient, and Σ|S|, |S|² and ΣW of the measured
    one. Raise a VarregError if the gradient is no multiple of the measured one.
    """
    m, p, ledger = _totals(step), step.parameter, step.ledger
    assert ledger is not None
    kappa = math.sqrt(g2 / S2) if S2 and math.isfinite(g2) else 1.0
    slack = max(SAME_LENGTH, m.eps, ledger.precision)
    if not p.is_cpu:
        known = SMALLEST_SQUARE * p.numel() <= spread <= LARGEST_SQUARE or spread == S2 == 0
        spread = spread if known else math.nan  # squares left the range of float32
        if not has_float64(p.device):
            slack = max(slack, m.eps * math.sqrt(p.numel()))  # lengths were summed up in float32
    if S2 and math.isfinite(g2) and not math.isclose(g1, kappa * S1, rel_tol=slack):
        raise VarregError(
            f"varreg: the gradient of '{names(optimizer)[p]}' was changed element by element (for "
            "example by clip_grad_value_), and with per='model' or per='tensor' only sums were "
            "measured. Clip by norm, or observe the model with varreg.observe(model)."
        )
    each = max(spread * m.count - S2, 0.0) / max(m.elements, 1)
    if not S2:
        SS, gS, gg = 0.0, 0.0, g2
    elif math.isclose(kappa, 1.0, rel_tol=SAME_LENGTH):
        SS = gS = gg = g2
        kappa = 1.0
    else:  # it was clipped, or unscaled
        SS, gS, gg = S2, kappa * S2, kappa * kappa * S2
    return _Found(kappa, each, (SS, gS, gg, (SS + each * m.elements) / m.count), not S2)
