"""The regularizer in the place of a tuned optimizer: the preset, the warning of long steps, λ over
the elements that move, and calibration's bounds.
"""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch import nn

import varreg
from varreg import calibration, regularizer
from varreg.errors import MeasurementError
from varreg.optim.synchronized import check_synchronized
from varreg.thresholds import LAMBDA_EVERY, LAMBDA_LOOKS

STRETCH = LAMBDA_EVERY * LAMBDA_LOOKS


def training(steps=STRETCH, make=varreg.VRSGD, dtype=torch.float64, **options):
    """Yields model and optimizer after each step of a noisy regression, whose ρ is heavy-tailed."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to(dtype)
    varreg.observe(model)
    optimizer = make(model.parameters(), lr=1e-3, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = torch.randn(8, 6, dtype=dtype), torch.randn(8, 3, dtype=dtype)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        yield model, optimizer


def messages(**options):
    """The warnings of a training, each with the number of its step."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, _ in enumerate(training(STRETCH + 3 * LAMBDA_EVERY, **options), 1):
            found += [(step, str(w.message)) for w in caught]
            caught.clear()
    return found


@pytest.mark.parametrize("options", [{}, {"per": "tensor", "history": "sum"}, {"momentum": 0.9}])
def test_steps_that_stay_long_are_warned_of_once(options):
    given = {"history": "sum", **options}
    [(step, said)] = messages(**given)
    assert step == STRETCH
    assert "VRSGD" in said
    assert "calibrate=True" in said
    assert "smaller learning rate" in said


def test_who_calibrates_is_told_what_is_left():
    [(_, said)] = messages(history="sum", calibrate=True, lambda_min=2.5)
    assert "calibrate" not in said
    assert "smaller learning rate" in said


@pytest.mark.parametrize(
    "options", [{"calibrate": True}, {"history": "harmonic"}, {"s": 0.5, "history": "sum"}]
)
def test_steps_of_the_usual_length_are_not_warned_of(options):
    assert messages(**options) == []


def test_a_few_long_steps_are_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, (_, optimizer) in enumerate(training(2 * STRETCH, history="sum"), 1):
            optimizer.param_groups[0]["s"] = 0.3 if step // LAMBDA_EVERY % 3 == 2 else 2.0


def test_algorithm_1_is_as_printed():
    """x ← x − α·λ·ḡ with λ = (1+s)/(1 + s·ρ/Ω), Ω ← Ω + ρ."""
    torch.manual_seed(1)
    model = nn.Linear(4, 2).double()
    varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), 0.05, **varreg.ALGORITHM_1)
    omega = dict.fromkeys(model.parameters(), 0.0)
    for _ in range(5):
        optimizer.zero_grad()
        (model(torch.randn(7, 4).double()).square().mean()).backward()
        expected = {}
        for p in model.parameters():
            m = varreg.moments(p)
            rho = m.variance / m.mean.square()
            omega[p] = omega[p] + rho
            lam = 3 / (1 + 2 * rho / omega[p])
            expected[p] = p.detach() - 0.05 * lam * m.mean
        optimizer.step()
        for p, x in expected.items():
            torch.testing.assert_close(p.detach(), x, rtol=1e-12, atol=1e-14)


def test_a_preset_leaves_primitives_in_groups_and_checkpoints():
    _, optimizer = list(training(2, **varreg.ALGORITHM_1, calibrate=True))[-1]
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    groups = torch.load(saved, weights_only=True)["param_groups"]
    assert groups[0]["history"] == "sum"
    assert {type(groups[0][name]) for name in varreg.ALGORITHM_1} == {str, float, bool}
    wrapped = varreg.VarianceRegularized(
        torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1), **varreg.ALGORITHM_1
    )
    assert wrapped.param_groups[0]["history"] == "sum"


@pytest.mark.parametrize("make", [varreg.VRSGD, varreg.VRAdam])
@pytest.mark.parametrize("calibrate", [False, True])
def test_elements_that_never_had_a_gradient_are_left_out(make, calibrate):
    torch.manual_seed(0)
    table = nn.Embedding(10, 3).double()
    varreg.observe(table)
    optimizer = make(table.parameters(), lr=0.1, calibrate=calibrate)
    for step in range(6):
        optimizer.zero_grad()
        rows = torch.randint(2 + step // 3, (8,))
        (table(rows) * torch.randn(8, 3)).square().sum(1).mean().backward()
        optimizer.step()
        used, lam = 2 + step // 3, optimizer.lambda_of(table.weight)
        row = optimizer.lambda_summary().parameters[0]
        assert row.silent == 3 * (10 - used)
        assert row.mean == pytest.approx(float(lam[:used].mean()), rel=1e-12)
        assert row.quantiles[1] in lam[:used]
        assert (lam[used:] == 1).all()
    assert "21 elements never had a gradient" in str(optimizer.lambda_summary())


def test_calibration_is_over_elements_that_have_a_gradient():
    """Rows that no sample reaches would hold the mean at 1, and λ of the others where it was."""
    torch.manual_seed(0)
    table = nn.Embedding(200, 3).double()
    varreg.observe(table)
    optimizer = varreg.VRSGD(table.parameters(), lr=1e-3, history="sum", calibrate=True)
    means = []
    for _ in range(60):
        optimizer.zero_grad()
        (table(torch.randint(4, (8,))) * torch.randn(8, 3)).square().sum(1).mean().backward()
        optimizer.step()
        means.append(float(optimizer.lambda_of(table.weight)[:4].mean()))
    assert sum(means) / 60 == pytest.approx(1, abs=0.1)


def test_calibration_without_any_gradient_changes_nothing():
    sums = [torch.tensor(x) for x in (1.5, 4.0, 5.0)]
    lam = calibration.calibrated(torch.ones(3), *sums, known=torch.zeros(3))
    assert lam.tolist() == [1.0, 1.0, 1.0]
    assert [float(t) for t in sums] == [1.5, 4.0, 5.0]


@pytest.mark.parametrize("per", ["element", "tensor"])
def test_calibration_keeps_the_bounds_of_the_form(per):
    """Theorem 3's form has none of its own, and is kept in [0, 1+s]: also after calibration."""
    largest = 0.0
    options = {"form": "affine", "history": "harmonic", "calibrate": True, "per": per, "s": 0.1}
    for model, optimizer in training(40, **options):
        largest = max(largest, *(float(optimizer.lambda_of(p).max()) for p in model.parameters()))
    low, high = regularizer.bounds({**regularizer.DEFAULTS, **options})
    assert low == 0
    assert largest <= high + 1e-12


def test_who_has_no_s_is_not_told_of_it(monkeypatch):
    model, _ = next(training(1))
    model.zero_grad()
    model(torch.randn(3, 6).double()).sum().backward()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(MeasurementError, match="or use s=0"):
        check_synchronized(model.parameters())
    with pytest.raises(MeasurementError) as raised:
        check_synchronized(model.parameters(), steps=False)
    assert "s=0" not in str(raised.value)
