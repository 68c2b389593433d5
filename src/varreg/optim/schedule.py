"""Schedulers of the impact factor s, in the style of `torch.optim.lr_scheduler`. The paper suggests
them in its conclusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from varreg.errors import VarregError


class SScheduler:
    """A schedule of s: each param group's s is `initial_s`·factor(t), where t counts the calls of
    `step()`. Abstract: subclasses define `factor`.

    The paper expects that noise helps to leave local minima late in training, and suggests a
    smaller s then. Call `step()` as often as you count t: once an epoch, or once a batch.
    `initial_s` is kept in the param group, as lr schedulers keep `initial_lr`.
    """

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1):
        if not isinstance(optimizer, Optimizer):
            raise VarregError(
                f"varreg: {type(self).__name__} expects an optimizer, got "
                f"{type(optimizer).__name__}."
            )
        for i, group in enumerate(optimizer.param_groups):
            if "s" not in group:
                raise VarregError(
                    f"varreg: param group {i} of {type(optimizer).__name__} has no s; use one of "
                    "varreg's optimizers."
                )
            if last_epoch == -1:
                group.setdefault("initial_s", group["s"])
            elif "initial_s" not in group:
                raise KeyError(
                    f"param 'initial_s' is not specified in param_groups[{i}] when resuming an "
                    "optimizer"
                )
        self.optimizer = optimizer
        self.last_epoch = last_epoch
        self.step()

    def factor(self, t: int) -> float:
        raise NotImplementedError

    def step(self) -> None:
        """Advance to the next t, and set s of every param group."""
        self.last_epoch += 1
        factor = self.factor(self.last_epoch)
        if not (math.isfinite(factor) and factor >= 0):
            raise VarregError(
                f"varreg: {type(self).__name__} has factor {factor!r} at t = {self.last_epoch}; it "
                "must be finite, and 0 at least."
            )
        for group in self.optimizer.param_groups:
            group["s"] = group.setdefault("initial_s", group["s"]) * factor

    def get_last_s(self) -> list[float]:
        """Return s of every param group."""
        return [group["s"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without the optimizer and without functions."""
        return {k: v for k, v in self.__dict__.items() if k != "optimizer" and not callable(v)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`. As for learning-rate schedulers, load the optimizer's
        state, too: s itself is there.
        """
        self.__dict__.update(state_dict)


class InverseTimeS(SScheduler):
    """s_t = s₀/(1 + t/half): half of s₀ after `half` steps.

    Args:
        optimizer: One of varreg's optimizers.
        half: The number of steps after which s is half of s₀.
        last_epoch: t of a run that goes on; −1: a new one.

    >>> import torch, varreg
    >>> optimizer = varreg.VRSGD([torch.zeros(1, requires_grad=True)], lr=0.1, s=2.0)
    >>> schedule = varreg.InverseTimeS(optimizer, half=10)
    >>> for _ in range(10):
    ...     schedule.step()
    >>> schedule.get_last_s()
    [1.0]

    """

    def __init__(self, optimizer: Optimizer, half: float, last_epoch: int = -1):
        if not half > 0:
            raise VarregError(f"varreg: half must be positive, got {half!r}.")
        self.half = half
        super().__init__(optimizer, last_epoch)

    def factor(self, t: int) -> float:
        return 1 / (1 + t / self.half)


class CosineS(SScheduler):
    """s_t falls from s₀ to 0 in `total` steps along half a cosine. With s = 0, the step is the
    base's.

    Args:
        optimizer: One of varreg's optimizers.
        total: The number of steps after which s is 0.
        last_epoch: t of a run that goes on; −1: a new one.

    """

    def __init__(self, optimizer: Optimizer, total: int, last_epoch: int = -1):
        if not total > 0:
            raise VarregError(f"varreg: total must be positive, got {total!r}.")
        self.total = total
        super().__init__(optimizer, last_epoch)

    def factor(self, t: int) -> float:
        return (1 + math.cos(math.pi * min(t, self.total) / self.total)) / 2


class LambdaS(SScheduler):
    """s_t = s₀·function(t), as `LambdaLR` does for the learning rate.

    Args:
        optimizer: One of varreg's optimizers.
        function: Of t. It is not part of the state.
        last_epoch: t of a run that goes on; −1: a new one.

    """

    def __init__(
        self, optimizer: Optimizer, function: Callable[[int], float], last_epoch: int = -1
    ):
        if not callable(function):
            raise VarregError(f"varreg: function must be callable, got {type(function).__name__}.")
        self.function = function
        super().__init__(optimizer, last_epoch)

    def factor(self, t: int) -> float:
        return self.function(t)
