"""Scopes of λ: one λ for each element, each tensor, or the whole model (option `per`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.errors import VarregError
from varreg.few_launches import by_type
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
        alike: dict[tuple[Any, ...], list[tuple[ParameterStep, Tensor]]] = {}
        for step, sums in zip(steps, _spreads(steps), strict=True):
            types = sums.dtype, step["vr_history"].dtype, sums.device
            key = id(step.group), step.measured.count, *types
            alike.setdefault(key, []).append((step, sums))
        for pairs in alike.values():
            self._set_lambdas(*zip(*pairs, strict=True))

    def _set_lambdas(self, steps: Sequence[ParameterStep], sums: Sequence[Tensor]) -> None:
        """Set λ of steps with the same options, in one go."""
        kept = [[step[name] for step in steps] for name in HISTORY]
        history, count = map(torch.stack, kept)
        delta, variance = torch.stack(list(sums), 1).unbind()
        m, group = steps[0].measured.count, steps[0].group
        lams = lambdas(variance, delta.sqrt(), history, count, m, group)
        _torch.foreach_copy([*kept[0], *kept[1]], [*history.unbind(), *count.unbind()])
        for step, lam in zip(steps, lams.unbind(), strict=True):
            step.lam = lam

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
        every = _spreads(steps)
        wide = any(sums.dtype == torch.float64 for sums in every)
        dtype = torch.float64 if wide else every[0].dtype
        delta, variance = torch.stack([sums.to(every[0].device, dtype) for sums in every]).sum(0)
        history, count = lead["vr_history"], lead["vr_count"]
        both = ratio(variance, delta.sqrt(), history, count, lead.measured.count, lead.group)
        states = _states(optimizer)
        for key in HISTORY:
            copies = [state[key] for state in states if key in state]
            for same in by_type(copies):
                _torch.foreach_copy(same, [lead.state[key]] * len(same))
        by_group: dict[tuple[Any, ...], list[ParameterStep]] = {}
        for step in steps:
            there = step.state["vr_history"]
            by_group.setdefault((id(step.group), there.dtype, there.device), []).append(step)
        for alike in by_group.values():
            lam: Tensor = regularizer(*both, alike[0].group).to(alike[0].state["vr_history"])
            # each step has a λ of its own: calibration writes to it
            for step, own in zip(alike, list(lam.repeat(len(alike))), strict=True):
                step.lam = own


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


def _spreads(steps: list[ParameterStep]) -> list[Tensor]:
    """Return Σδ̄² and Σσ² of each step, over all elements with a known variance: `[2]`. Sums over
    shards take one reduction for all steps.
    """
    joined = [step for step in steps if not step.p.is_cpu and step.p.numel()]
    found = dict(zip(map(id, joined), parts.sums(joined, _squares), strict=True))
    sums = [found[id(step)] if id(step) in found else _spread(step) for step in steps]
    sharded = [i for i, step in enumerate(steps) if is_sharded(step.parameter)]
    if sharded:
        stacked = torch.stack([sums[i].double() for i in sharded])
        for i, row in zip(sharded, total(stacked, steps[sharded[0]].parameter), strict=True):
            sums[i] = row.to(sums[i].dtype)
    return sums


def _spread(step: ParameterStep) -> Tensor:
    """Return Σδ̄² and Σσ² over the elements of a parameter that this process holds."""
    sums = step.measured.total.new_zeros(2)
    for part in parts.slices(step) if step.p.numel() else ():
        sums += torch.stack([t.sum() for t in _squares(part)])
    return sums


def _squares(part: ParameterStep) -> tuple[Tensor, Tensor]:
    """Return δ̄² and σ² of each element; 0 where the variance is not known."""
    delta, variance = part.increment_and_variance()
    known = variance * one_or_nan(part.measured.square)
    both = delta.square() + 0 * known, known
    return both[0].nan_to_num_(0.0, math.inf), both[1].nan_to_num_(0.0, math.inf)
