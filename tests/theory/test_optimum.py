"""The exact solution of the paper's problem, against its conditions and against an independent
solver.
"""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from scipy.optimize import Bounds, LinearConstraint, minimize

from varreg.theory.optimum import objective, optimal, unbounded

BOUNDS = [
    (0.0, math.inf),
    (0.1, math.inf),
    (0.0, 1.5),
    (0.2, 3.0),
    (1.0, 1.0),
    (1.0, 4.0),
    (0.0, 1.0),
]
SERIES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40).map(torch.tensor)


@given(SERIES, st.floats(0.05, 20.0), st.sampled_from(BOUNDS))
@settings(max_examples=300, deadline=None)
def test_conditions(sigma2, lambda0, bounds):
    """It is feasible; and the marginal cost is the same wherever no bound holds, higher at the
    lower bound, lower at the upper one.
    """
    low, high = bounds
    lam = optimal(sigma2, lambda0, low, high)
    T = len(sigma2)
    assert float(lam.sum()) == pytest.approx(T, rel=1e-12)
    assert (lam >= low).all()
    assert (lam <= high).all()
    marginal = (1 + 2 * lam / lambda0) * sigma2
    inside = (lam > low) & (lam < high)
    if inside.any():
        xi = float(marginal[inside].mean())
        torch.testing.assert_close(
            marginal[inside], torch.full_like(marginal[inside], xi), rtol=1e-9, atol=0
        )
        assert (marginal[lam == low] >= xi * (1 - 1e-9)).all()
        assert (marginal[lam == high] <= xi * (1 + 1e-9)).all()


@pytest.mark.filterwarnings("ignore:Values in x were outside bounds")  # of SciPy 1.15
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("seed", range(3))
def test_against_an_independent_solver(seed, bounds):
    generator = torch.Generator().manual_seed(seed)
    sigma2 = torch.exp(torch.randn(12, generator=generator))
    low, high = bounds
    found = minimize(
        lambda x: float(objective(torch.tensor(x), sigma2, 2.0)),
        [1.0] * 12,
        jac=lambda x: ((1 + 2 * torch.tensor(x) / 2.0) * sigma2).numpy(),
        method="SLSQP",
        bounds=Bounds(low, high if math.isfinite(high) else 12.0),
        constraints=LinearConstraint([[1.0] * 12], 12, 12),
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    lam = optimal(sigma2, 2.0, low, high)
    assert float(objective(lam, sigma2, 2.0)) <= found.fun * (1 + 1e-9)
    torch.testing.assert_close(lam, torch.tensor(found.x), rtol=0, atol=2e-5)


def test_without_bounds_it_is_the_closed_form():
    sigma2 = 1 + 0.2 * torch.rand(50)
    torch.testing.assert_close(optimal(sigma2, 2.0), unbounded(sigma2, 2.0), rtol=1e-12, atol=0)
    assert float(unbounded(sigma2, 2.0).mean()) == pytest.approx(1, rel=1e-12)


def test_a_million_steps():
    sigma2 = torch.exp(2 * torch.randn(1_000_000))
    lam = optimal(sigma2, 2.0, 0.1, 3.0)
    assert float(lam.sum()) == pytest.approx(1_000_000, rel=1e-12)
    assert float(objective(lam, sigma2, 2.0)) < float(objective(torch.ones_like(lam), sigma2, 2.0))


def test_nothing_to_gain_where_the_noise_is_always_the_same():
    assert torch.equal(optimal(torch.full((7,), 3.0), 2.0, 0.0, 5.0), torch.ones(7))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.ones(2, 2), 1.0), "of one dimension"),
        ((torch.tensor([1.0, 0.0]), 1.0), "positive and finite"),
        ((torch.tensor([1.0, math.nan]), 1.0), "positive and finite"),
        ((torch.ones(3), 0.0), "λ₀ must be positive"),
        ((torch.ones(3), 1.0, 1.5), "0 ≤ λ_min ≤ 1 ≤ λ_max"),
        ((torch.ones(3), 1.0, 0.0, 0.5), "0 ≤ λ_min ≤ 1 ≤ λ_max"),
    ],
)
def test_bad_input(arguments, words):
    with pytest.raises(ValueError, match=words):
        optimal(*arguments)
