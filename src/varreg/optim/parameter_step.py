"""`ParameterStep`: all that is known about the step of one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from varreg.engine import Moments
from varreg.engine.ledger import Ledger
from varreg.memory import scratch
from varreg.optim.increments import Increment, coupled_decay
from varreg.shards import local


@dataclass(slots=True)
class ParameterStep:
    """The step of one parameter that has a gradient and is in a group with s > 0. In parts.py it
    may also be the step of some elements of a parameter, or of several small parameters.
    """

    parameter: Tensor
    """The parameter in the optimizer's param group."""
    group: dict[str, Any]
    increment: Increment
    ledger: Ledger | None
    moments: Moments | None
    """The measured moments; None if nothing was measured."""
    state: dict[str, Any]
    grad: Tensor
    """The gradient as the base sees it; a copy if the base may change the gradient."""
    native: bool = False
    """Whether native code scales the base's step by λ."""
    with_base_step: bool = False
    """Whether native code takes the base's step, too: true for all steps, or for none."""
    products: Sequence[float] | None = None
    """S·S, g·S, g·g and ΣW, summed over all shards; None if they are not known."""
    base_steps: float | None = None
    """The base's number of steps, including this one, if the base counts them on a device."""
    regularized: bool = False
    """Whether λ scales this step. If not, the base's own step stays as it is."""
    kappa2: Tensor | float = 1.0
    """κ²: the variance of the gradient that the base sees is κ²v²."""
    p: Tensor = None  # type: ignore[assignment]
    """The elements of the parameter that this process holds: all of them, or a shard."""
    x: Tensor = None  # type: ignore[assignment]
    """A copy of `p` from before the step. Native code does not need it."""
    first: bool = True
    """Whether the sums for the increment's variance are new, and therefore 0."""
    g: Tensor = None  # type: ignore[assignment]
    """The gradient as the base uses it, with its sign and coupled weight decay."""
    s2: Tensor = None  # type: ignore[assignment]
    """σ², the variance of `g`."""
    lam: Tensor = None  # type: ignore[assignment]
    """λ, as soon as it is computed."""
    absent: Tensor | None = None
    """A bit for each element, if native code does not keep λ: 1 if it has no gradient."""

    def __getitem__(self, name: str) -> Tensor:
        """Return the state's entry of that name; for a sharded parameter, this process's shard."""
        return local(self.state[name])

    @property
    def t(self) -> float:
        """Return the base's number of steps, including this one."""
        return float(self.state["step"]) if self.base_steps is None else self.base_steps

    @property
    def measured(self) -> Moments:
        """Return the moments of a step that is regularized."""
        assert self.moments is not None
        return self.moments

    @property
    def in_any_unit(self) -> bool:
        """Return whether δ̄ and its variance may have any unit, another one for each element: only
        their ratio ρ = σ²/δ̄² is used.
        """
        return self.group["per"] == "element" and bool(self.group["scale_free"])

    def increment_and_variance(self) -> tuple[Tensor, Tensor]:
        """Return δ̄ and its variance, and update the sums that the variance needs."""
        m, group = self.measured, self.group
        # without the loss's reduction: the increment needs the variance of the gradient S itself
        m = Moments(m.count, m.groups, m.total, m.square)
        self.s2 = m.variance_into(scratch("variance", m.total.shape, m.total))
        if isinstance(self.kappa2, Tensor) or self.kappa2 != 1:
            self.s2.mul_(self.kappa2)
        self.g = -self.grad if group.get("maximize") else self.grad
        if decay := coupled_decay(group):
            self.g = self.g.add(self.x, alpha=decay)
        return self.increment.variance(self)
