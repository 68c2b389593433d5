"""Lemma 1 holds where its conditions do, fails where they do not, and its mended version holds for
steps that grow.
"""

from __future__ import annotations

import pytest
import torch

from varreg.regularizer import DEFAULTS, lambdas
from varreg.theory.lemma1 import bound, walk, weight
from varreg.theory.problems import PROBLEMS, Noise, changing, quadratic, steady

T, RUNS = 200, 200
t = torch.arange(1, T + 1)


def steps(problem, kind):
    largest = 1 / problem.L
    falling = {"constant": torch.ones(T), "1/√t": t**-0.5, "1/t": 1 / t}
    growing = {
        "growing": t / T,
        "random": torch.rand(T, generator=torch.Generator().manual_seed(0)).clamp(min=0.01),
    }
    return largest * {**falling, **growing}[kind]


@pytest.mark.parametrize("shape", ["normal", "exponential"])
@pytest.mark.parametrize("series", [steady(T), changing(T, 1.0)])
@pytest.mark.parametrize("kind", ["constant", "1/√t", "1/t"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_holds_on_every_path_where_steps_do_not_grow(name, kind, series, shape):
    problem = PROBLEMS[name]()
    gamma = steps(problem, kind)
    paths = walk(problem, Noise(series, shape), gamma, problem.minimum + 2.0, RUNS)
    assert (paths.criterion <= bound(paths, gamma, as_printed=True) + 1e-12).all()
    torch.testing.assert_close(bound(paths, gamma), bound(paths, gamma, as_printed=True))


@pytest.mark.parametrize("kind", ["growing", "random"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_mended_version_holds_for_any_steps(name, kind):
    problem = PROBLEMS[name]()
    gamma = steps(problem, kind)
    paths = walk(problem, Noise(changing(T, 1.0)), gamma, problem.minimum + 2.0, RUNS)
    assert (paths.criterion <= bound(paths, gamma) + 1e-12).all()
    assert (paths.weighted <= paths.weighted_bound + 1e-12).all()


def test_the_weighted_version_is_the_unweighted_one_for_constant_steps():
    """But for the last distance, which it drops, and M, which it does not need."""
    problem, gamma = quadratic(), torch.full((T,), 0.5)
    start = problem.minimum + 2.0
    paths = walk(problem, Noise(changing(T, 0.5)), gamma, start, RUNS)
    torch.testing.assert_close(paths.weighted, paths.criterion)
    first = (start - problem.minimum).square().sum() / (2 * gamma.sum())
    torch.testing.assert_close(paths.weighted_bound, first + paths.noise)


def test_the_gap():
    """An explicit example: no noise, tiny steps, and one long one at the end. The averaged loss is
    T − 1 times what is printed to be above it.
    """
    problem = quadratic(1, L=1.0, l=1.0)
    gamma = torch.full((T,), 1e-6)
    gamma[-1] = 1.0
    paths = walk(problem, Noise(steady(T, 0.0)), gamma, problem.minimum + 1.0, 1)
    printed = bound(paths, gamma, as_printed=True)
    assert float(printed) == pytest.approx(0.5 / T)
    assert float(paths.criterion / printed) == pytest.approx(T - 1, rel=1e-3)
    assert (paths.criterion <= bound(paths, gamma)).all()


def test_the_steps_of_a_regularizer_grow():
    """So that the lemma as printed does not cover VR-SGD: with its own λ, W is many times
    1/γ_{T−1}.
    """
    history, count = torch.zeros(1), torch.zeros(1)
    options = {**DEFAULTS, "scale_free": False}
    series = changing(T, 1.0)
    lam = torch.cat([lambdas(v[None], torch.ones(1), history, count, 100, options) for v in series])
    assert (lam.diff() > 0).any()
    assert weight(lam) > 5 * weight(lam, as_printed=True)
    assert weight(lam) / T == pytest.approx(
        weight(lam[: T // 2]) / (T // 2), rel=0.3
    )  # it grows as T does: W/T does not fall


@pytest.mark.parametrize(("L", "factor"), [(1.0, 3.0)])
def test_a_step_beyond_one_over_l_is_found_out(L, factor):
    """Breaking the condition γ ≤ 1/L breaks the bound: without noise, a quadratic then diverges
    from the first step on.
    """
    problem = quadratic(3, L=L, l=L)
    gamma = torch.full((5,), factor / L)
    paths = walk(problem, Noise(steady(5, 0.0)), gamma, problem.minimum + 1.0, 1)
    assert (paths.criterion > bound(paths, gamma, as_printed=True)).all()
    assert (paths.weighted > paths.weighted_bound).all()


def test_bad_input():
    with pytest.raises(ValueError, match="one positive step is needed for each of 3"):
        walk(quadratic(), Noise(steady(3)), torch.ones(2), torch.zeros(10), 1)
