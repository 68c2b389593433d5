"""Check that an optimizer's step is proportional to its learning rate: AdaScale needs that."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from varreg.errors import VarregError

_POWERS: dict[type[Optimizer], float] = {
    torch.optim.SGD: 1.0,
    torch.optim.ASGD: 1.0,
    torch.optim.Adam: 0.5,
    torch.optim.NAdam: 0.5,
    torch.optim.RAdam: 0.5,
    torch.optim.Adamax: 0.5,
    torch.optim.RMSprop: 0.5,
    torch.optim.Adagrad: 0.5,
}
"""The power of the gain by which AdaScale multiplies the learning rate, by torch optimizer. AdamW
is a subclass of Adam.
"""

_OWN_SCALE: dict[str, str] = {
    "relative_step": "it sets its own step size (relative_step)",
    "weight_sum": "it is schedule-free: its learning rate is a weight in an average, too",
    "d0": "it estimates its own step size (D-adaptation)",
    "reps_rel": "it estimates its own step size (distance over gradients)",
}
"""Keys of param groups that only an optimizer with its own step size has, with the reason why
AdaScale cannot scale it.
"""


def check(optimizer: Any, base_batch: Any, power: Any, smoothing: Any) -> None:
    """Raise a VarregError for arguments that AdaScale cannot work with."""
    if not isinstance(optimizer, Optimizer):
        raise VarregError(
            f"varreg: AdaScale expects a torch.optim.Optimizer, got {type(optimizer).__name__}."
        )
    if isinstance(base_batch, bool) or not isinstance(base_batch, int) or base_batch < 1:
        raise VarregError(
            "varreg: base_batch must be a positive whole number, the batch at which the learning "
            f"rate was tuned; got {base_batch!r}."
        )
    if power is not None and not (isinstance(power, (int, float)) and 0 <= power <= 1):
        raise VarregError(f"varreg: power must be between 0 and 1; got {power!r}.")
    if not (isinstance(smoothing, (int, float)) and 0 <= smoothing < 1):
        raise VarregError(f"varreg: smoothing must be at least 0 and below 1; got {smoothing!r}.")
    if reason := _own_scale(getattr(optimizer, "base", optimizer)):
        raise VarregError(
            f"varreg: AdaScale cannot be used around {type(optimizer).__name__}: {reason}. Use one "
            "whose step is its learning rate times a direction, as torch.optim.SGD."
        )


def _own_scale(optimizer: Optimizer) -> str:
    """Return why a step is not proportional to the learning rate; an empty text if it is."""
    own = {
        torch.optim.LBFGS: "its step evaluates the model many times",
        torch.optim.Rprop: "it sets its own step sizes",
        torch.optim.Adafactor: "it sets its own step size",
    }
    for cls, reason in own.items():
        if isinstance(optimizer, cls):
            return reason
    for group in optimizer.param_groups:
        if "lr" not in group or group["lr"] is None:
            return "it has no learning rate"
        for key, reason in _OWN_SCALE.items():
            if group.get(key, False) is not False:
                return reason
    return ""


def power_of(optimizer: Optimizer) -> float:
    """Return the power for a class of torch or a subclass; raise a VarregError for others."""
    base = getattr(optimizer, "base", optimizer)
    for cls, power in _POWERS.items():
        if isinstance(base, cls):
            return power
    raise VarregError(
        f"varreg: AdaScale does not know how the learning rate of {type(base).__name__} follows "
        "the batch. Set power=1 if its step is proportional to the gradient, as in SGD, or "
        "power=0.5 if it divides by the gradient's size, as in Adam."
    )
