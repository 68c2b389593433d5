"""λ as pure functions: forms, histories, bounds, and that nothing poisons a history."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import update_rules
from varreg import regularizer as vr
from varreg.backends import TWINS, use

S = [0.0, 0.1, 1 / math.e, 1.0, 2.0, 16.0]
R = torch.tensor([0.0, 0.2, 0.9, 1.0, 1.1, 3.0, 100.0, math.inf], dtype=torch.float64)


def options(**changed):
    return {**vr.DEFAULTS, **changed}


@pytest.mark.parametrize("s", S)
@pytest.mark.parametrize("form", vr.FORMS)
def test_forms(form, s):
    lam = vr.regularizer(R, torch.ones(()), options(form=form, s=s))
    torch.testing.assert_close(lam, update_rules.form(R, form, s).nan_to_num(nan=1.0))
    assert lam[3] == pytest.approx(1, abs=1e-15)  # as uncertain as ever: the base's step
    assert (lam.diff() <= 0).all()
    assert (lam >= 0).all()
    assert lam.max() <= max(1 + s, 1 + 1 / math.e)
    if s == 0:
        torch.testing.assert_close(lam, torch.ones_like(lam))


@settings(deadline=None)
@given(st.floats(-2, 2 * math.e, exclude_max=True))
def test_lambda0_and_s_are_inverse(lambda0):
    s = vr.s_of(lambda0)
    assert s >= 0
    if s < 1e12:
        assert vr.lambda0_of(s) == pytest.approx(lambda0, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("lambda0", [2 * math.e, 6.0, -2.1, math.nan, math.inf, "1"])
def test_lambda0_past_its_pole(lambda0):
    with pytest.raises(ValueError, match=r"lambda0 must be from -2 up to below 2e = 5.4366"):
        vr.s_of(lambda0)


def test_lambda0_of_a_negative_s():
    with pytest.raises(ValueError, match="s must be a finite number from 0 up, got -1"):
        vr.lambda0_of(-1)


@pytest.mark.parametrize("kind", vr.HISTORIES)
@settings(deadline=None)
@given(
    st.lists(
        st.one_of(st.floats(1e-6, 1e6), st.sampled_from([0.0, math.inf, math.nan])),
        min_size=1,
        max_size=12,
    )
)
def test_histories_against_their_definition(kind, rhos):
    history, count = torch.zeros(1), torch.zeros(1)
    past = []
    for rho in rhos:
        past.append(torch.tensor([rho]))
        vr.record(history, count, past[-1], kind, 0.9)
        assert history.isfinite().all()
        expected = update_rules.average(past, kind, 0.9)
        if expected.isfinite().all():
            torch.testing.assert_close(vr.average(history, count, kind, 0.9), expected)
        lam = vr.regularizer(past[-1], vr.average(history, count, kind, 0.9), options(history=kind))
        assert lam.isfinite().all()


@pytest.mark.parametrize("kind", vr.HISTORIES)
def test_a_history_never_overflows(kind):
    history, count = torch.zeros(1, dtype=torch.float32), torch.zeros(1, dtype=torch.float32)
    for rho in (3e38, 3e38, 1e-44, 1e-44, 1.0):
        vr.record(history, count, torch.tensor([rho], dtype=torch.float32), kind)
    assert history.isfinite().all()


def test_bounds():
    lam = vr.regularizer(R, torch.ones(()), options(lambda_min=0.5, lambda_max=1.5))
    assert lam.min() == 0.5
    assert lam.max() == 1.5
    unbounded = vr.regularizer(R, torch.ones(()), options(form="affine"))
    assert (unbounded.min(), unbounded.max()) == (0, 3)  # [0, 1+s], the rational form's own
    assert vr.bounds(options(form="affine", lambda_max=9.0)) == (0.0, 9.0)


@pytest.mark.parametrize("changed", [{}, {"lambda_min": 0.4, "lambda_max": 1.1}, {"cap": 0.3}])
def test_lambda_is_the_form_of_rho_over_the_mean_of_its_history(changed):
    o = options(**changed)
    values = [0.0, 1e-20, 0.3, 1.0, 2.0, math.inf, math.nan]
    pairs = [(v, d) for v in values for d in values[:-2]]
    variance, delta = torch.tensor(pairs, dtype=torch.float64).T
    ours, theirs = ([torch.zeros_like(delta) for _ in range(2)] for _ in range(2))
    with use("cpu", TWINS):
        for _ in range(3):
            lam = vr.lambdas(variance, delta, *ours, 5, o)
            expected = vr.regularizer(*vr.ratio(variance, delta, *theirs, 5, o), o)
            torch.testing.assert_close(lam, expected, rtol=1e-12, atol=1e-15)
            variance = variance.roll(1)
    assert torch.equal(torch.stack(ours), torch.stack(theirs))
    assert (lam.isfinite() & (lam != 1)).any()


def test_cap_is_the_sampling_noise_of_zero():
    rho = vr.scale_free(torch.tensor([8.0, 1.0, 0.0]), torch.tensor([2.0, 0.0, 0.0]), limit=1.5)
    assert rho[:2].tolist() == [1.5, 1.5]
    assert rho[2].isnan()  # 0/0 stays undefined


DRIFTS = {
    "grows": lambda t: 2.9 - 1.9 / t**0.5,
    "falls": lambda t: 3 - 2 * min(t, 300) / 300,
    "swings": lambda t: 1.5 + math.sin(t / 7),
    "jumps": lambda t: 3.0 if t % 50 < 25 else 0.5,
}


@pytest.mark.parametrize("drift", DRIFTS.values(), ids=DRIFTS)
def test_calibration_keeps_the_mean_at_one(drift):
    sums = [torch.zeros(()) for _ in range(3)]
    given = [drift(t) * 2 * torch.rand(50) for t in range(1, 401)]
    used = torch.stack([vr.calibrated(lam, *sums) for lam in given])
    assert used.mean() == pytest.approx(1, abs=0.03)
    assert used[:50].mean() == pytest.approx(1, abs=0.15)
    assert abs(torch.stack(given).mean() - 1) > 0.1  # it had something to do


def test_calibration_keeps_bounds():
    sums = [torch.zeros(()) for _ in range(3)]
    used = torch.stack([vr.calibrated(3 * torch.rand(50), *sums, 0.5, 1.2) for _ in range(100)])
    assert used.min() >= 0.5
    assert used.max() <= 1.2


BAD = [
    ({"s": -1}, "s must be a finite number from 0 up"),
    ({"s": math.nan}, "s must be a finite number from 0 up"),
    ({"s": "2"}, "s must be a finite number from 0 up"),
    ({"form": "linear"}, "form must be one of 'rational', 'sigmoid', 'affine'; got 'linear'"),
    (
        {"history": "median"},
        "history must be one of 'sum', 'mean', 'ema', 'geometric', 'harmonic'; got 'median'",
    ),
    ({"per": "layer"}, "per must be one of 'element', 'tensor', 'model'; got 'layer'"),
    (
        {"lambda_min": 2.0, "lambda_max": 1.0},
        "lambda_min must not be above lambda_max; got 2.0 and 1.0",
    ),
    ({"lambda_min": -0.1}, "lambda_min must be a finite number from 0 up, or None"),
    ({"lambda_max": math.inf}, "lambda_max must be a finite number from 0 up, or None"),
    ({"history_beta": 1.0}, "history_beta must be from 0 up to below 1"),
    ({"cap": 0}, "cap must be a positive number, in units of the batch size"),
    ({"cap": 1.0, "scale_free": False}, "cap is a bound on ρ"),
    ({"scale_free": "no"}, "scale_free must be True or False"),
    ({"calibrate": 1}, "calibrate must be True or False"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_bad_options(bad, message):
    with pytest.raises(ValueError, match=message):
        vr.check(options(**bad))
