"""Parameters that are frozen, unused, replaced, empty, or not observed at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import varreg
from tests.support.measured import assert_moments
from tests.support.model_table import Fn, weight
from tests.support.small_net import backward, batch, net, truth
from tests.support.truth import assert_close, scale_of


def test_frozen_partly_frozen_and_unused_parameters():
    model = nn.ModuleDict(
        {"a": nn.Linear(4, 4), "b": nn.Linear(4, 3), "unused": nn.Linear(4, 2)}
    ).double()
    model["a"].requires_grad_(False)
    model["b"].bias.requires_grad_(False)
    whole = Fn(lambda s, x: s.m["b"](torch.tanh(s.m["a"](x))), m=model)
    x, w = batch()
    g = truth(whole, x, w)
    observer = varreg.observe(whole)
    backward(whole, x, w)
    assert varreg.moments(model["a"].weight) is None
    assert varreg.moments(model["b"].bias) is None
    assert varreg.moments(model["unused"].weight) is None
    assert model["unused"].weight.grad is None
    scale = scale_of(g)
    assert_close(
        varreg.moments(model["b"].weight).second_moment,
        g["m.b.weight"].square().mean(0),
        scale**2,
        "b.weight",
    )
    assert [row[3] for row in observer.coverage()] == [
        "frozen",
        "frozen",
        "exact",
        "frozen",
        "exact",
        "exact",
    ]


def test_unfreezing_later():
    model = net()
    model[0].requires_grad_(False)
    x, w = batch()
    varreg.observe(model)
    backward(model, x, w)
    model.zero_grad()
    model[0].requires_grad_(True)
    g = truth(model, x, w)
    backward(model, x, w)
    assert_moments(model, g)


def test_parameters_that_came_after_observe():
    model = net()
    x, w = batch()
    varreg.observe(model)
    model.load_state_dict(
        {k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True
    )
    g = truth(model, x, w)
    backward(model, x, w)
    assert_moments(model, g)


def test_zero_size_parameter():
    model = Fn(
        lambda s, x: torch.cat([s.l(x), x @ s.none], 1), l=nn.Linear(4, 3), none=weight(4, 0)
    ).double()
    varreg.observe(model)
    model(torch.randn(5, 4)).sum().backward()
    assert varreg.moments(model.none).variance.shape == (4, 0)
    assert varreg.moments(model.l.weight).count == 5


def test_is_observed():
    model = net()
    p = model[0].weight
    assert not varreg.is_observed(p)
    with varreg.observe(model):
        assert varreg.is_observed(p)
        assert varreg.moments(p) is None  # no backward yet
        assert not varreg.is_observed(torch.zeros(2))
    assert not varreg.is_observed(p)
    with pytest.raises(ValueError, match="is_observed expects a parameter"):
        varreg.is_observed(model)
