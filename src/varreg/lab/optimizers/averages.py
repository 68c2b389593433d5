"""Variants of SGD that are evaluated at an average of their iterates, and so need no schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from varreg.errors import VarregError

DECAY = 8
"""γ of an average that forgets early iterates: x̄ ← (1 − w)·x̄ + w·x with w = (1 + γ)/(t + γ)
(Shamir and Zhang 2013). The value is that of Ivgi, Hinder and Carmon (2023).
"""


@torch.no_grad()
def swap_averages(optimizer: Optimizer) -> None:
    """Swap the parameters and their averages; a second call swaps them back."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if "average" in optimizer.state[p]:
                x = p.detach().clone()
                p.copy_(optimizer.state[p]["average"])
                optimizer.state[p]["average"].copy_(x)


class AveragedSGD(SGD):
    """torch's SGD, evaluated at an average of its iterates that forgets early ones: the weight of
    step t is 9/(t + 8).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                average = state.setdefault("average", torch.zeros_like(p))
                average.lerp_(p.detach(), (1 + DECAY) / (state["steps"] + DECAY))
        return loss

    def swap_average(self) -> None:
        """Swap the parameters and their average; a second call swaps them back."""
        swap_averages(self)


class ScheduleFreeSGD(Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): gradients are taken between z, which SGD moves, and
    its average x, which is evaluated.

        y = (1 − β)·z + β·x,   z ← z − α·∇f(y),   x ← (1 − 1/t)·x + z/t

    The parameters are y; β is `beta`.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, beta: float = 0.9):
        if not lr >= 0 or not 0 <= beta < 1:
            raise VarregError(
                f"varreg: lr must be at least 0 and beta in [0, 1); got {lr}, {beta}."
            )
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(steps=0, z=p.detach().clone(), average=p.detach().clone())
                state["steps"] += 1
                state["z"].sub_(p.grad, alpha=group["lr"])
                state["average"].lerp_(state["z"], 1 / state["steps"])
                p.copy_(state["z"].lerp(state["average"], group["beta"]))
        return loss

    def swap_average(self) -> None:
        """Swap the parameters y and the average x; a second call swaps them back."""
        swap_averages(self)
