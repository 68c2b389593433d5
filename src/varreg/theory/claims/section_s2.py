"""S2.2, the variance within a mini-batch; S2.4, the variance of an increment."""

from __future__ import annotations

import math

from varreg.theory import increment_variance, minibatch
from varreg.theory.claims.claim import Check


def mini_batches() -> list[Check]:
    """Check E[v²]/σ² = m − 1."""
    rows = []
    for m, independent in ((2, True), (5, True), (16, True), (16, False)):
        ratio = minibatch.ratio(m, 1500, independent)
        how = "independent samples" if independent else "16 of 40 samples, without replacement"
        where = f"a small network, batches of {m}, {how}; measured by the engine"
        holds = abs(ratio.value - (m - 1)) <= 4 * ratio.error
        said = "E[v²]/σ² = m − 1"
        rows.append(
            Check(
                "S2.2",
                said,
                where,
                ratio.value,
                "=",
                m - 1.0,
                holds,
                ratio.error,
                expected=independent,
            )
        )
    return rows


def increment_variances() -> list[Check]:
    """Check predicted against true variances of increments."""
    runs, rows = 4000, []
    error = math.sqrt(2 / runs)  # of one step's observed variance; the mean over steps has less
    for case, version, noise, expected in (
        ("SGD, momentum 0.9", None, 1.0, True),
        ("SGD, Nesterov 0.9", None, 1.0, True),
        ("Adam", "direct", 0.03, True),
        ("Adam", "direct", 1.0, True),
        ("Adam, β₂ 0.9", "direct", 0.3, False),
        ("Adadelta", "direct", 0.03, False),
        ("Adam", "simplified", 0.03, False),
        ("Adam, β₂ 0.9", "simplified", 0.03, False),
    ):
        ratios = increment_variance.predicted_over_observed(
            case, noise, version, runs=runs, steps=40
        )[20:]
        value = math.exp(sum(map(math.log, ratios)) / len(ratios))
        tolerance = 4 * error if version is None else 0.15
        kind = "exact" if version is None else f"{version} version"
        said = "predicted over true variance of the increment = 1" + (
            "" if version is None else ", to 15 %"
        )
        where = f"{case}, {kind}; ḡ's standard error {noise:g} times g"
        rows.append(
            Check(
                "S2.4",
                said,
                where,
                value,
                "=",
                1.0,
                abs(value - 1) < tolerance,
                value * error,
                expected,
            )
        )
    return rows
