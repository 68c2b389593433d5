"""The rates that the paper claims, measured; and where they are not what it says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from varreg.theory.problems import Noise, changing, quadratic, ridge, steady
from varreg.theory.rates import distances, exponent, theorem_s0, trade_off

T, RUNS = 400, 2000


@pytest.mark.parametrize("series", [steady(T), changing(T, 0.5)])
@pytest.mark.parametrize("problem", [quadratic(5, 1.0, 0.5), ridge(dimension=5)])
def test_theorem_s0(problem, series):
    found = distances(problem, Noise(series), problem.minimum + 1.0, RUNS)
    assert (found.mean <= theorem_s0(found, problem.l, as_printed=True) + 3 * found.error).all()
    assert exponent(found.mean, 50) == pytest.approx(-1, abs=0.25)


def test_theorem_s0_can_fail_at_its_second_step():
    """A start at the minimum, and noise at the first step only: E[R₂] = σ²/l², where σ²/(2l²) is
    claimed. The mended bound holds.
    """
    problem = quadratic(1, 1.0, 1.0)
    noise = Noise(torch.tensor([1.0, *[0.0] * 9]))
    found = distances(problem, noise, problem.minimum, 20_000)
    printed, mended = theorem_s0(found, 1.0, as_printed=True), theorem_s0(found, 1.0)
    assert float(found.mean[1]) == pytest.approx(1.0, rel=0.05)
    assert float(printed[1]) == pytest.approx(0.5, rel=0.05)
    assert float(found.mean[1]) > float(printed[1] + 10 * found.error[1])
    assert (found.mean <= mended + 3 * found.error).all()


def test_a_wrong_strong_convexity_is_found_out():
    """With steps for an l twenty times too large, the distance no longer falls as 1/t."""
    pretended = dataclasses.replace(quadratic(1, 0.05, 0.05), l=1.0)
    found = distances(pretended, Noise(steady(T, 0.01)), pretended.minimum + 5.0, 200)
    assert not (found.mean <= theorem_s0(found, 1.0) + 3 * found.error).all()
    assert exponent(found.mean, 50) > -0.5


def test_the_corollary_is_true_of_one_step_and_not_of_whole_runs():
    problem = quadratic(5, 1.0, 1.0)
    found = distances(problem, Noise(steady(T)), problem.minimum + 1.0, RUNS)
    assert exponent(found.one_step, 50) == pytest.approx(
        -3, abs=0.15
    )  # faster than γ², which falls as t^−2
    assert exponent(found.variance, 50) == pytest.approx(-2, abs=0.15)  # no faster than γ²


def test_the_formula_of_one_step():
    """Var(R_{t+1} | x_t), against many draws from one point."""
    problem, sigma2, runs = quadratic(3, 1.0, 0.5), 0.7, 400_000
    noise = Noise(torch.full((2,), sigma2))
    found = distances(problem, noise, problem.minimum + 1.0, runs)
    assert float(found.variance[1]) == pytest.approx(float(found.one_step[0]), rel=0.02)


@pytest.mark.parametrize("alpha", [0.2, 0.35, 0.5, 0.65, 0.8])
def test_the_trade_off(alpha):
    """T^(α−1) + T^(−α). The second is reached slowly: at large α, the sum's own beginning, of order
    1/T, is still seen.
    """
    Ts = torch.tensor([10**k for k in range(4, 8)])
    start, noise = torch.tensor([trade_off(alpha, int(T)) for T in Ts]).T
    assert exponent(start, 0, Ts) == pytest.approx(alpha - 1, abs=1e-9)
    assert exponent(noise, 0, Ts) == pytest.approx(-alpha, abs=0.05)


def test_one_half_is_best():
    at = {alpha: sum(trade_off(alpha, 10**6)) for alpha in (0.2, 0.35, 0.5, 0.65, 0.8)}
    assert min(at, key=at.get) == 0.5


def test_bad_input():
    with pytest.raises(ValueError, match="between 0 and 1"):
        trade_off(1.0, 10)
