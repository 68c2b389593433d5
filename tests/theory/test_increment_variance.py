"""S2.4 by Monte Carlo: exact for momentum, to first order for the adaptive ones; and a wrong
recursion is noticed.
"""

from __future__ import annotations

import math

import pytest

from varreg.native import library
from varreg.optim import increments
from varreg.theory.increment_variance import CASES, predicted_over_observed

EXACT = [case for case, (cls, _) in CASES.items() if "variance" not in cls._extra_options]
RUNS, STEPS = 4000, 30
SAMPLING = (
    5 * math.sqrt(2 / RUNS) / math.sqrt(3)
)  # five standard errors; a few of the averaged steps are independent


def late(*args, **kwargs) -> float:
    ratios = predicted_over_observed(*args, **kwargs, runs=RUNS, steps=STEPS)[STEPS // 2 :]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


@pytest.mark.parametrize("noise", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("case", EXACT)
def test_momentum_is_exact(case, noise):
    assert late(case, noise) == pytest.approx(1, abs=SAMPLING)


FIRST_ORDER = {case: 0.08 for case in CASES if case not in EXACT}
FIRST_ORDER |= {
    "Adadelta": 0.25,
    "RMSprop, momentum 0.9": 0.15,
}  # leave out their numerator's noise; what denominators share


@pytest.mark.parametrize("case", FIRST_ORDER)
def test_direct_version_is_right_to_first_order(case):
    assert late(case, 0.03, "direct") == pytest.approx(1, abs=FIRST_ORDER[case])


@pytest.mark.parametrize(
    ("case", "low", "high"), [("Adam", 0.6, 0.9), ("Adam, β₂ 0.9", 0.0, 0.2), ("RMSprop", 0.9, 1.1)]
)
def test_what_the_simplified_version_costs(case, low, high):
    """It replaces |g|/p₂ by 1: harmless where p₂ is a long average, and off by a factor of ten or
    more where it is a short one.
    """
    assert low <= late(case, 0.03, "simplified") <= high


def test_a_wrong_recursion_is_noticed(monkeypatch):
    def forgot_to_square(V, s2, mu, dampening, first):
        return V.copy_(s2) if first else V.mul_(mu).add_(s2, alpha=1 - dampening)

    monkeypatch.setattr(increments, "momentum", forgot_to_square)
    monkeypatch.setattr(library, "load", lambda: (None, "switched off"))
    assert late("SGD, momentum 0.9", 0.1) > 1.5


def test_the_papers_misprint_is_noticed(monkeypatch):
    """v_t = β₁²v_{t−1} + … as printed, for β₂²: the denominator's variance fades too fast, and the
    sum no longer cancels.
    """
    monkeypatch.setattr(
        increments,
        "denominator_weights",
        lambda beta: (0.9**2, (1 - beta) ** 2),
    )
    assert abs(late("Adam", 0.03, "direct") - 1) > 0.3
