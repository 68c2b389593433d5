"""The related methods, each against its paper's formula written out, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from varreg.errors import VarregError
from varreg.lab.optimizers.baselines import MSVAG, SVRG, DoG, LDoG, LossSGD

STEPS = 12


def problem():
    """Least squares with known gradients: two parameters, 40 samples."""
    torch.manual_seed(3)
    return (
        torch.randn(40, 5),
        torch.randn(40),
        [torch.randn(5, requires_grad=True), torch.randn((), requires_grad=True)],
    )


def gradient(x, y, params):
    w, b = params
    residual = x @ w + b - y
    return [2 * (x.T @ residual) / len(y), 2 * residual.mean()]


def closure(optimizer, x, y, params):
    def evaluate():
        optimizer.zero_grad()
        loss = (x @ params[0] + params[1] - y).square().mean()
        loss.backward()
        return loss

    return evaluate


def batches(x, y):
    for step in range(STEPS):
        index = torch.randperm(40, generator=torch.Generator().manual_seed(step))[:8]
        yield x[index], y[index]


def test_svrg():
    x, y, params = problem()
    reference = [p.detach().clone() for p in params]
    optimizer = SVRG(params, lr=0.05)
    for step, (bx, by) in enumerate(batches(x, y)):
        if step % 5 == 0:
            optimizer.snapshot(closure(optimizer, x, y, params))
            snapshot, mu = [r.clone() for r in reference], gradient(x, y, reference)
        loss = optimizer.step(closure(optimizer, bx, by, params))
        assert loss.item() == pytest.approx(
            float((bx @ reference[0] + reference[1] - by).square().mean()), rel=1e-10
        )
        here, there = gradient(bx, by, reference), gradient(bx, by, snapshot)
        reference = [
            r - 0.05 * (a - b + m) for r, a, b, m in zip(reference, here, there, mu, strict=True)
        ]
        for p, r in zip(params, reference, strict=True):
            torch.testing.assert_close(p.detach(), r, rtol=1e-10, atol=1e-12)


def test_svrg_needs_a_snapshot_and_a_closure():
    _, _, params = problem()
    with pytest.raises(ValueError, match="snapshot"):
        SVRG(params).step(lambda: None)
    with pytest.raises(ValueError, match="closure"):
        SVRG(params).step()


@pytest.mark.parametrize("beta", [0.9, 0.5])
def test_msvag(beta):
    """Algorithm 2 of the paper, with all sums over the past written out."""
    x, y, params = problem()
    reference = [p.detach().clone() for p in params]
    optimizer = MSVAG(params, lr=0.05, beta=beta)
    past: list[list[torch.Tensor]] = [[], []]
    for t, (bx, by) in enumerate(batches(x, y)):
        optimizer.step(closure(optimizer, bx, by, params))
        for i, g in enumerate(gradient(bx, by, reference)):
            past[i].append(g)
            weights = [(1 - beta) * beta ** (t - k) / (1 - beta ** (t + 1)) for k in range(t + 1)]
            m = sum(w * g for w, g in zip(weights, past[i], strict=True))
            v = sum(w * g.square() for w, g in zip(weights, past[i], strict=True))
            rho = sum(
                w**2 for w in weights
            )  # the variance of a weighted mean of independent terms of variance 1
            s = (v - m**2) / (1 - rho) if t else torch.zeros_like(m)
            reference[i] = reference[i] - 0.05 * m**2 / (m**2 + rho * s) * m
        for p, r in zip(params, reference, strict=True):
            torch.testing.assert_close(p.detach(), r, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cls", [DoG, LDoG])
def test_dog(cls):
    x, y, params = problem()
    optimizer = cls(params, reps_rel=0.01)
    blocks = [[0, 1]] if cls is DoG else [[0], [1]]
    start = [p.detach().clone() for p in params]
    reference = [p.clone() for p in start]
    norm = lambda tensors: math.sqrt(sum(float(t.square().sum()) for t in tensors))
    path: list[list[torch.Tensor]] = []
    squares = dict.fromkeys(range(2), 0.0)
    for bx, by in batches(x, y):
        optimizer.step(closure(optimizer, bx, by, params))
        path.append(reference)
        g = gradient(bx, by, reference)
        after = list(reference)
        for block in blocks:
            squares[block[0]] += norm([g[i] for i in block]) ** 2
            reach = max(norm([at[i] - start[i] for i in block]) for at in path)
            reach = max(reach, 0.01 * (1 + norm([start[i] for i in block])))
            for i in block:
                after[i] = reference[i] - reach / math.sqrt(squares[block[0]] + 1e-8) * g[i]
        reference = after
        for p, r in zip(params, reference, strict=True):
            torch.testing.assert_close(p.detach(), r, rtol=1e-9, atol=1e-12)


def test_svrg_at_its_snapshot_takes_the_full_gradient():
    """With the same batch, and the same dropout in both of its gradients, they cancel."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(5, 1))
    x, y, _ = problem()
    optimizer = SVRG(model.parameters(), lr=1.0)

    def evaluate():
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        return loss

    optimizer.snapshot(evaluate)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(evaluate)
    for p, b in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(b - p.detach(), optimizer.state[p]["mu"], rtol=1e-10, atol=1e-12)


def test_the_average_of_dog():
    x, y, params = problem()
    optimizer = DoG(params, reps_rel=0.01)
    average = None
    for t, (bx, by) in enumerate(batches(x, y), 1):
        optimizer.step(closure(optimizer, bx, by, params))
        w = 9 / (t + 8)
        average = [
            p.detach().clone() if average is None else (1 - w) * a + w * p.detach()
            for p, a in zip(params, average or params, strict=True)
        ]
    last = [p.detach().clone() for p in params]
    optimizer.swap_average()
    for p, a in zip(params, average, strict=True):
        torch.testing.assert_close(p.detach(), a, rtol=1e-10, atol=1e-12)
    optimizer.swap_average()
    assert all(torch.equal(p.detach(), x) for p, x in zip(params, last, strict=True))


def test_bad_arguments():
    _, _, params = problem()
    for make in (
        lambda: SVRG(params, -1.0),
        lambda: MSVAG(params, 0.1, 1.0),
        lambda: DoG(params, reps_rel=0),
        lambda: DoG(params, per="row"),
    ):
        with pytest.raises(ValueError, match="varreg: "):
            make()


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_lambda_from_the_loss(power):
    """Against the formula, over all past losses."""
    x, past = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True), []
    optimizer = LossSGD([x], lr=0.1, s=3.0, power=power)
    for scale in (1.0, 4.0, 0.5):

        def closure(scale=scale):
            optimizer.zero_grad()
            loss = scale * x.square().sum()
            loss.backward()
            return loss

        loss = scale * float(x.detach().square().sum())
        past.append(loss**power)
        average = len(past) / sum(1 / rho for rho in past)
        lam = (1 + 3) / (1 + 3 * past[-1] / average)
        expected = x.detach() - 0.1 * lam * 2 * scale * x.detach()
        assert optimizer.step(closure).item() == pytest.approx(loss)
        torch.testing.assert_close(x.detach(), expected, rtol=1e-12, atol=0)
    with pytest.raises(VarregError, match="needs a closure"):
        optimizer.step()
    with pytest.raises(VarregError, match="s must be at least 0"):
        LossSGD([x], lr=0.1, s=-1.0)
