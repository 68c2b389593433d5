"""The regularizer's options: their names, defaults and allowed values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args

from varreg.errors import VarregError

Form = Literal["rational", "sigmoid", "affine"]
History = Literal["sum", "mean", "ema", "geometric", "harmonic"]
Per = Literal["element", "tensor", "model"]

FORMS: tuple[Form, ...] = get_args(Form)
HISTORIES: tuple[History, ...] = get_args(History)
PER: tuple[Per, ...] = get_args(Per)


class Options(TypedDict, total=False):
    """The regularizer's options, which every param group has. The defaults are those of the paper's
    text; options that the paper does not have are off.
    """

    s: float
    """The impact factor, 2 unless given (section 4); 0 gives λ = 1, the base optimizer to the
    bit.
    """
    form: Form
    """`"rational"` (1+s)/(1+s·r), `"sigmoid"`, or `"affine"`, with r = ρ/ρ̄ (Theorem 3, section 4,
    S2.1).
    """
    history: History
    """ρ̄: `"sum"` Σρ (Algorithm 1 as printed), `"mean"` (the text), `"ema"`, `"geometric"`, or
    `"harmonic"` (S1.5).
    """
    scale_free: bool
    """True: ρ = σ²/δ̄² (S2.3). False: the variance σ² itself in place of ρ."""
    per: Per
    """One λ for each `"element"`, for each `"tensor"`, or for the `"model"`; the last two have ρ =
    Σσ²/Σδ̄² over all elements.
    """
    lambda_min: float | None
    """Lower bound of λ (section 3). The affine form, which has no bounds of its own, is kept in [0,
    1+s] unless bounds are given.
    """
    lambda_max: float | None
    """Upper bound of λ."""
    history_beta: float
    """β of the `"ema"` history, 0.99 unless given."""
    cap: float | None
    """Limits ρ to `cap`·m. At ρ = m, a mean over m samples is as small as its own standard error; a
    larger ρ only says that the mean cannot be distinguished from 0.
    """
    calibrate: bool
    """Scale λ so that its mean over elements and steps stays at 1: the paper's own constraint Σλ =
    T (section 3).
    """


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


ALGORITHM_1: Options = {
    "s": 2.0,
    "form": "rational",
    "history": "sum",
    "scale_free": True,
    "per": "element",
}
"""The paper's Algorithm 1 as it is printed: λ = (1+s)/(1 + s·ρ/Ω) with Ω = Σρ, a sum where the text
has an average. λ goes to 1+s, so that `VRSGD(params, lr, **varreg.ALGORITHM_1)` soon takes steps
three times as long.
"""


def check(options: Mapping[str, Any]) -> None:
    """Raise a VarregError that names the allowed values, if an option has another value."""
    s, low, high, beta, cap = (
        options[k] for k in ("s", "lambda_min", "lambda_max", "history_beta", "cap")
    )
    if not is_number(s) or s < 0:
        raise VarregError(
            f"varreg: s must be a finite number from 0 up (0: no regularization), got {s!r}."
        )
    for name, allowed in (("form", FORMS), ("history", HISTORIES), ("per", PER)):
        check_choice(name, options[name], allowed)
    for name in ("scale_free", "calibrate"):
        if not isinstance(options[name], bool):
            raise VarregError(f"varreg: {name} must be True or False, got {options[name]!r}.")
    for name, bound in (("lambda_min", low), ("lambda_max", high)):
        if bound is not None and (not is_number(bound) or bound < 0):
            raise VarregError(
                f"varreg: {name} must be a finite number from 0 up, or None for no bound; got "
                f"{bound!r}."
            )
    if low is not None and high is not None and low > high:
        raise VarregError(
            f"varreg: lambda_min must not be above lambda_max; got {low!r} and {high!r}."
        )
    if not is_number(beta) or not 0 <= beta < 1:
        raise VarregError(f"varreg: history_beta must be from 0 up to below 1; got {beta!r}.")
    if cap is not None and (not is_number(cap) or cap <= 0):
        raise VarregError(
            "varreg: cap must be a positive number, in units of the batch size, or None for no "
            f"cap; got {cap!r}."
        )
    if cap is not None and not options["scale_free"]:
        raise VarregError(
            "varreg: cap is a bound on ρ = σ²/δ̄²; with scale_free=False there is no ρ. Drop one "
            "of the two."
        )


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise a VarregError if the value of an option is not among the allowed ones."""
    if value not in allowed:
        raise VarregError(
            f"varreg: {name} must be one of {', '.join(map(repr, allowed))}; got {value!r}."
        )


def is_number(x: Any) -> bool:
    """Return whether x is a finite number, and not a bool."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
