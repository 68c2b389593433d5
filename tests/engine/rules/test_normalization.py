"""BatchNorm, where samples meet: refused, or the contributions to its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varreg
from tests.support.model_table import BATCH, Fn
from tests.support.small_net import backward, batch, linear
from tests.support.truth import losses


def test_batch_norm_in_training_is_refused_with_both_remedies():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(
        ValueError, match=r"'1' \(BatchNorm1d\).*GroupNorm.*batch_norm='contribution'"
    ):
        varreg.observe(model)
    model.eval()
    varreg.observe(model)
    model.train()
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\)"):
        model(torch.randn(5, 4))


def test_batch_norm_without_parameters_mixes_samples_all_the_same():
    with pytest.raises(ValueError, match="BatchNorm in training"):
        varreg.observe(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False)))


def test_batch_norm_contributions_are_the_gradients_of_a_parameter_per_sample():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, w = batch(8)
    # the truth: give every sample its own copy of every parameter, and differentiate
    copies = {
        n: p.detach().expand(8, *p.shape).clone().requires_grad_()
        for n, p in model.named_parameters()
    }
    h = torch.einsum("boi,bi->bo", copies["0.weight"], x) + copies["0.bias"]
    h = F.batch_norm(h, None, None, training=True) * copies["1.weight"] + copies["1.bias"]
    out = torch.einsum("boi,bi->bo", copies["3.weight"], torch.tanh(h)) + copies["3.bias"]
    losses(out, w).mean().backward()
    observer = varreg.observe(model, batch_norm="contribution")
    for _ in range(2):  # running statistics change between the forwards of two micro-batches
        model(x)
    backward(model, x, w)
    for name, p in model.named_parameters():
        c = copies[name].grad
        m = varreg.moments(p)
        torch.testing.assert_close(m.total, c.sum(0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(m.square, c.square().sum(0), rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(p.grad, c.sum(0), rtol=1e-9, atol=1e-12)
    assert "(contributions: samples may meet)" in repr(observer)


def test_samples_may_meet_if_contributions_are_asked_for():
    model = Fn(lambda s, x: F.normalize(s.l(x), dim=0), l=linear()).double()
    varreg.observe(model, batch_norm="contribution")
    model(torch.randn(BATCH, 3)).square().sum().backward()
    m = varreg.moments(model.l.weight)
    assert m.count == BATCH
    torch.testing.assert_close(m.total, model.l.weight.grad)
