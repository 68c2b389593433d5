"""Gradients that are cleared in every possible way, and gradients that are clipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import varreg
from tests.support.measured import assert_moments
from tests.support.small_net import backward, batch, linear, net, truth
from tests.support.truth import sample_weights


def clear_optimizer(model):
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()


def clear_optimizer_zeros(model):
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False)


def clear_model(model):
    model.zero_grad()


def clear_by_hand(model):
    for p in model.parameters():
        p.grad = None


def clear_in_place(model):
    for p in model.parameters():
        p.grad.zero_()


def clear_new_zeros(model):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


@pytest.mark.parametrize(
    "clear",
    [
        clear_optimizer,
        clear_optimizer_zeros,
        clear_model,
        clear_by_hand,
        clear_in_place,
        clear_new_zeros,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
def test_moments_restart_when_gradients_are_cleared(clear, read):
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    backward(model, torch.randn(9, 4), sample_weights(9))
    clear(model)
    if read:
        assert all(varreg.moments(p) is None for p in model.parameters())
    backward(model, x, w)
    assert_moments(model, g)


@pytest.mark.parametrize(
    "clip",
    [lambda p: clip_grad_norm_(p, 1e-3), lambda p: clip_grad_value_(p, 1e-3)],
    ids=["norm", "value"],
)
def test_clipping_leaves_the_moments(clip):
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    backward(model, x, w)
    clip(model.parameters())
    assert_moments(model, g)
    assert max(p.grad.abs().max() for p in model.parameters()) <= 1e-3


def test_gradients_that_are_zero_are_not_taken_for_cleared():
    model = nn.Linear(4, 1).double()
    varreg.observe(model)
    (model(torch.randn(3, 4)) * 0).sum().backward()
    (model(torch.randn(3, 4)) * 0).sum().backward()
    assert varreg.moments(model.weight).count == 6
    assert not varreg.moments(model.weight).variance.any()


@pytest.mark.parametrize(
    "clear",
    [
        lambda p: p.grad.data.zero_(),
        lambda p: p.grad.numpy().fill(0),
        lambda p: setattr(p, "grad", torch.empty_like(p).zero_()),
        lambda p: setattr(p, "grad", p.grad.clone().zero_()),
    ],
    ids=["data", "numpy", "new", "clone"],
)
def test_zeros_by_the_back_door_clear_too(clear):
    model = linear().double()
    varreg.observe(model)
    for _ in range(2):
        model(torch.randn(4, 3)).square().mean().backward()
        assert varreg.moments(model.weight).count == 4
        for p in model.parameters():
            clear(p)
