"""λ over the elements that move, and the bounds that calibration keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import varreg
from tests.support.noisy_regression import training
from varreg import calibration, regularizer


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
