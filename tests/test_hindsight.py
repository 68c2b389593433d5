"""Shares of the hindsight optimum's gain: right at both ends, and never mistaking a longer step for a gain."""

from __future__ import annotations

import math

import pytest
import torch

from varreg.regularizer import DEFAULTS, FORMS, HISTORIES, lambda0_of
from varreg.theory.hindsight import caught, causal
from varreg.theory.optimum import optimal
from varreg.theory.problems import changing, steady

SERIES = changing(500, 0.5)
LAMBDA0 = lambda0_of(DEFAULTS["s"])


def test_both_ends():
    assert caught(optimal(SERIES, LAMBDA0), SERIES, LAMBDA0).share == pytest.approx(1, rel=1e-9)
    for constant in (0.5, 1.0, 3.0):
        found = caught(constant * torch.ones_like(SERIES), SERIES, LAMBDA0)
        assert found.share == pytest.approx(0, abs=1e-12)
        assert found.mean_lambda == pytest.approx(constant)
    assert caught(SERIES, SERIES, LAMBDA0).share < 0  # longer steps where it is noisier
    assert math.isnan(caught(torch.rand(50), steady(50), LAMBDA0).share)


def test_causal_is_the_formula():
    """Rational with the mean: λ_t = (1+s)/(1 + s·σ_t²/mean(σ_1² … σ_t²))."""
    mean = SERIES.cumsum(0) / torch.arange(1, len(SERIES) + 1)
    torch.testing.assert_close(causal(SERIES), 3 / (1 + 2 * SERIES / mean), rtol=1e-12, atol=0)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("form", FORMS)
def test_no_form_knows_the_future(form, history):
    whole, beginning = causal(SERIES, form=form, history=history), causal(SERIES[:100], form=form, history=history)
    assert torch.equal(whole[:100], beginning)
    assert caught(whole, SERIES, LAMBDA0).share <= 1


def test_where_noise_changes_a_causal_form_catches_most():
    """Independent variances: the past says what is usual, and the present is known. The sum as printed catches nothing: it goes to a constant."""
    share = {
        (f, h): caught(causal(SERIES, form=f, history=h), SERIES, LAMBDA0).share
        for f in ("rational", "affine")
        for h in HISTORIES
    }
    assert share["affine", "harmonic"] > 0.9
    assert share["rational", "harmonic"] > share["rational", "mean"] > 0.5
    assert abs(share["rational", "sum"]) < 0.05


def test_bad_input():
    with pytest.raises(ValueError, match="form must be one of"):
        causal(SERIES, form="round")
