"""Shares of the hindsight optimum's gain: right at both ends, and never mistaking a longer step for
a gain.
"""

from __future__ import annotations

import math

import pytest
import torch

from varreg.regularizer import DEFAULTS, FORMS, HISTORIES, lambda0_of
from varreg.theory.hindsight import (
    RECORDED,
    Series,
    caught,
    causal,
    recorded,
    relation_at_end,
    saved,
)
from varreg.theory.optimum import optimal
from varreg.theory.problems import changing, steady

SERIES = changing(500, 0.5)
LAMBDA0 = lambda0_of(DEFAULTS["s"])


def test_both_ends():
    assert caught(optimal(SERIES, LAMBDA0, high=LAMBDA0), SERIES, LAMBDA0).share == pytest.approx(
        1, rel=1e-9
    )
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
    whole, beginning = (
        causal(SERIES, form=form, history=history),
        causal(SERIES[:100], form=form, history=history),
    )
    assert torch.equal(whole[:100], beginning)
    assert caught(whole, SERIES, LAMBDA0).share <= 1


def test_where_noise_changes_a_causal_form_catches_most():
    """Independent variances: the past says what is usual, and the present is known. The sum as
    printed catches nothing: it goes to a constant.
    """
    share = {
        (f, h): caught(causal(SERIES, form=f, history=h), SERIES, LAMBDA0).share
        for f in ("rational", "affine")
        for h in HISTORIES
    }
    assert share["affine", "harmonic"] > 0.9
    assert share["rational", "harmonic"] > share["rational", "mean"] > 0.5
    assert abs(share["rational", "sum"]) < 0.05


def test_where_variances_vary_little_a_bounded_form_catches_less_than_half():
    """1 − (1 − k)² with k = 1/(1 + e), the share of the solution's slope that it has; Theorem 3's
    form catches all.
    """
    series = changing(2000, 0.01)
    k = 1 / (1 + math.e)
    for form in ("rational", "sigmoid"):
        assert caught(causal(series, form=form), series, LAMBDA0).share == pytest.approx(
            1 - (1 - k) ** 2, abs=0.01
        )
    assert caught(causal(series, form="affine"), series, LAMBDA0).share > 0.98


def test_several_series_at_once():
    two = torch.stack([SERIES, changing(500, 1.0, seed=1)], 1)
    together = causal(two, two.flip(1), history="harmonic")
    for i in (0, 1):
        torch.testing.assert_close(
            together[:, i],
            causal(two[:, i], two.flip(1)[:, i], history="harmonic"),
            rtol=1e-12,
            atol=0,
        )


def test_scale_free_is_the_formula():
    g2 = changing(500, 0.3, seed=3)
    rho = SERIES / g2
    mean = rho.cumsum(0) / torch.arange(1, 501)
    torch.testing.assert_close(causal(SERIES, g2), 3 / (1 + 2 * rho / mean), rtol=1e-9, atol=0)
    with pytest.raises(ValueError, match="needs δ̄²"):
        causal(SERIES, scale_free=True)


def test_without_trend():
    """A slow factor of a thousand is taken out, and what is fast stays."""
    trend = torch.logspace(0, 3, 2000, dtype=torch.float64)
    fast = changing(2000, 0.1, seed=2)
    series = Series("x", (trend * fast)[:, None], (fast / trend)[:, None])
    flat = series.without_trend()
    assert series.spread > 0.9
    assert flat.spread == pytest.approx(float((fast.log() / 2).std()), rel=0.05)
    torch.testing.assert_close(flat.sigma2[100:-100], flat.delta2[100:-100], rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_series(name):
    whole, tensors, elements = recorded(name)
    assert len(whole.sigma2) == len(elements.sigma2) > 1000
    assert tensors.sigma2.shape[1] >= 3
    assert elements.sigma2.shape[1] >= 5
    for series in (whole, tensors, elements):
        assert (series.sigma2 > 0).all()
        assert series.delta2.shape == series.sigma2.shape
    assert (
        whole.without_trend().spread < 0.2
    )  # from batch to batch, the noise of real training changes little
    assert (
        whole.sigma2[:, 0] >= tensors.sigma2.sum(1) * 0.999
    ).all()  # weights are part of the model


@pytest.mark.parametrize("name", RECORDED)
def test_v2_at_one_point(name):
    """E[v²] = (m − 1)E[ε²] in real training, too: S2.2, against errors from the gradient of all
    samples.
    """
    relation, columns = relation_at_end(name)
    ratio = columns["v2"].mean() / columns["e2"].mean()
    error = ratio * columns["e2"].std() / columns["e2"].mean() / len(columns["e2"]) ** 0.5
    assert float(ratio) == pytest.approx(99, abs=4 * float(error))
    assert 0 < relation.spread < 0.2


def test_what_is_saved_in_truth():
    """Where v² says all about the error, what is saved is what it seems; where it says nothing, a λ
    that varies only costs.
    """
    v2 = changing(4000, 0.5)
    flat = torch.ones_like(v2)
    honest = saved({"v2": v2, "e2": v2, "g2": flat, "progress": flat}, LAMBDA0)
    assert honest.real == pytest.approx(honest.apparent)
    assert honest.real == pytest.approx(honest.at_equal_progress)
    assert honest.real > 0.3
    assert 0.001 < honest.real_error < 0.1
    blind = saved({"v2": v2, "e2": flat, "g2": flat, "progress": flat}, LAMBDA0)
    assert blind.apparent == pytest.approx(honest.apparent)
    assert blind.real < 0


def test_equal_progress_is_not_equal_length():
    """Where a long step is one that goes far, as much λ goes further; there is less to pay for the
    same progress.
    """
    v2 = changing(4000, 0.5)
    flat = torch.ones_like(v2)
    far = saved({"v2": v2, "e2": flat, "g2": flat, "progress": 1 / v2}, LAMBDA0)
    short = saved({"v2": v2, "e2": flat, "g2": flat, "progress": v2}, LAMBDA0)
    assert short.at_equal_progress < far.real < far.at_equal_progress


def test_bad_input():
    with pytest.raises(ValueError, match="form must be one of"):
        causal(SERIES, form="round")
