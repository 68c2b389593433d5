"""Warnings of a step, each shown once: λ cannot be computed or stays large, or an option is not
known.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from varreg.engine import deferred
from varreg.optim.parameter_names import names
from varreg.shards import local
from varreg.thresholds import LAMBDA_EVERY, LAMBDA_LOOKS, LARGE_LAMBDA, SIMILAR

if TYPE_CHECKING:
    from varreg.optim.base import Regularized
    from varreg.optim.parameter_step import ParameterStep

_USER = 8
"""`stacklevel` of a user's call of step(), through two frames of torch.compile."""


class Notice(Enum):
    """A warning that an optimizer has shown, in its set `warned`."""

    MISSING = auto()  # with the id of the parameter
    SINGLE_SAMPLES = auto()
    OVERFLOW = auto()
    LONG_STEPS = auto()


def warn_missing(optimizer: Optimizer, parameters: list[Tensor], warned: set[Any]) -> None:
    """Warn once of all parameters that have a gradient but no variance. Leave out parameters that
    an earlier warning named, and parameters whose gradient is 0.
    """
    new = [
        p
        for p in parameters
        if (Notice.MISSING, id(p)) not in warned
        and p.grad is not None
        and (p.grad.is_sparse or p.grad.is_meta or bool(p.grad.any()))
    ]
    if not new:
        return
    warned.update((Notice.MISSING, id(p)) for p in new)
    name = names(optimizer)
    warnings.warn(
        f"varreg: {type(optimizer).__name__} takes the plain step (λ = 1) for parameters that have "
        "a gradient but no gradient variance. Call "
        "varreg.observe(model) before the forward pass, not with groups=1, and do not replace the "
        "gradient after backward(); or put these parameters into a param group with s=0. They are: "
        f"{', '.join(f'{name[p]} {tuple(p.shape)}' for p in new)}.",
        stacklevel=_USER,
    )


def warn_single_samples(optimizer: Optimizer, warned: set[Any]) -> None:
    """Warn that a batch of one sample has no variance. Do not warn if there is a history already:
    the last batch of an epoch often has one sample.
    """
    if Notice.SINGLE_SAMPLES not in warned and not any(
        "vr_history" in state for state in optimizer.state.values()
    ):
        warned.add(Notice.SINGLE_SAMPLES)
        warnings.warn(
            f"varreg: {type(optimizer).__name__} takes plain steps (λ = 1) as long as batches have "
            "one sample: one sample has no variance. "
            "Use larger batches, or accumulate several before step().",
            stacklevel=_USER,
        )


def warn_overflow(optimizer: Optimizer, p: Tensor, warned: set[Any], is_changed: bool) -> None:
    """Warn of squares that overflow. A GradScaler increases the loss scale until gradients
    overflow; their squares overflow long before. `is_changed` is True if the gradient differs from
    the measured one: a GradScaler has unscaled it, or it was clipped.
    """
    if Notice.OVERFLOW not in warned:
        warned.add(Notice.OVERFLOW)
        advice = (
            "The gradient was changed after backward(). If a GradScaler scales the loss, its scale "
            "has grown too far: bfloat16 needs none; or create the GradScaler with a "
            "growth_interval that is longer than the training. If no GradScaler scales it, "
            "training diverges"
            if is_changed
            else "Training diverges"
        )
        warnings.warn(
            f"varreg: {type(optimizer).__name__} takes the plain step (λ = 1) for "
            f"'{names(optimizer)[p]}', and perhaps for others: the squares of "
            "its gradients are too large for their precision, though the gradients are not. In one "
            f"process, varreg sums them up in float64 from the next step on. {advice}: use a "
            "smaller learning rate.",
            stacklevel=_USER,
        )


def watch_lambda(optimizer: Regularized, steps: list[ParameterStep]) -> None:
    """Warn once if the effective λ was above LARGE_LAMBDA at the last LAMBDA_LOOKS checks. A check
    does not wait for a device: its answer comes with the numbers of a later step.
    """
    warned, flags = optimizer._warned, optimizer._large_lambda_flags
    taken = [step for step in steps if step.parameter in optimizer._lambdas]
    if Notice.LONG_STEPS in warned or not taken:
        return
    device = local(taken[0].parameter).device
    sums = [_weighted(optimizer, step).to(device) for step in taken]
    numerator, weight = torch.stack(sums).sum(0).unbind()
    flags.append(numerator > LARGE_LAMBDA * weight)
    if len(flags) > LAMBDA_LOOKS:
        del flags[0]
    if len(flags) == LAMBDA_LOOKS:
        calibrates = all(step.group["calibrate"] for step in taken)
        is_long = torch.stack([flag.to(device) for flag in flags]).all()
        deferred.check(is_long, lambda: _warn_long_steps(optimizer, warned, calibrates))


def _weighted(optimizer: Regularized, step: ParameterStep) -> Tensor:
    """Return Σλg² and Σg² over the elements of a parameter that this rank holds."""
    lam, square = optimizer._lambdas[step.parameter], local(step.grad).detach().float().square()
    lam = lam if isinstance(lam, Tensor) else lam.tensor()
    return torch.stack([(lam.float() * square).sum(), square.sum()])


def _warn_long_steps(optimizer: Optimizer, warned: set[Any], calibrates: bool) -> None:
    if Notice.LONG_STEPS in warned:
        return
    warned.add(Notice.LONG_STEPS)
    advice = "" if calibrates else "calibrate=True, which keeps the mean of λ at 1, or "
    warnings.warn(
        f"varreg: λ makes the steps of {type(optimizer).__name__} more than {LARGE_LAMBDA:g} times "
        f"as long as those of its counterpart, and has for {LAMBDA_EVERY * LAMBDA_LOOKS} steps "
        "(print(optimizer.lambda_summary()) shows it). A learning rate that is right for the "
        f"counterpart is then too large: use {advice}a smaller learning rate.",
        stacklevel=_USER,
    )


def warn_typos(group: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Warn of a key that is nearly the name of an option: torch accepts any key in a group."""
    for key in group:
        if key not in known and key not in ("params", "param_names", "initial_lr", "initial_s"):
            for like in difflib.get_close_matches(key, known, 1, cutoff=SIMILAR):
                warnings.warn(
                    f"varreg: param group has a key {key!r}, which is not an option; did you mean "
                    f"{like!r}?",
                    stacklevel=4,
                )
