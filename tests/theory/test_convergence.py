"""Theorems 1 and 2 over many runs: they hold under their conditions, and a condition that is broken
shows.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from varreg.theory.convergence import expectation, theorem1, theorem2
from varreg.theory.lemma1 import walk
from varreg.theory.problems import PROBLEMS, Noise, changing, quadratic, steady

T, RUNS = 100, 4000
CASES = [
    (name, series, shape)
    for name in PROBLEMS
    for series in ("steady", "changing")
    for shape in ("normal", "exponential")
]


def made(name, series, shape, alpha=0.5):
    problem = PROBLEMS[name]()
    noise = Noise(steady(T, 0.5) if series == "steady" else changing(T, 0.5, 0.5), shape)
    gamma = torch.arange(1, T + 1) ** -alpha / problem.L
    return problem, noise, gamma, walk(problem, noise, gamma, problem.minimum + 0.5, RUNS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_theorem_1(case):
    problem, noise, gamma, paths = made(*case)
    assert expectation(paths, noise, gamma, problem.L).is_equal
    found = theorem1(paths, gamma, float(noise.sigma2.max()))
    assert found.is_below
    assert 1 <= found.slack < 100


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_theorem_2(case):
    problem, noise, _, paths = made(*case)
    found = theorem2(paths, problem, noise)
    assert found.is_below
    assert found.slack > 1


def test_a_bias_is_found_out():
    """Errors whose mean is not 0: the expectation is not what the formula says."""
    problem, noise, gamma, _ = made("quadratic", "steady", "normal")

    class Biased(Noise):
        def sample(self, *arguments):
            return super().sample(*arguments) - 0.1

    paths = walk(problem, Biased(noise.sigma2), gamma, problem.minimum + 0.5, RUNS)
    assert not expectation(paths, noise, gamma, problem.L).is_equal


def test_a_variance_above_its_bound_is_found_out():
    """Theorem 1 with a σ₀² that σ_t² exceeds."""
    problem = quadratic(2, 1.0, 1.0)
    noise, gamma = Noise(steady(T, 100.0)), torch.full((T,), 1.0)
    paths = walk(problem, noise, gamma, problem.minimum, RUNS)
    assert theorem1(paths, gamma, 100.0).is_below
    assert not theorem1(paths, gamma, 1.0).is_below


def test_a_region_that_is_not_kept_is_found_out():
    """Theorem 2 with an M that paths go beyond, and a far start in noise of few fourth moments."""
    problem = quadratic(1, 1.0, 1.0)
    noise, gamma = Noise(steady(T, 0.01)), torch.full((T,), 0.001)
    paths = walk(problem, noise, gamma, problem.minimum + 10.0, RUNS)
    assert theorem2(paths, problem, noise).is_below
    assert not theorem2(paths, problem, noise, reach=1.0).is_below


def test_errors_that_depend_on_each_other_are_found_out():
    """Theorem 2 with one error kept for all steps: the variance does not fall with T any more."""
    problem = quadratic(1, 1.0, 1.0)
    gamma = torch.full((T,), 0.001)

    class Kept(Noise):
        def sample(self, t, runs, dimension, generator):
            return super().sample(0, runs, dimension, torch.Generator().manual_seed(5))

    noise = Kept(steady(T, 0.01))
    paths = walk(problem, noise, gamma, problem.minimum + 10.0, RUNS)
    assert not theorem2(paths, problem, noise).is_below


def test_measured():
    found = expectation(
        made("quadratic", "steady", "normal")[3], Noise(steady(T, 0.5)), torch.ones(T), 1.0
    )
    assert dataclasses.replace(found, claimed=found.value).is_equal
    assert not dataclasses.replace(found, claimed=found.value + 5 * found.error).is_equal
