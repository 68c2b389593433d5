"""Moments → λ: the regularizer as pure functions (paper, sections 3–4 and S2.1–S2.3).

A step α·δ̄ becomes α·λ·δ̄. With σ² the variance of the increment δ̄ and ρ = σ²/δ̄² its scale-free
form,

    λ = form(ρ/ρ̄)        ρ̄: the history of ρ, up to and including now

so that λ = 1 where ρ equals its history, λ > 1 where the increment is less uncertain, and λ < 1
where it is more uncertain. Everything works element by element on tensors of any shape, also on
scalars (one λ for a tensor or a model).

Where ρ/ρ̄ is undefined (0/0, without any gradient; or without a history), λ is 1. No history
records a ρ that is not finite. The histories are in histories.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varreg.backends import BACKENDS
from varreg.calibration import calibrated
from varreg.devices import constant
from varreg.errors import VarregError
from varreg.histories import TABLE, Memory, average, fresh, nan_if_unknown, record, scale_free
from varreg.native import contract
from varreg.options import DEFAULTS, FORMS, HISTORIES, PER, Form, History, Options, Per, check
from varreg.options import is_number as _is_number
from varreg.thresholds import REGULARIZERS

__all__ = [
    "DEFAULTS",
    "FORMS",
    "HISTORIES",
    "PER",
    "Form",
    "History",
    "Options",
    "Per",
    "affine",
    "average",
    "bounds",
    "calibrated",
    "check",
    "lambda0_of",
    "lambdas",
    "limit",
    "ratio",
    "rational",
    "record",
    "regularizer",
    "s_of",
    "scale_free",
    "sigmoid",
]

# λ₀ ↔ s (S2.1)
# -------------------------------------------------------------------------------------------------


def s_of(lambda0: float) -> float:
    """Return s = (1 + λ₀/2)/(e − λ₀/2), for −2 ≤ λ₀ < 2e ≈ 5.44 (S2.1). At 2e, s has a pole; beyond
    it, s is negative, and no form exists.

    >>> round(s_of(1.0), 4), round(s_of(5.0), 4)  # the paper's range; it rounds to (0.5, 20)
    (0.6762, 16.0343)
    """
    if not _is_number(lambda0) or not -2 <= lambda0 < 2 * math.e:
        raise VarregError(
            "varreg: lambda0 must be from -2 up to below 2e = 5.4366, where s(lambda0) has its "
            f"pole; got {lambda0!r}."
        )
    return (1 + lambda0 / 2) / (math.e - lambda0 / 2)


def lambda0_of(s: float) -> float:
    """Return λ₀ = 2(es − 1)/(1 + s), the inverse of `s_of`. s = 0 is λ₀ = −2, where every form is
    λ = 1; λ₀ = 1/(αL) > 0 needs s > 1/e.

    >>> round(lambda0_of(2.0), 4), round(s_of(lambda0_of(2.0)), 4)
    (2.9577, 2.0)
    """
    if not _is_number(s) or s < 0:
        raise VarregError(f"varreg: s must be a finite number from 0 up, got {s!r}.")
    return 2 * (math.e * s - 1) / (1 + s)


# The forms
# -------------------------------------------------------------------------------------------------


def rational(rho: Tensor, rho_bar: Tensor, s: float) -> Tensor:
    """Return λ = (1 + s)/(1 + s·ρ/ρ̄): from 1 + s down to 0 (section 4, the form that the paper
    uses).

    >>> import torch
    >>> rational(torch.tensor([0.0, 2.0, 5.0]), torch.tensor(2.0), 2.0).tolist()
    [3.0, 1.0, 0.5]
    """
    return constant(1 + s, rho) / torch.addcdiv(constant(1.0, rho), rho, rho_bar, value=s)


def affine(rho: Tensor, rho_bar: Tensor, s: float) -> Tensor:
    """Return λ = (1 + λ₀/2)·ρ̄/ρ − λ₀/2, with λ₀ of s: Theorem 3's exact form, which has no bounds
    of its own.

    >>> import torch
    >>> r = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    >>> affine(r, torch.tensor(1.0), 2.0).round(decimals=4).tolist()
    [3.4789, 1.0, -0.8591]
    """
    half = lambda0_of(s) / 2
    return (rho_bar / rho).mul_(1 + half).sub_(half)


def sigmoid(rho: Tensor, rho_bar: Tensor, s: float) -> Tensor:
    """Return λ = a/(1 + exp[−affine]), a = 1 + 1/e: from a down to a/(1 + exp(λ₀/2)) (S2.1).

    >>> import torch
    >>> r = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> sigmoid(r, torch.tensor(1.0), 2.0).round(decimals=4).tolist()
    [1.0, 0.6025]
    """
    return affine(rho, rho_bar, s).sigmoid_().mul_(1 + 1 / math.e)


class _Form(NamedTuple):
    function: Callable[[Tensor, Tensor, float], Tensor]
    kernel: contract.Form | None = None


_FORMS: dict[Form, _Form] = {
    "rational": _Form(rational, contract.Form.RATIONAL),
    "sigmoid": _Form(sigmoid),
    "affine": _Form(affine, contract.Form.AFFINE),
}


# ρ → λ
# -------------------------------------------------------------------------------------------------


def limit(m: int, options: Mapping[str, Any]) -> float | None:
    """Return the upper limit of ρ over m samples, cap·m; None if there is no cap."""
    return None if options["cap"] is None else options["cap"] * m


def ratio(
    variance: Tensor,
    delta: Tensor,
    history: Tensor,
    count: Tensor,
    m: int,
    options: Mapping[str, Any],
    present: Tensor | None = None,
    memory: Memory = fresh,
) -> tuple[Tensor, Tensor]:
    """Record ρ of an increment over m samples in its history. Return ρ, and the history's mean ρ̄.

    Where `present` is 0, ρ is undefined: no sample had a gradient, and only weight decay or
    momentum moves the parameter. ρ is also undefined where `present` is too small to be precise.
    """
    rho = _recorded(variance, delta, history, count, m, options, present, memory)
    out = memory("average", rho.shape, rho)
    return rho, average(history, count, options["history"], options["history_beta"], out)


def _recorded(
    variance: Tensor,
    delta: Tensor,
    history: Tensor,
    count: Tensor,
    m: int,
    options: Mapping[str, Any],
    present: Tensor | None,
    memory: Memory,
) -> Tensor:
    """Record ρ in its history, and return it."""
    rho = variance
    if options["scale_free"]:
        rho = scale_free(variance, delta, limit(m, options), memory("rho", delta.shape, delta))
    if present is not None:
        rho = nan_if_unknown(rho, present, may_write=rho is not variance)
    if rho.dtype != history.dtype:
        rho = rho.to(history.dtype)
    record(history, count, rho, options["history"], options["history_beta"], memory)
    return rho


def lambdas(
    variance: Tensor,
    delta: Tensor,
    history: Tensor,
    count: Tensor,
    m: int,
    options: Mapping[str, Any],
    present: Tensor | None = None,
    memory: Memory = fresh,
) -> Tensor:
    """Record ρ of an increment over m samples in its history, and return λ: `ratio` and
    `regularizer` in one.
    """
    lam = native_lambdas(variance, delta, history, count, present, limit(m, options), options)
    if lam is None:
        given = variance, delta, history, count, m, options, present, memory
        if options["form"] == "rational" and options["history"] == "mean":
            lam = _bounded(_of_mean(_recorded(*given), history, count, options["s"]), options)
        else:
            lam = regularizer(*ratio(*given), options)
    return lam


def _of_mean(rho: Tensor, omega: Tensor, n: Tensor, s: float) -> Tensor:
    """Return rational(ρ, Ω/n, s) = (1 + s)·Ω/(Ω + s·n·ρ), in one pass over memory less."""
    divisor = torch.addcmul(omega, n, rho, value=s)
    return torch.addcdiv(constant(0.0, rho), omega, divisor, value=1 + s)


def native_lambdas(
    variance: Tensor,
    delta: Tensor,
    history: Tensor,
    count: Tensor,
    present: Tensor | None,
    limit: float | None,
    options: Mapping[str, Any],
) -> Tensor | None:
    """Return λ by native code; None if native code does not know these options or tensors."""
    template = kernel_task(*KERNEL_OPTIONS(options))
    if template is None:
        return None
    task = contract.Task.from_buffer_copy(template)
    task.limit = math.inf if limit is None else limit
    return BACKENDS[delta.device.type].lambdas(variance, delta, history, count, present, task)


@functools.lru_cache(maxsize=REGULARIZERS)
def kernel_task(
    form: Form,
    history: History,
    scale_free: bool,
    s: float,
    lambda_min: float | None,
    lambda_max: float | None,
) -> contract.Task | None:
    """Return a template of a native task with these options; None if native code does not know the
    form or the history. Callers copy the template.
    """
    by_form, by_history = _FORMS[form].kernel, TABLE[history].kernel
    if by_form is None or by_history is None:
        return None
    low, high = bounds({"form": form, "s": s, "lambda_min": lambda_min, "lambda_max": lambda_max})
    return contract.Task(
        form=by_form,
        history=by_history,
        scale_free=scale_free,
        s=float(s),
        half=lambda0_of(float(s)) / 2,
        limit=math.inf,
        low=-math.inf if low is None else low,
        high=math.inf if high is None else high,
    )


KERNEL_OPTIONS = itemgetter("form", "history", "scale_free", "s", "lambda_min", "lambda_max")


def regularizer(rho: Tensor, rho_bar: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return λ = form(ρ/ρ̄) within its bounds; 1 where ρ/ρ̄ is undefined. `options` has `s`,
    `form`, `lambda_min` and `lambda_max`.
    """
    return _bounded(_FORMS[options["form"]].function(rho, rho_bar, options["s"]), options)


def _bounded(lam: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return λ within its bounds, and 1 where it is undefined; it may be written to."""
    low, high = bounds(options)
    if low is not None or high is not None:
        lam = lam.clamp_(min=low, max=high)
    return lam.nan_to_num_(nan=1.0)


def bounds(options: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return [λ_min, λ_max] (section 3): the options, or [0, 1+s] for the affine form without
    options.
    """
    low, high = options["lambda_min"], options["lambda_max"]
    if options["form"] == "affine":
        low = 0.0 if low is None else low
        high = max(1 + options["s"], low) if high is None else high
    return low, high
