"""Where inputs carry the batch: batches of one sample and of none, time before the batch; and
outputs without samples.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import varreg
from tests.support.measured import assert_moments
from tests.support.model_table import Fn, weight
from tests.support.small_net import backward, batch, linear, net, truth


def test_batch_of_one():
    model = net()
    x, w = batch(1)
    g = truth(model, x, w)
    varreg.observe(model)
    backward(model, x, w)
    assert_moments(model, g)
    assert not varreg.moments(model[0].weight).variance.any()


def test_empty_batch_updates_nothing():
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 4), nn.PReLU()
    ).double()
    varreg.observe(model)
    model(torch.randn(0, 2, 3, 3)).sum().backward()
    assert all(varreg.moments(p) is None for p in model.parameters())
    model(torch.randn(5, 2, 3, 3)).sum().backward()
    assert {varreg.moments(p).count for p in model.parameters()} == {5}


def test_an_output_made_of_parameters_alone_is_refused_if_it_is_used():
    model = Fn(lambda s, x: (s.l(x), s.w.softmax(0)), l=nn.Linear(4, 2), w=weight(3)).double()
    varreg.observe(model)
    y, p = model(torch.randn(5, 4))
    y.sum().backward()
    y, p = model(torch.randn(5, 4))
    with pytest.raises(RuntimeError, match=r"of shape \(3,\), was made of parameters alone"):
        (y.sum() + p.log().sum()).backward()


def test_samples_inside_of_a_dimension_beside_as_many_rows_are_refused():
    """With batch_dim=1, rows of dimension 0 are taken for samples where there are as many."""
    model = Fn(lambda s, x: s.l(x.T).T.contiguous().view(2, 4), l=linear(4, 4))
    varreg.observe(model, batch_dim=1)
    y = model(torch.randn(4, 2))
    with pytest.raises(varreg.VarregError, match="as many rows in dimension 0"):
        y.square().sum(1).mean().backward()


def test_time_first_with_as_many_steps_as_samples_is_exact():
    model = Fn(lambda s, x: s.l(x), l=linear(4, 4))
    varreg.observe(model, batch_dim=1)
    model(torch.randn(3, 3, 4)).square().mean().backward()
    assert varreg.moments(model.l.weight).count == 3


@pytest.mark.parametrize("norms", [False, True])
def test_an_empty_batch_is_no_sample(norms):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2))
    observer = varreg.observe(model, norms=norms)
    for n in (0, 3):
        model(torch.randint(0, 5, (n, 3))).sum().backward()
    assert all(varreg.moments(p).count == 3 for p in model.parameters())
    if norms:
        assert len(observer.norms().values) == 3
