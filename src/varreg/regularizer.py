"""Moments → λ: the regularizer as pure functions (paper, sections 3–4 and S2.1–S2.3).

A step α·δ̄ becomes α·λ·δ̄. With σ² the variance of the increment δ̄ and ρ = σ²/δ̄² its scale-free form,

    λ = form(ρ/ρ̄)        ρ̄: the history of ρ, up to and including now

so that λ = 1 where a parameter is as uncertain as it ever was, λ > 1 where it is less so, λ < 1 where it is more so. Everything works
element by element on tensors of any shape, also of none (one λ for a tensor or a model).

What is undefined (0/0: no gradient at all; or no history) has λ = 1. A ρ that is not finite is not entered into any history.

Validity is arithmetic (0·x is 0 or nan), not boolean: on a CPU, comparing and selecting costs ten times as much as adding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from varreg import native
from varreg.memory import scratch

Form = Literal["rational", "sigmoid", "affine"]
History = Literal["sum", "mean", "ema", "geometric", "harmonic"]
Per = Literal["element", "tensor", "model"]

FORMS: tuple[Form, ...] = ("rational", "sigmoid", "affine")
HISTORIES: tuple[History, ...] = ("sum", "mean", "ema", "geometric", "harmonic")
PER: tuple[Per, ...] = ("element", "tensor", "model")
_ONE = torch.ones(())
_HUGE = 1e37  # a history stops here: one more value must not make a float32 overflow


class Options(TypedDict, total=False):
    """The regularizer's options, which every param group has. The defaults are the paper's text; what goes beyond it is off."""

    s: float
    """The impact factor, 2 unless given (section 4); 0 gives λ = 1, the base optimizer to the bit."""
    form: Form
    """`"rational"` (1+s)/(1+s·r), `"sigmoid"`, or `"affine"`, with r = ρ/ρ̄ (Theorem 3, section 4, S2.1)."""
    history: History
    """ρ̄: `"sum"` Σρ (Algorithm 1 as printed), `"mean"` (the text), `"ema"`, `"geometric"`, or `"harmonic"` (S1.5)."""
    scale_free: bool
    """True: ρ = σ²/δ̄² (S2.3). False: the variance σ² itself in place of ρ."""
    per: Per
    """One λ for each `"element"`, each `"tensor"`, or the `"model"`: there ρ = Σσ²/Σδ̄² over all of it."""
    lambda_min: float | None
    """Lower bound of λ (section 3). The affine form, which has no bounds of its own, is kept in [0, 1+s] unless told otherwise."""
    lambda_max: float | None
    """Upper bound of λ."""
    history_beta: float
    """β of the `"ema"` history, 0.99 unless given."""
    cap: float | None
    """ρ counts for at most `cap`·m. At ρ = m a mean over m samples is as small as its own standard error: more says only "not told from 0"."""
    calibrate: bool
    """Scale λ so that its mean over elements and steps stays at 1: the paper's own constraint Σλ = T (section 3)."""


DEFAULTS: Options = {
    "s": 2.0,
    "form": "rational",
    "history": "mean",
    "scale_free": True,
    "per": "element",
    "lambda_min": None,
    "lambda_max": None,
    "history_beta": 0.99,
    "cap": None,
    "calibrate": False,
}


def check(options: Mapping[str, Any]) -> None:
    """Raise a ValueError that says what is allowed."""
    s, low, high, beta, cap = (options[k] for k in ("s", "lambda_min", "lambda_max", "history_beta", "cap"))
    if not _is_number(s) or s < 0:
        raise ValueError(f"varreg: s must be a finite number from 0 up (0: no regularization), got {s!r}.")
    for name, allowed in (("form", FORMS), ("history", HISTORIES), ("per", PER)):
        if options[name] not in allowed:
            raise ValueError(f"varreg: {name} must be one of {', '.join(map(repr, allowed))}; got {options[name]!r}.")
    for name in ("scale_free", "calibrate"):
        if not isinstance(options[name], bool):
            raise ValueError(f"varreg: {name} must be True or False, got {options[name]!r}.")
    for name, bound in (("lambda_min", low), ("lambda_max", high)):
        if bound is not None and (not _is_number(bound) or bound < 0):
            raise ValueError(f"varreg: {name} must be a finite number from 0 up, or None for no bound; got {bound!r}.")
    if low is not None and high is not None and low > high:
        raise ValueError(f"varreg: lambda_min must not be above lambda_max; got {low!r} and {high!r}.")
    if not _is_number(beta) or not 0 <= beta < 1:
        raise ValueError(f"varreg: history_beta must be from 0 up to below 1; got {beta!r}.")
    if cap is not None and (not _is_number(cap) or cap <= 0):
        raise ValueError(f"varreg: cap must be a positive number, in units of the batch size, or None for no cap; got {cap!r}.")
    if cap is not None and not options["scale_free"]:
        raise ValueError("varreg: cap is a bound on ρ = σ²/δ̄²; with scale_free=False there is no ρ. Drop one of the two.")


def plain(value: Any) -> Any:
    """A number of another library (NumPy's float64 is a float) as Python's own, so that a checkpoint holds nothing else."""
    return float(value) if isinstance(value, float) else value


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


# λ₀ ↔ s (S2.1) ---------------------------------------------------------------------------------------------------------------------


def s_of(lambda0: float) -> float:
    """s = (1 + λ₀/2)/(e − λ₀/2), for −2 ≤ λ₀ < 2e ≈ 5.44 (S2.1). At 2e it has a pole, beyond it is negative, and no form is left.

    >>> round(s_of(1.0), 4), round(s_of(5.0), 4)  # the paper's range for λ₀; it rounds s to (0.5, 20)
    (0.6762, 16.0343)
    """
    if not _is_number(lambda0) or not -2 <= lambda0 < 2 * math.e:
        raise ValueError(
            f"varreg: lambda0 must be from -2 up to below 2e = 5.4366, where s(lambda0) has its pole; got {lambda0!r}."
        )
    return (1 + lambda0 / 2) / (math.e - lambda0 / 2)


def lambda0_of(s: float) -> float:
    """λ₀ = 2(es − 1)/(1 + s), the inverse of `s_of`. s = 0 is λ₀ = −2, where every form is λ = 1; λ₀ = 1/(αL) > 0 needs s > 1/e.

    >>> round(lambda0_of(2.0), 4), round(s_of(lambda0_of(2.0)), 4)
    (2.9577, 2.0)
    """
    if not _is_number(s) or s < 0:
        raise ValueError(f"varreg: s must be a finite number from 0 up, got {s!r}.")
    return 2 * (math.e * s - 1) / (1 + s)


# The three forms -------------------------------------------------------------------------------------------------------------------


def rational(rho: Tensor, rho_bar: Tensor, s: float) -> Tensor:
    """λ = (1 + s)/(1 + s·ρ/ρ̄): from 1 + s down to 0 (section 4, the form that the paper uses).

    >>> import torch
    >>> rational(torch.tensor([0.0, 2.0, 5.0]), torch.tensor(2.0), 2.0).tolist()
    [3.0, 1.0, 0.5]
    """
    one = _ONE.to(rho)
    return (1 + s) * one / torch.addcdiv(one, rho, rho_bar, value=s)


def affine(rho: Tensor, rho_bar: Tensor, s: float) -> Tensor:
    """λ = (1 + λ₀/2)·ρ̄/ρ − λ₀/2, with λ₀ of s: Theorem 3's exact form, which has no bounds of its own.

    >>> import torch
    >>> affine(torch.tensor([1.0, 2.0, 8.0], dtype=torch.float64), torch.tensor(2.0), 2.0).round(decimals=4).tolist()
    [3.4789, 1.0, -0.8591]
    """
    half = lambda0_of(s) / 2
    return (rho_bar / rho).mul_(1 + half).sub_(half)


def sigmoid(rho: Tensor, rho_bar: Tensor, s: float) -> Tensor:
    """λ = a/(1 + exp[−affine]), a = 1 + 1/e: from a down to a/(1 + exp(λ₀/2)) (S2.1).

    >>> import torch
    >>> sigmoid(torch.tensor([2.0, 4.0], dtype=torch.float64), torch.tensor(2.0), 2.0).round(decimals=4).tolist()
    [1.0, 0.6025]
    """
    return affine(rho, rho_bar, s).sigmoid_().mul_(1 + 1 / math.e)


_FORMS = {"rational": rational, "sigmoid": sigmoid, "affine": affine}


# ρ, its history, and λ -------------------------------------------------------------------------------------------------------------


def scale_free(variance: Tensor, delta: Tensor, limit: float | None = None, out: Tensor | None = None) -> Tensor:
    """ρ = σ²/δ̄² (S2.3), at most `limit`: inf where only δ̄ is 0, nan where both are.

    >>> import torch
    >>> scale_free(torch.tensor([8.0, 1.0, 0.0]), torch.tensor([2.0, 0.0, 0.0])).tolist()
    [2.0, inf, nan]
    """
    rho = torch.square(delta, out=out)
    rho = torch.div(variance, rho, out=rho)
    return rho if limit is None else rho.clamp_(max=limit)


def record(history: Tensor, count: Tensor, rho: Tensor, kind: History, beta: float = 0.99) -> None:
    """Enter ρ into the sums of a history, in place, where it is finite.

    They are Σρ and n; for `"geometric"` Σ log ρ, for `"harmonic"` Σ 1/ρ, both over ρ > 0; for `"ema"` βh + (1−β)ρ.
    """
    kept, valid = scratch("value", rho.shape, rho), scratch("valid", rho.shape, rho)
    value = torch.log(rho, out=kept) if kind == "geometric" else torch.reciprocal(rho, out=kept) if kind == "harmonic" else rho
    torch.add(_ONE.to(rho), rho, alpha=0.0, out=valid)  # 1, or nan where it is not finite
    if value is not rho:
        valid.add_(value, alpha=0.0)
    valid.nan_to_num_(nan=0.0)
    value = torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0, out=kept)
    if kind == "ema":
        count.add_(valid)
        history.lerp_(value, valid.mul_(1 - beta))
    else:
        count.add_(valid)
        history.add_(value).clamp_(max=_HUGE)


def average(history: Tensor, count: Tensor, kind: History, beta: float = 0.99, out: Tensor | None = None) -> Tensor:
    """ρ̄ of a history's sums: Ω, Ω/n, exp(Ω/n), n/Ω, or h/(1 − βⁿ).

    >>> import torch
    >>> history, count = torch.zeros(1), torch.zeros(1)
    >>> for rho in (1.0, 4.0, float("inf"), float("nan")):
    ...     record(history, count, torch.tensor([rho]), "harmonic")
    >>> count.item(), round(average(history, count, "harmonic").item(), 6)  # 2/(1 + 1/4); what is not finite was left out
    (2.0, 1.6)
    """
    if kind == "sum":
        return history
    if kind == "ema":
        return torch.div(history, 1 - beta**count, out=out)
    if kind == "harmonic":
        return torch.div(count, history, out=out)
    mean = torch.div(history, count, out=out)
    return mean.exp_() if kind == "geometric" else mean


def ratio(
    variance: Tensor,
    delta: Tensor,
    history: Tensor,
    count: Tensor,
    m: int,
    options: Mapping[str, Any],
    present: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """ρ of an increment over m samples, and ρ̄ of its history, into which it is entered. Both may be overwritten by the next call.

    Where `present` is 0, there is no ρ: no sample had a gradient, and what moves is weight decay, or memory. Nor is there one where it is so
    small that its precision is lost.
    """
    rho = variance
    if options["scale_free"]:
        rho = scale_free(variance, delta, limit(m, options), scratch("rho", delta.shape, delta))
    if present is not None:
        rho = rho * one_or_nan(present)
    if rho.dtype != history.dtype:
        rho = rho.to(history.dtype)
    kind, beta = options["history"], options["history_beta"]
    record(history, count, rho, kind, beta)
    return rho, average(history, count, kind, beta, scratch("average", rho.shape, rho))


def one_or_nan(present: Tensor) -> Tensor:
    """1 where sums of squares W are known; nan where no sample had a gradient, or W is too small for its precision."""
    found = torch.nn.functional.threshold(present, torch.finfo(present.dtype).tiny, torch.nan)
    return found.div_(found)


def lambdas(
    variance: Tensor,
    delta: Tensor,
    history: Tensor,
    count: Tensor,
    m: int,
    options: Mapping[str, Any],
    present: Tensor | None = None,
) -> Tensor:
    """λ of an increment over m samples, from its ρ and its history, into which ρ is entered: all of the above, in one."""
    lam = native.lambdas(variance, delta, history, count, present, limit(m, options), options)
    return lam if lam is not None else regularizer(*ratio(variance, delta, history, count, m, options, present), options)


def limit(m: int, options: Mapping[str, Any]) -> float | None:
    """What ρ of m samples counts for at most."""
    return None if options["cap"] is None else options["cap"] * m


def regularizer(rho: Tensor, rho_bar: Tensor, options: Mapping[str, Any]) -> Tensor:
    """λ = form(ρ/ρ̄) within its bounds; 1 where ρ/ρ̄ is undefined. `options` has `s`, `form`, `lambda_min` and `lambda_max`."""
    s, form = options["s"], options["form"]
    lam = _FORMS[form](rho, rho_bar, s)
    low, high = bounds(options)
    if low is not None or high is not None:
        lam = lam.clamp_(min=low, max=high)
    return lam.nan_to_num_(nan=1.0)


def bounds(options: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """[λ_min, λ_max] (section 3): what was asked for, and [0, 1+s] for the affine form where nothing was."""
    low, high = options["lambda_min"], options["lambda_max"]
    if options["form"] == "affine":
        low, high = 0.0 if low is None else low, max(1 + options["s"], low or 0.0) if high is None else high
    return low, high


def calibrated(
    lam: Tensor, recent: Tensor, total: Tensor, steps: Tensor, low: float | None = None, high: float | None = None
) -> Tensor:
    """λ so scaled that its mean over elements and steps stays at 1: Σλ = T (section 3), as far as the past can say.

    λ is divided by its recent mean (an EMA over about ten steps), and multiplied by t/(Σλ + 1) for what was spent too much or too little
    before. The three sums are brought up to date; the bounds hold for the result.

    >>> import torch
    >>> sums = [torch.zeros(()) for _ in range(3)]
    >>> spent = [calibrated(torch.tensor(x), *sums).item() for x in (3.0, 1.0, 2.0, 3.0, 3.0, 1.0)]
    >>> round(sum(spent) / 6, 2)
    0.96
    """
    recent.lerp_(lam.mean().nan_to_num(nan=1.0), 0.1)
    steps.add_(1)
    mean = recent / (1 - 0.9**steps)
    lam = lam * (steps / (total + 1) / mean).nan_to_num_(nan=1.0, posinf=1.0)
    if low is not None or high is not None:
        lam = lam.clamp_(min=low, max=high)
    total.add_(lam.mean())
    return lam
