"""The parts of `varreg theory`: each function computes plain numbers, to be saved by its name."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from varreg import regularizer
from varreg.theory import hindsight, increment_variance
from varreg.theory.claims import CHECKS, LAMBDA0, Check
from varreg.theory.claims.full_problem import theorem_3_errors
from varreg.theory.claims.lemma_1 import TIMES, first_terms
from varreg.theory.claims.theorem_s0 import ALPHAS, trade_off_of
from varreg.theory.problems import Noise, quadratic, steady
from varreg.theory.rates import distances

NOISES = (0.03, 0.1, 0.3, 1.0)
"""Standard errors of the mean gradient over the gradient, at which increments are measured."""
JUDGED = (
    "rational, mean",
    "rational, harmonic",
    "affine, harmonic",
    "rational of ρ, mean",
    "rational of ρ, harmonic",
)
"""The regularizers that are judged on batches at fixed parameters."""


Computed = dict[str, Any]
"""The computed results, by the names of the parts."""


class Part(NamedTuple):
    """A part of `varreg theory`, with the function that computes it."""

    name: str
    compute: Callable[[], Any]


def _checked(function: Callable[[], list[Check]]) -> list[dict[str, Any]]:
    """Return the checks of a claim as plain values."""
    return [
        {**asdict(check), "slack": check.slack, "verdict": check.verdict} for check in function()
    ]


def _hindsight() -> list[dict[str, Any]]:
    """Return, for each series, the gain of the best regularizer and the share that each causal one
    catches.
    """
    rows = []
    every = hindsight.all_series()
    by_arm = {
        name: hindsight.medians_caught(every, LAMBDA0, **options)
        for name, options in hindsight.ARMS.items()
    }
    for series in every:
        gain = statistics.median(hindsight.gain(x, LAMBDA0) for x in series.sigma2.T)
        arms = {name: found[series.name]._asdict() for name, found in by_arm.items()}
        rows.append({"series": series.name, "spread": series.spread, "gain": gain, "arms": arms})
    return rows


def _at_fixed_parameters() -> list[dict[str, Any]]:
    """Return the relation between v² of a batch and its error, at the end of the recorded runs."""
    rows = []
    for name, title in hindsight.RECORDED.items():
        relation, columns = hindsight.relation_at_end(name)
        arms = {
            arm: hindsight.saved(columns, LAMBDA0, **hindsight.ARMS[arm])._asdict()
            for arm in JUDGED
        }
        batches = len(columns["v2"])
        rows.append({"series": title, **relation._asdict(), "batches": batches, "arms": arms})
    return rows


def _increments() -> list[dict[str, Any]]:
    """Return predicted over observed variances of increments, a column for each noise."""
    columns = [increment_variance.measured(noise) for noise in NOISES]
    return [
        {
            "optimizer": case,
            "version": version,
            **{f"{n:g}": column[i][2] for n, column in zip(NOISES, columns, strict=True)},
        }
        for i, (case, version, _) in enumerate(columns[0])
    ]


def _points() -> dict[str, Any]:
    """Return the points of the figures."""
    r = torch.logspace(-1, 1, 81, dtype=torch.float64)
    forms = {
        "Theorem 3": regularizer.affine,
        "sigmoid": regularizer.sigmoid,
        "rational": regularizer.rational,
    }
    s = regularizer.DEFAULTS["s"]
    same = quadratic(5, 1.0, 1.0)
    fall = distances(same, Noise(steady(400)), same.minimum + 1.0, 2000)
    fallen = {
        "E[R_t]": fall.mean,
        "Var(R_t), whole runs": fall.variance,
        "Var(R_t), one step": fall.one_step,
    }
    models = [
        next(series for series in hindsight.recorded(name) if "whole" in series.name)
        for name in hindsight.RECORDED
    ]
    return {
        "forms": {
            "r": r.tolist(),
            **{name: form(r, torch.ones_like(r), s).tolist() for name, form in forms.items()},
        },
        "start": {"T": TIMES, **first_terms()},
        "trade_off": {f"{alpha:g}": trade_off_of(alpha) for alpha in ALPHAS},
        "theorem_3": theorem_3_errors(),
        "rates": {name: values.tolist() for name, values in fallen.items()},
        "series": {
            series.name.partition(",")[0]: series.sigma2[:, 0].tolist() for series in models
        },
    }


PARTS = (
    *(Part(name, functools.partial(_checked, check)) for name, check in CHECKS.items()),
    Part("Hindsight", _hindsight),
    Part("Real batches", _at_fixed_parameters),
    Part("Increments", _increments),
    Part("Figures", _points),
)
