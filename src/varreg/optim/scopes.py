"""Scopes of λ: one λ for each element, each tensor, or the whole model (option `per`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.errors import VarregError
from varreg.histories import one_or_nan
from varreg.memory import scratch
from varreg.optim import parts
from varreg.optim.state import HISTORY
from varreg.regularizer import lambdas, ratio, regularizer
from varreg.shards import is_sharded, total

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from varreg.optim.parameter_step import ParameterStep

_OF_A_MODEL = ("history", "history_beta", "scale_free", "cap")


class Element:
    """One λ for each element."""

    has_kernel = True
    """Whether native code knows this scope."""
    needs_elements = True
    """Whether the variance of each element is needed, so that sums over elements do not do."""

    def history_shape(self, p: Tensor) -> torch.Size:
        """Return the shape of the history of a parameter."""
        return p.shape

    def begin_history(
        self, optimizer: Optimizer, key: str, p: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return the initial value of one of the two sums of a parameter's history."""
        return torch.zeros_like(p, dtype=dtype)

    def regularize(self, optimizer: Optimizer, steps: list[ParameterStep]) -> None:
        """Set λ of each step."""
        full = []
        for step in steps:
            if step.p.numel():
                full.append(step)
            else:  # an empty shard
                step.lam = torch.empty_like(step.measured.square)
        parts.set_lambdas(full, self._lambda)

    def known(self, steps: list[ParameterStep]) -> list[Tensor]:
        """Return 1 for each element of λ that has a gradient in this step, and 0 for the others."""
        squares = [step.measured.square for step in steps]
        known = list(_torch.foreach_sub(squares, torch.finfo(squares[0].dtype).tiny))
        _torch.foreach_clamp_min_into(known, 0.0)
        _torch.foreach_sign_into(known)
        return known

    def sums(self, tensors: list[Tensor], steps: list[ParameterStep]) -> Tensor:
        """Return the sum of each tensor over all shards. The tensors have the shapes of λ of the
        steps, and no negative elements.
        """
        sums = torch.stack(list(_torch.foreach_norm(tensors, 1)))
        sharded = [i for i, step in enumerate(steps) if is_sharded(step.parameter)]
        if sharded:
            sums[sharded] = total(sums[sharded].double(), steps[sharded[0]].parameter).to(sums)
        return sums

    def _lambda(self, part: ParameterStep) -> Tensor:
        delta, variance = part.increment_and_variance()
        m, history, count = part.measured, part["vr_history"], part["vr_count"]
        return lambdas(variance, delta, history, count, m.count, part.group, m.square, scratch)


class PerTensor(Element):
    """One λ for each parameter, from ρ = Σσ²/Σδ̄² over its elements."""

    has_kernel = False
    needs_elements = False

    def history_shape(self, p: Tensor) -> torch.Size:
        return torch.Size()

    def begin_history(
        self, optimizer: Optimizer, key: str, p: Tensor, dtype: torch.dtype
    ) -> Tensor:
        return torch.zeros((), dtype=dtype, device=p.device)

    def regularize(self, optimizer: Optimizer, steps: list[ParameterStep]) -> None:
        for step, (delta, variance) in zip(steps, _spreads(steps), strict=True):
            history, count = step["vr_history"], step["vr_count"]
            step.lam = lambdas(variance, delta, history, count, step.measured.count, step.group)

    def known(self, steps: list[ParameterStep]) -> list[Tensor]:
        return [torch.ones_like(step.lam) for step in steps]

    def sums(self, tensors: list[Tensor], steps: list[ParameterStep]) -> Tensor:
        return torch.stack(tensors)  # scalars, the same on all shards


class PerModel(PerTensor):
    """One λ for all parameters, from one ρ and one history.

    The state of each parameter has a copy of the history, since a state dict can only store entries
    of parameters.
    """

    def begin_history(
        self, optimizer: Optimizer, key: str, p: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return a copy of the other parameters' history, for a parameter that is added during
        training.
        """
        history = super().begin_history(optimizer, key, p, dtype)
        others = (state[key] for state in _states(optimizer) if key in state)
        return next((history.copy_(other) for other in others), history)

    def regularize(self, optimizer: Optimizer, steps: list[ParameterStep]) -> None:
        lead = steps[0]
        deltas, variances = zip(*_spreads(steps), strict=True)
        wide = any(v.dtype == torch.float64 for v in variances)
        dtype = torch.float64 if wide else variances[0].dtype
        delta = torch.stack([d.to(deltas[0].device, dtype).square() for d in deltas]).sum().sqrt()
        variance = torch.stack([v.to(variances[0].device, dtype) for v in variances]).sum()
        history, count = lead["vr_history"], lead["vr_count"]
        rho, rho_bar = ratio(variance, delta, history, count, lead.measured.count, lead.group)
        for state in _states(optimizer):
            for key in HISTORY:
                if key in state:
                    state[key].copy_(lead.state[key])
        for step in steps:
            step.lam = regularizer(rho, rho_bar, step.group).to(step.state["vr_history"])


SCOPES: dict[str, Element] = {"element": Element(), "tensor": PerTensor(), "model": PerModel()}


def check_model_groups(groups: list[dict[str, Any]]) -> None:
    """Raise a VarregError if param groups that share a history have different options of the
    history.
    """
    shared = [
        {name: group[name] for name in _OF_A_MODEL}
        for group in groups
        if group["per"] == "model" and group["s"]
    ]
    if any(group != shared[0] for group in shared):
        raise VarregError(
            "varreg: param groups with per='model' share one history, and must have the same "
            f"{', '.join(_OF_A_MODEL)}; got {shared}."
        )


def _states(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the states of all parameters in groups with per='model'."""
    groups = (group for group in optimizer.param_groups if group["per"] == "model")
    return [optimizer.state[p] for group in groups for p in group["params"] if p in optimizer.state]


def _spreads(steps: list[ParameterStep]) -> list[tuple[Tensor, Tensor]]:
    """Return √Σδ̄² and Σσ² of each step, over all elements with a known variance. Sums over shards
    take one reduction for all steps.
    """
    sums = [_spread(step) for step in steps]
    sharded = [i for i, step in enumerate(steps) if is_sharded(step.parameter)]
    if sharded:
        stacked = torch.stack([sums[i].double() for i in sharded])
        for i, row in zip(sharded, total(stacked, steps[sharded[0]].parameter), strict=True):
            sums[i] = row.to(sums[i].dtype)
    return [(s[0].sqrt(), s[1]) for s in sums]


def _spread(step: ParameterStep) -> Tensor:
    """Return Σδ̄² and Σσ² over the elements of a parameter that this process holds."""
    sums = step.measured.total.new_zeros(2)
    for part in parts.slices(step) if step.p.numel() else ():
        delta, variance = part.increment_and_variance()
        known = variance * one_or_nan(part.measured.square)
        sums += torch.stack([(delta.square() + 0 * known).nansum(), known.nansum()])
    return sums
