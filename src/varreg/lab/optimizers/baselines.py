"""Related methods for comparisons, each by the formula of its own paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from varreg.errors import VarregError
from varreg.lab.optimizers.averages import DECAY, swap_averages
from varreg.thresholds import TINY_DIVISOR


def _check(lr: float) -> None:
    """Raise unless the learning rate is a number from 0 up."""
    if not lr >= 0:
        raise VarregError(f"varreg: lr must be at least 0; got {lr}.")


def _loss(closure: Callable[[], Any] | None) -> Any:
    """Call a closure, if there is one, with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class SVRG(Optimizer):
    """Stochastic variance-reduced gradient (Johnson and Zhang 2013): x ← x − α·(g(x) − g(x̃) + μ).

    g is the gradient of the present batch, x̃ a snapshot of the parameters, and μ the gradient of
    all samples at x̃. `snapshot(closure)` takes a snapshot; its closure must leave μ in the
    gradients. The paper does so once an epoch, or once in a few epochs. A step needs a closure, and
    calls it twice. So a step costs two gradients, and a snapshot costs a pass over the data.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3):
        _check(lr)
        super().__init__(params, {"lr": lr})

    def _gradients(self) -> list[Tensor | None]:
        """Return copies of all gradients."""
        return [
            None if p.grad is None else p.grad.clone()
            for group in self.param_groups
            for p in group["params"]
        ]

    @torch.no_grad()
    def snapshot(self, closure: Callable[[], Any]) -> None:
        """Set x̃ to the parameters, and μ to the gradients that the closure leaves."""
        _loss(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["snapshot"] = p.detach().clone()
                self.state[p]["mu"] = torch.zeros_like(p) if p.grad is None else p.grad.clone()

    def _swap(self) -> None:
        """Swap parameters and snapshots."""
        for group in self.param_groups:
            for p in group["params"]:
                x = p.detach().clone()
                p.copy_(self.state[p]["snapshot"])
                self.state[p]["snapshot"].copy_(x)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            raise VarregError(
                "varreg: SVRG.step() needs a closure that computes the loss and its gradients."
            )
        if any("mu" not in self.state[p] for group in self.param_groups for p in group["params"]):
            raise VarregError("varreg: SVRG needs a snapshot(closure) before its first step.")
        random = torch.get_rng_state()
        loss = _loss(closure)
        here = self._gradients()
        self._swap()
        torch.set_rng_state(random)  # both gradients must have the same dropout
        _loss(closure)
        there = self._gradients()
        self._swap()
        at = 0
        for group in self.param_groups:
            for p in group["params"]:
                g, g_snapshot = here[at], there[at]
                at += 1
                if g is not None and g_snapshot is not None:
                    p.sub_(g - g_snapshot + self.state[p]["mu"], alpha=group["lr"])
        return loss


class MSVAG(Optimizer):
    """Momentum stochastic variance-adapted gradient (Balles and Hennig 2018): the step of momentum,
    damped where it is noisy.

    With m and v the bias-corrected averages of g and g², ρ = (1−β)(1+β^t)/((1+β)(1−β^t)) and s = (v
    − m²)/(1 − ρ) the variance of g estimated over time, x ← x − α·γ·m with γ = m²/(m² + ρ·s). At
    the first step, where no variance is known, γ = 1.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, beta: float = 0.9):
        _check(lr)
        if not 0 <= beta < 1:
            raise VarregError(f"varreg: beta must be in [0, 1); got {beta}.")
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _loss(closure)
        for group in self.param_groups:
            beta = group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                t = state["step"]
                state["m"].lerp_(p.grad, 1 - beta)
                state["v"].lerp_(p.grad.square(), 1 - beta)
                m, v = state["m"] / (1 - beta**t), state["v"] / (1 - beta**t)
                rho = (1 - beta) * (1 + beta**t) / ((1 + beta) * (1 - beta**t))
                noise = (
                    rho * (v - m.square()).clamp(min=0) / (1 - rho)
                    if t > 1 and rho < 1
                    else torch.zeros_like(m)
                )
                gamma = torch.nan_to_num(m.square() / (m.square() + noise), nan=1.0)
                p.sub_(gamma * m, alpha=group["lr"])
        return loss


class DoG(Optimizer):
    """Distance over gradients (Ivgi, Hinder and Carmon 2023): x ← x − η·g with η = max(r_ε, max |xᵢ
    − x₀|) / √(Σ|gᵢ|² + ε).

    There is no learning rate to tune: `lr` multiplies η, and is 1. r_ε = `reps_rel`·(1 + |x₀|). The
    norms are those of all parameters together; with `per="layer"` (L-DoG), each parameter has its
    own. As in section 4 of the paper, evaluate the model at an average of the iterates that forgets
    early ones: x̄ ← (1 − w)·x̄ + w·x with w = 9/(t + 8). `swap_average()` swaps it with the
    parameters, and back.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        reps_rel: float = 1e-6,
        eps: float = 1e-8,
        per: str = "model",
    ):
        _check(lr)
        if not reps_rel > 0:
            raise VarregError(f"varreg: reps_rel must be positive; got {reps_rel}.")
        if per not in ("model", "layer"):
            raise VarregError(f"varreg: per must be 'model' or 'layer'; got {per!r}.")
        super().__init__(params, {"lr": lr, "reps_rel": reps_rel, "eps": eps})
        self.per = per

    def _norm(self, tensors: list[Tensor]) -> float:
        """Return the norm of all tensors together."""
        return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _loss(closure)
        every = [
            (p, group) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        for together in [every] if self.per == "model" else [[one] for one in every]:
            self._update([p for p, _ in together], [group for _, group in together])
        return loss

    def _update(self, params: list[Tensor], groups: list[dict[str, Any]]) -> None:
        """Update parameters that share one η. Each state has a copy of the two sums, since a state
        dict has entries of parameters only.
        """
        for p, group in zip(params, groups, strict=True):
            if "x0" not in self.state[p]:
                reach = group["reps_rel"] * (1 + self._norm([q.detach() for q in params]))
                self.state[p].update(
                    x0=p.detach().clone(),
                    average=p.detach().clone(),
                    reach=reach,
                    squares=0.0,
                    steps=0,
                )
        reach = max(
            self._norm([p - self.state[p]["x0"] for p in params]),
            *(self.state[p]["reach"] for p in params),
        )
        squares = (
            max(self.state[p]["squares"] for p in params)
            + self._norm([p.grad for p in params if p.grad is not None]) ** 2
        )
        for p, group in zip(params, groups, strict=True):
            self.state[p].update(reach=reach, squares=squares)
            if p.grad is not None:
                p.sub_(p.grad, alpha=group["lr"] * reach / math.sqrt(squares + group["eps"]))
            state = self.state[p]
            state["steps"] += 1
            state["average"].lerp_(p.detach(), (1 + DECAY) / (state["steps"] + DECAY))

    def swap_average(self) -> None:
        """Swap the parameters and their average; a second call swaps them back."""
        swap_averages(self)


class LDoG(DoG):
    """`DoG` with `per="layer"`."""

    def __init__(self, params: ParamsT, lr: float = 1.0, reps_rel: float = 1e-6, eps: float = 1e-8):
        super().__init__(params, lr, reps_rel, eps, per="layer")


class LossSGD(Optimizer):
    """SGD with a shorter step if the loss of the batch is larger: λ of the regularizer, from the
    loss ℓ in place of a variance.

        λ = (1+s)/(1 + s·ℓᵖ/ρ̄)        ρ̄: the harmonic mean of ℓᵖ over all steps so far
        x ← x − α·λ·ḡ

    It needs no variance. So if λ from the variance helps, it must help more than this. p is
    `power`. A step needs a closure that returns the loss, which must not be negative.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, s: float = 2.0, power: float = 1.0):
        _check(lr)
        if not s >= 0 or not power > 0:
            raise VarregError(f"varreg: s must be at least 0 and power above 0; got {s}, {power}.")
        super().__init__(params, {"lr": lr, "s": s, "power": power})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            raise VarregError(
                "varreg: LossSGD.step() needs a closure that computes the loss and its gradients."
            )
        loss = _loss(closure)
        for group in self.param_groups:
            rho = torch.as_tensor(loss).item() ** group["power"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["inverse"] = state.get("inverse", 0.0) + 1 / max(rho, TINY_DIVISOR)
                state["step"] = state.get("step", 0) + 1
                s, relative = group["s"], rho * state["inverse"] / state["step"]
                p.sub_(p.grad, alpha=group["lr"] * (1 + s) / (1 + s * relative))
        return loss
