"""The table of claims: every check says what it is expected to say, and one that is tampered with says otherwise."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from varreg.theory import checks, lemma1, rates
from varreg.theory.checks import CHECKS, Check


@pytest.mark.parametrize("name", CHECKS)
def test_every_verdict_is_the_expected_one(name):
    rows = CHECKS[name]()
    assert rows
    for check in rows:
        assert check.holds == check.expected, check
        assert "UNEXPECTED" not in check.verdict
        assert check.claim
        assert check.statement
        assert check.conditions
    assert any(check.holds for check in rows)


def test_a_tampered_lemma_is_found_out(monkeypatch):
    """A bound that forgets what the start costs."""
    monkeypatch.setattr(checks, "bound", lambda paths, gamma, as_printed=False: paths.noise)
    monkeypatch.setattr(checks, "PROBLEMS", {"quadratic": checks.PROBLEMS["quadratic"]})
    first = checks.lemma_1()[0]
    assert not first.holds
    assert first.verdict == "does not hold – UNEXPECTED"


def test_tampered_steps_are_found_out(monkeypatch):
    monkeypatch.setattr(checks, "FALLING", {"too long": torch.full((checks.T,), 2.5, dtype=torch.float64)})
    monkeypatch.setattr(checks, "PROBLEMS", {"quadratic": checks.PROBLEMS["quadratic"]})
    assert not checks.lemma_1()[0].holds


def test_tampered_rates_are_found_out(monkeypatch):
    """A start that costs nothing in the trade-off: its exponent is not α − 1."""
    monkeypatch.setattr(checks, "trade_off", lambda alpha, T: (1e-3, rates.trade_off(alpha, T)[1]))
    assert not any(check.holds for check in checks.trade_offs() if "start" in check.statement)


def test_what_the_start_costs():
    """Lemma 1's first term, as the three versions have it: γ ∝ 1/√t gives T^−½, VR-SGD's mended one none, the weighted one T^−1."""
    terms = checks.first_terms()
    falling, mended, weighted = (torch.tensor(values) for values in terms.values())
    T = torch.tensor(checks.TIMES)
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
    """S2.1: both have 1/(1 + e) of the solution's slope, which leaves 1 − (1 − 1/(1+e))² = 0.466 of the gain where variances vary little."""
    for form in ("sigmoid", "rational"):
        assert checks._slope(form) / checks._slope("affine") == pytest.approx(1 / (1 + torch.e), rel=1e-12)
