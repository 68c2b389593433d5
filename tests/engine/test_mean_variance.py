"""`Moments` of gradients that are zero, alike, in half precision, scaled, or not finite."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import varreg
from tests.support.small_net import backward, batch, net
from tests.support.truth import losses, one_at_a_time, sample_weights


def test_a_mean_gradient_of_zero():
    model = nn.Linear(1, 1, bias=False).double()
    varreg.observe(model)
    model(torch.tensor([[1.0], [-1.0]])).mean().backward()
    m = varreg.moments(model.weight)
    assert m.mean.item() == 0
    assert m.variance.item() == 1
    assert m.rho.item() == torch.inf


def test_variance_is_never_negative():
    model = nn.Linear(3, 2).float()
    varreg.observe(model)
    x = torch.full((50, 3), 1e4, dtype=torch.float32) + 1e-3 * torch.randn(
        50, 3, dtype=torch.float32
    )
    model(x).sum(1).mean().backward()
    assert (varreg.moments(model.weight).variance >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_squares_in_float32(dtype):
    model = nn.Linear(2, 1, bias=False, dtype=dtype)
    varreg.observe(model, reduction="sum")
    model(torch.tensor([[300.0, 1.0], [300.0, 3.0]], dtype=dtype)).sum().backward()
    m = varreg.moments(model.weight)
    assert m.second_moment.dtype == torch.float32
    assert m.second_moment.tolist() == [[90000.0, 5.0]]  # 300² is inf in float16
    assert model.weight.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).float()
    x, w = torch.randn(6, 1, 5, 5, dtype=torch.float32), sample_weights(6).float()
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    varreg.observe(model)
    with torch.autocast("cpu", dtype):
        out = model(x)
    assert out.dtype == dtype
    losses(out.float(), w).mean().backward()
    for name, p in model.named_parameters():
        m = varreg.moments(p)
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(
            m.second_moment,
            g[name].square().mean(0),
            rtol=0.1,
            atol=0.02 * float(g[name].square().mean(0).max()),
        )


def test_a_loss_scale_leaves_rho():
    model = net()
    x, w = batch()
    varreg.observe(model)
    backward(model, x, w)
    before = [varreg.moments(p).rho for p in model.parameters()]
    model.zero_grad()
    backward(model, x, w, scale=65536.0)
    for a, p in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(varreg.moments(p).rho, a, rtol=1e-12, atol=0)


def test_nan_in_a_gradient_is_there_to_be_seen():
    model = net()
    varreg.observe(model)
    (model(torch.randn(3, 4)) * torch.nan).sum().backward()
    assert torch.isnan(varreg.moments(model[0].weight).variance).all()
