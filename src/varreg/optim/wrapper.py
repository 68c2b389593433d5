"""Wrap any other first-order optimizer of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from varreg.errors import VarregError
from varreg.optim.base import Regularized
from varreg.optim.group_options import check_group
from varreg.optim.increments import Increment
from varreg.optim.parameter_step import ParameterStep
from varreg.optim.step_warnings import warn_typos
from varreg.options import DEFAULTS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from varreg.options import Options


def _gradient(step: ParameterStep) -> tuple[Tensor, Tensor]:
    """Return the gradient itself, and its variance."""
    return step.grad, step.s2


GRADIENT = Increment(_gradient, is_linear=True)


class VarianceRegularized(Regularized):
    """Wraps a torch optimizer, and scales the change that it makes to each parameter by λ. λ
    follows from ρ = v²/ḡ² of the gradient itself.

    Use it for an optimizer without a regularized version of its own (`VRSGD`, `VRAdam`, …). The
    whole change is scaled, including decoupled weight decay. Averages that the base keeps of its
    own steps, such as ASGD's, are those of its unscaled steps.

    It shares param groups and state with the base: schedulers accept either of the two, and its
    `state_dict()` is complete. Attributes that it does not have are looked up in the base
    (`VarianceRegularized(schedule_free).eval()`).

    >>> import torch, varreg
    >>> model = torch.nn.Linear(2, 1)
    >>> observer = varreg.observe(model)
    >>> optimizer = varreg.VarianceRegularized(torch.optim.RAdam(model.parameters(), lr=0.1), s=2.0)
    >>> model(torch.randn(8, 2)).square().mean().backward()
    >>> optimizer.step()
    >>> optimizer.lambda_of(model.bias).tolist()  # the first step has no history but itself
    [1.0]
    """

    _scales_decay = True

    def __init__(self, base: Optimizer, **regularizer: Unpack[Options]):
        if not isinstance(base, Optimizer):
            raise VarregError(
                "varreg: VarianceRegularized expects a torch.optim.Optimizer, got "
                f"{type(base).__name__}."
            )
        if isinstance(base, Regularized):
            raise VarregError(
                f"varreg: {type(base).__name__} is regularized already; give its options to it."
            )
        if isinstance(base, torch.optim.LBFGS):
            raise VarregError(
                "varreg: LBFGS is not a first-order method: its step evaluates the model many "
                "times. Wrap another one."
            )
        if "s" in base.defaults:
            raise VarregError(
                f"varreg: this {type(base).__name__} is wrapped already; use that wrapper, or a "
                "new base."
            )
        for name in regularizer:
            if name not in DEFAULTS:
                raise TypeError(
                    f"{type(self).__name__}.__init__() got an unexpected keyword argument '{name}'"
                )
        self._set_options(regularizer)
        groups = [{**self._options, **group} for group in base.param_groups]
        for group in groups:
            check_group(type(self), group)
        for group, complete in zip(base.param_groups, groups, strict=True):
            group.update(complete)
        base.defaults.update({**self._options, **base.defaults})
        self.__setstate__(
            {
                "base": base,
                "defaults": base.defaults,
                "state": base.state,
                "param_groups": base.param_groups,
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            "defaults": self.defaults,
            "state": self.state,
            "param_groups": self.param_groups,
            "base": self.base,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        base: Optimizer = state.get("base") or self.base
        self.__dict__["base"] = base
        base.__setstate__(
            {k: state[k] for k in ("defaults", "state", "param_groups") if k in state}
        )
        super().__setstate__({})

    # State and groups are those of the base, so that both agree after either loads a checkpoint.
    base: Optimizer
    defaults = property(lambda self: self.base.defaults)
    state = property(lambda self: self.base.state)
    param_groups = property(lambda self: self.base.param_groups)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "base" not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.base, name)

    def __repr__(self) -> str:
        return f"VarianceRegularized {self.base!r}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            check_group(type(self), {**self._options, **param_group})
            warn_typos(param_group, self.defaults)
        self.base.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def _base_step(self) -> None:
        self.base.step()

    def _increment(self, group: dict[str, Any]) -> Increment:
        return GRADIENT
