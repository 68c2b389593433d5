"""The ablations take out of λ what they say, and nothing else."""

from __future__ import annotations

import pytest
import torch

import varreg
from varreg.lab.optimizers import OPTIMIZERS, build
from varreg.lab.optimizers.ablations import ABLATIONS, ablated


def trained(cls, steps=5, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    optimizer = cls(model.parameters(), lr=0.05, **options)
    varreg.observe(model)
    for step in range(steps):
        before = [p.detach().clone() for p in model.parameters()]
        torch.manual_seed(step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            model(torch.randn(16, 6)), torch.randint(0, 2, (16,))
        ).backward()
        optimizer.step()
    return optimizer, list(model.parameters()), before


@pytest.mark.parametrize("per", ["element", "tensor", "model"])
def test_mean(per):
    """One λ for all: of the first step, which is 1, and the second, which begins at the same place
    for both; and the step is SGD's times it.
    """
    plain, params, _ = trained(varreg.VRSGD, 2, per=per)
    mean, own, before = trained(ablated(varreg.VRSGD, "mean"), 2, per=per)
    lams = [plain.lambda_of(p) for p in params]
    squares = [p.grad.square() for p in params]
    second = float(
        sum((lam * s).sum() for lam, s in zip(lams, squares, strict=True))
        / sum(s.sum() for s in squares)
    )
    assert abs(second - 1) > 1e-3
    expected = (1 + second) / 2
    for p, x in zip(own, before, strict=True):
        assert (
            float(mean.lambda_of(p).min())
            == float(mean.lambda_of(p).max())
            == pytest.approx(expected, rel=1e-12)
        )
        torch.testing.assert_close(p.detach(), x - 0.05 * expected * p.grad, rtol=1e-10, atol=1e-14)


def test_shuffled():
    plain, params, _ = trained(varreg.VRSGD, 2)
    shuffled, own, before = trained(ablated(varreg.VRSGD, "shuffled"), 2)
    for p, q, x in zip(params, own, before, strict=True):
        a, b = plain.lambda_of(p).flatten(), shuffled.lambda_of(q).flatten()
        assert torch.equal(a.sort().values, b.sort().values)
        assert len(a) < 5 or not torch.equal(a, b)
        torch.testing.assert_close(
            q.detach(), x - 0.05 * b.view_as(q) * q.grad, rtol=1e-10, atol=1e-14
        )


def test_shuffled_per_tensor():
    """One λ for a parameter: parameters change places."""
    plain, params, _ = trained(varreg.VRSGD, 2, per="tensor")
    shuffled, own, before = trained(ablated(varreg.VRSGD, "shuffled"), 2, per="tensor")
    a, b = ([float(o.lambda_of(p)) for p in ps] for o, ps in ((plain, params), (shuffled, own)))
    assert sorted(a) == sorted(b)
    assert a != b
    for q, x, lam in zip(own, before, b, strict=True):
        torch.testing.assert_close(q.detach(), x - 0.05 * lam * q.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("how", ABLATIONS)
@pytest.mark.parametrize("name", [name for name, entry in OPTIMIZERS.items() if entry.regularized])
def test_history_is_that_of_the_optimizer_itself(name, how):
    """λ is computed as ever before it is replaced: after one step, where nothing was replaced by
    anything else than 1, states agree.
    """
    cls = OPTIMIZERS[name].cls
    plain, params, _ = trained(cls, 1)
    other, own, _ = trained(ablated(cls, how), 1)
    states = [each.state_dict()["state"] for each in (plain, other)]
    for i, (p, q) in enumerate(zip(params, own, strict=True)):
        torch.testing.assert_close(q.detach(), p.detach(), rtol=1e-12, atol=0)
        for key, value in states[0][i].items():
            torch.testing.assert_close(states[1][i][key], value)


def test_only_regularized_optimizers_have_them():
    p = [torch.nn.Parameter(torch.zeros(2))]
    assert type(build("VRAdam", p, 0.1, {"ablation": "mean"})).__name__ == "VRAdam_mean"
    with pytest.raises(ValueError, match="SGD has no ablation='mean'"):
        build("SGD", p, 0.1, {"ablation": "mean"})
    with pytest.raises(ValueError, match="regularized optimizers have: mean, shuffled"):
        build("VRSGD", p, 0.1, {"ablation": "men"})
