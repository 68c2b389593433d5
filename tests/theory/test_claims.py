"""The table of claims: every check says what it is expected to say, and one that is tampered with
says otherwise.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from varreg.theory import lemma1
from varreg.theory.claims import CHECKS, Check, full_problem, lemma_1, theorem_s0


@pytest.mark.parametrize("name", ["The problem in full", "λ and its batch", "S2.4"])
def test_every_verdict_is_the_expected_one(name):
    """Those that are quick; `varreg theory` runs them all, and test_cli.py runs that."""
    rows = CHECKS[name]()
    for check in rows:
        assert check.holds == check.expected, check
        assert "UNEXPECTED" not in check.verdict
    assert any(check.holds for check in rows)


def test_a_tampered_lemma_is_found_out(monkeypatch):
    """A bound that forgets what the start costs."""
    monkeypatch.setattr(lemma_1, "bound", lambda paths, gamma, as_printed=False: paths.noise)
    monkeypatch.setattr(lemma_1, "PROBLEMS", {"quadratic": lemma_1.PROBLEMS["quadratic"]})
    first = lemma_1.lemma_1()[0]
    assert not first.holds
    assert first.verdict == "does not hold – UNEXPECTED"


def test_tampered_steps_are_found_out(monkeypatch):
    monkeypatch.setattr(
        lemma_1, "FALLING", {"too long": torch.full((lemma_1.T,), 2.5, dtype=torch.float64)}
    )
    monkeypatch.setattr(lemma_1, "PROBLEMS", {"quadratic": lemma_1.PROBLEMS["quadratic"]})
    assert not lemma_1.lemma_1()[0].holds


def test_tampered_rates_are_found_out(monkeypatch):
    """Noise that costs as much however long the run is: its exponent is not −α."""
    monkeypatch.setattr(
        theorem_s0,
        "trade_off_of",
        lambda alpha: ([10**k for k in range(2, 8)], [1.0] * 6, [1e-3] * 6),
    )
    assert not any(
        check.holds for check in theorem_s0.trade_offs() if "exponent" in check.statement
    )


@pytest.mark.parametrize(
    "wrong", [torch.ones_like, lambda s: s / s.mean(), lambda s: (1 / s).clamp(0.1, 3.0)]
)
def test_a_solver_that_does_not_solve_is_found_out(monkeypatch, wrong):
    monkeypatch.setattr(full_problem, "optimal", lambda sigma2, *bounds, **more: wrong(sigma2))
    assert not all(
        check.holds
        for check in full_problem.the_problem()
        if check.claim in ("The problem in full", "S1.5")
    )


def test_a_history_that_is_not_harmonic_is_found_out(monkeypatch):
    """S1.5's solution with the arithmetic mean."""
    monkeypatch.setattr(full_problem, "unbounded", lambda s, h: (1 + h / 2) * s.mean() / s - h / 2)
    assert not next(check for check in full_problem.the_problem() if check.claim == "S1.5").holds


def test_a_form_that_is_the_solution_is_found_out(monkeypatch):
    """S2.1 would hold if the rational form were Theorem 3's, and then it says so."""
    monkeypatch.setattr(full_problem.regularizer, "rational", full_problem.regularizer.affine)
    assert [check.holds for check in full_problem.the_problem() if check.claim == "S2.1"] == [
        False,
        True,
    ]


def test_a_corollary_that_is_true_is_found_out(monkeypatch):
    """If whole runs varied as single steps do, the check of whole runs would hold, and be
    unexpected.
    """
    real = theorem_s0.distances

    def tampered(*args):
        found = real(*args)
        return dataclasses.replace(found, variance=found.one_step)

    monkeypatch.setattr(theorem_s0, "distances", tampered)
    assert [check.verdict for check in theorem_s0._corollary()] == ["holds", "holds – UNEXPECTED"]


def test_a_regularizer_whose_steps_never_grow_forgets_its_start(monkeypatch):
    monkeypatch.setattr(
        lemma_1,
        "causal",
        lambda sigma2: 3 * torch.arange(1, len(sigma2) + 1, dtype=torch.float64) ** -0.5,
    )
    assert [check.holds for check in lemma_1._of_vr_sgd()] == [True, True]


def test_what_the_start_costs():
    """Lemma 1's first term, as the three versions have it: γ ∝ 1/√t gives T^−½, VR-SGD's mended one
    none, the weighted one T^−1.
    """
    terms = lemma_1.first_terms()
    falling, mended, weighted = (torch.tensor(values) for values in terms.values())
    T = torch.tensor(lemma_1.TIMES)
    torch.testing.assert_close(falling, T**-0.5, rtol=1e-6, atol=0)
    assert mended[-1] > 0.7 * mended[0]
    assert weighted[-1] < 2 / 128 * weighted[0]
    assert lemma1.weight(torch.tensor([1.0, 0.5, 1.0, 0.5])) == 3.0


def test_slack_and_verdict():
    check = Check("a", "b", "c", 2.0, "≤", 6.0, True)
    assert check.slack == 3
    assert check.verdict == "holds"
    assert dataclasses.replace(check, holds=False).verdict == "does not hold – UNEXPECTED"
    assert dataclasses.replace(check, holds=False, expected=False).verdict == "does not hold"


def test_the_bounded_forms_at_the_mean():
    """S2.1: both have 1/(1 + e) of the solution's slope, which leaves 1 − (1 − 1/(1+e))² = 0.466 of
    the gain where variances vary little.
    """
    for form in (full_problem.regularizer.sigmoid, full_problem.regularizer.rational):
        assert full_problem._slope(form) / full_problem._slope(
            full_problem.regularizer.affine
        ) == pytest.approx(1 / (1 + torch.e), rel=1e-6)
