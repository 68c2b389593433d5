"""The constants that the theory's checks rely on are those of the problems."""

from __future__ import annotations

import pytest
import torch

from varreg.theory.problems import PROBLEMS, Noise, changing, quadratic, ridge, steady


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradient_and_minimum(name):
    problem = PROBLEMS[name]()
    x = torch.randn(7, problem.dimension, requires_grad=True)
    (gradient,) = torch.autograd.grad(problem.value(x).sum(), x)
    torch.testing.assert_close(problem.gradient(x).detach(), gradient, rtol=1e-10, atol=1e-12)
    assert float(problem.gradient(problem.minimum[None]).abs().max()) < 1e-12
    assert (problem.regret(x) > 0).all()


@pytest.mark.parametrize("name", PROBLEMS)
def test_constants(name):
    """Eigenvalues of the Hessian lie between l and L wherever one looks; for quadratics both are
    reached.
    """
    problem = PROBLEMS[name]()
    for scale in (0.0, 1.0, 5.0):
        at = problem.minimum + scale * torch.randn(problem.dimension)
        H = torch.autograd.functional.hessian(lambda x: problem.value(x[None])[0], at)
        eigenvalues = torch.linalg.eigvalsh(H)
        assert problem.l * (1 - 1e-9) <= float(eigenvalues[0])
        assert float(eigenvalues[-1]) <= problem.L * (1 + 1e-9)
        if name != "logistic":
            assert float(eigenvalues[0]) == pytest.approx(problem.l)
            assert float(eigenvalues[-1]) == pytest.approx(problem.L)


@pytest.mark.parametrize("shape", ["normal", "exponential"])
def test_noise(shape):
    noise = Noise(torch.tensor([0.5, 4.0]), shape)
    for t in range(2):
        e = noise.sample(t, 200_000, 3, torch.Generator().manual_seed(t))
        assert e.mean(0).abs().max() < 0.02
        assert float(e.square().sum(1).mean()) == pytest.approx(float(noise.sigma2[t]), rel=0.02)
        assert float(e.square().sum(1).square().mean()) == pytest.approx(
            float(noise.fourth(3)[t]), rel=0.1
        )
        skew = float((e**3).mean() / (e**2).mean() ** 1.5)
        assert skew == pytest.approx(2.0 if shape == "exponential" else 0.0, abs=0.1)


def test_series():
    assert torch.equal(steady(3, 2.0), torch.tensor([2.0, 2.0, 2.0]))
    series = changing(200_000, 0.5, 3.0)
    assert float(series.mean()) == pytest.approx(3.0, rel=0.02)
    assert float(series.log().std()) == pytest.approx(1.0, rel=0.02)


def test_bad_input():
    for make in (
        lambda: quadratic(l=0.0),
        lambda: ridge(mu=0.0),
        lambda: Noise(steady(3), "round"),
        lambda: Noise(-steady(3)),
    ):
        with pytest.raises(ValueError, match="varreg: "):
            make()
