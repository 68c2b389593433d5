"""Presets of options, in param groups and in checkpoints."""

from __future__ import annotations

import io

import torch
from torch import nn

import varreg
from tests.support.noisy_regression import training


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
