"""Messages for users: why numbers differ, and what to do."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from varreg.thresholds import SAME_FACTOR
from varreg.verification.parting import Parting
from varreg.verification.result import Row

_SHARES = (
    "varreg then measures each sample's share of the gradient: the part that flows back through "
    "its own outputs (times the number of samples, if the loss is a mean)."
)


class Reason(NamedTuple):
    """Why numbers differ, and what a user can do about it."""

    reason: str
    advice: str


def model_mixes(parting: Parting | None) -> Reason:
    """Return the reason for a model that mixes samples."""
    at = "at an operation that is not a torch function" if parting is None else f"at {parting}"
    return Reason(
        "Samples meet in the model: a sample's output depends on the others of its batch. "
        f"Whole batch and single samples part {at}.",
        "A sample has no gradient of its own there. Let each sample be treated by itself "
        "(GroupNorm or LayerNorm in place of statistics of the batch; BatchNorm in eval mode), or "
        "measure shares, with observe(..., batch_norm='contribution').",
    )


def loss_mixes(reduction: str) -> Reason:
    """Return the reason for a loss that mixes samples."""
    return Reason(
        "The loss mixes samples or weighs them (or a hook or a backward function does): outputs of "
        "the whole batch are those of single samples, but the gradient of its loss is not the "
        f"{reduction} of theirs.",
        f"If that is intended, nothing needs to change: {_SHARES} Otherwise write the loss as a "
        "mean of terms that depend on one sample each.",
    )


def loss_has_factor(factor: float, n: int, reduction: str) -> Reason:
    """Return the reason for a loss that differs from the declared reduction by a factor."""
    other = "sum" if reduction == "mean" else "mean"
    if math.isclose(factor, n if reduction == "mean" else 1 / n, rel_tol=SAME_FACTOR):
        return Reason(
            f"The loss is a {other} over samples, and reduction={reduction!r} says that it is a "
            f"{reduction}.",
            f"Pass reduction={other!r}, to verify and to observe.",
        )
    return Reason(
        f"The loss of a batch is {factor:.4g} times the {reduction} of the losses of its samples.",
        "Its ρ is right; mean and variance have that factor in them. Let the loss be a mean over "
        "samples (reduction='mean') or a sum (reduction='sum').",
    )


def loss_weighs(weights: Tensor, are_shares: bool) -> Reason:
    """Return the reason for a loss that gives samples different weights."""
    shares = _SHARES + (" That is exact here." if are_shares else "")
    return Reason(
        "The loss weighs samples by something that differs from sample to sample (the "
        "number of tokens that are not ignored, class weights): in a batch, a sample counts "
        f"{float(weights.min()):.3g} to {float(weights.max()):.3g} times as much as by itself.",
        "If a sample should count as much as by itself, divide by something that does not "
        "depend on the batch: reduction='sum' over a constant, or each sample by its own count, "
        f"then the mean. If the weights are intended, nothing needs to change: {shares}",
    )


def varreg_errs(row: Row, mechanism: str, rtol: float) -> Reason:
    """Return the reason for an error of varreg: model and loss treat each sample by itself."""
    if row.grad > rtol:
        error = f"p.grad of '{row.parameter}' with varreg differs from p.grad without it"
    elif math.isinf(row.mean):
        error = f"varreg has no moments for '{row.parameter}', or of another number of samples"
    else:
        gaps = {"mean": row.mean, "second moment": row.second_moment, "variance": row.variance}
        error = (
            f"varreg's {max(gaps, key=lambda k: gaps[k])} for '{row.parameter}' is not the true one"
        )
    note = f" (served by: {mechanism})" if mechanism else ""
    return Reason(
        f"Model and loss treat each sample by itself, but {error}{note}.",
        "This is an error in varreg: please report it, with the model. Until it is "
        "fixed, freeze the parameter, or register a rule with varreg.register_rule.",
    )
