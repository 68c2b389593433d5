"""Rules that users register for their modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import varreg
from tests.support.measured import assert_moments
from tests.support.model_table import weight
from tests.support.small_net import linear
from tests.support.truth import assert_close, losses, one_at_a_time, sample_weights, scale_of


def test_a_registered_rule_for_a_module_with_submodules_is_refused(monkeypatch):
    monkeypatch.setattr("varreg.engine.mechanisms.by_module.MODULE_RULES", {})

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.w = linear(), weight(3)

        def forward(self, x):
            return self.inner(x) * self.w

    varreg.register_rule(Outer)(lambda module, dy, x: {"w": dy})
    model = Outer().double()
    varreg.observe(model)
    with pytest.raises(ValueError, match="it has submodules with parameters"):
        model(torch.randn(4, 3))


def backward(model, x, w):
    losses(model(x), w).mean().backward()


class Hidden(torch.autograd.Function):
    """x·w, out of the engine's sight."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy * w, (dy * x).sum(0)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = weight(3)

    def forward(self, x):
        return Hidden.apply(x, self.weight)


@pytest.fixture
def registry(monkeypatch):
    rules = {}
    monkeypatch.setattr("varreg.engine.mechanisms.by_module.MODULE_RULES", rules)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("groups", [None, 3])
def test_a_registered_rule_serves_a_module_that_hides_its_operation(groups):
    @varreg.register_rule(Scale)
    def rule(module, dy, x):
        return {"weight": dy * x}

    model = nn.Sequential(nn.Linear(4, 3), Scale(), nn.Tanh(), Scale()).double()
    x, w = torch.randn(6, 4), sample_weights(6)
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    observer = varreg.observe(model, groups=groups)
    backward(model, x, w)
    if groups is None:
        assert_moments(model, g)
    assert_close(model[1].weight.grad, g["1.weight"].mean(0), scale_of(g), "grad")
    assert isinstance(model[1].weight, nn.Parameter)
    assert "Scale (registered)" in repr(observer)


@pytest.mark.usefixtures("registry")
def test_a_rule_that_returns_the_wrong_shape():
    @varreg.register_rule(Scale)
    def rule(module, dy, x):
        return {"weight": (dy * x).sum(0)}

    model = Scale().double()
    varreg.observe(model)
    with pytest.raises(
        ValueError, match=r"the rule for Scale must return 'weight' of shape \(5, 3\), got \(3,\)"
    ):
        model(torch.randn(5, 3)).sum().backward()


@pytest.mark.usefixtures("registry")
def test_register_rule_expects_a_module_type_and_a_function():
    with pytest.raises(ValueError, match=r"expects a subclass of torch\.nn\.Module, got"):
        varreg.register_rule(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="register_rule expects a function"):
        varreg.register_rule(Scale)(3)


@pytest.mark.usefixtures("registry")
def test_without_a_rule_a_hidden_use_is_noticed():
    model = nn.Sequential(nn.Linear(4, 3), Scale()).double()
    observer = varreg.observe(model)
    with pytest.warns(
        UserWarning, match=r"'1\.weight': there is a gradient and there are no moments"
    ):
        backward(model, torch.randn(6, 4), sample_weights(6))
    assert varreg.moments(model[1].weight) is None
    assert varreg.moments(model[0].weight) is not None
    assert "1.weight" in repr(observer)
