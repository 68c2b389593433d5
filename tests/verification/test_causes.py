"""`varreg.verify`: why moments differ, and where samples part in a model."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varreg
from tests.support.model_table import Fn
from tests.support.verified import M, net, pairs, sines, with_rule
from varreg.engine.mechanisms.by_module import MODULE_RULES
from varreg.verification.parting import find_parting


class Centred(nn.Module):
    def forward(self, x):
        return x - x.detach().mean(0)


class Standard(nn.Module):
    def forward(self, x):
        return x / x.std().item()


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x) if len(x) > 1 else self.net(-x)


def written(s, x):
    """Everybody's first number, written into everybody's row."""
    h = s.net(x)
    h[:, 0] = x.detach()[:, 0].max()
    return h


def turned(s, x):
    """Time first, folded into the batch, and centred over both."""
    h = s.net(x).transpose(0, 1).flatten(0, 1)
    return s.centre(h).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


def outside(s, x):
    """NumPy is no torch function: the first operation to show it is the one that takes it in."""
    return s.net(x + float(np.max(x.numpy())))


# each with the function where samples part, its module, and what made one value of all of them
MEETINGS = {
    "detached mean": (
        Fn(lambda s, x: s.centre(s.net(x)), net=net(), centre=Centred()),
        "sub",
        "'centre' (Centred)",
        "mean",
    ),
    "item": (nn.Sequential(Standard(), net()), "div", "'0' (Standard)", "std"),
    "numpy": (Fn(outside, net=net()), "add", "the model itself (Fn)", None),
    "roll": (
        Fn(lambda s, x: s.net(x).roll(4, 0), net=net()),
        "roll",
        "the model itself (Fn)",
        None,
    ),
    "softmax": (
        Fn(lambda s, x: s.net(x).softmax(0), net=net()),
        "softmax",
        "the model itself (Fn)",
        None,
    ),
    "written": (Fn(written, net=net()), "__setitem__", "the model itself (Fn)", "max"),
    "time first": (Fn(turned, net=net(), centre=Centred()), "sub", "'centre' (Centred)", "mean"),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_where_samples_part(name):
    model, function, module, source = MEETINGS[name]
    model.double()
    x = torch.randn(M, 5, 4) if name == "time first" else torch.randn(M, 4)
    rows = x.split(1)
    found = find_parting(model, lambda i: model(x if i is None else rows[i]), M, 1e-9)
    assert found.at.function == function
    assert found.at.module == module
    assert found.at.whole[0] % M == 0
    assert found.at.single[0] * M == found.at.whole[0]
    assert (found.source and found.source.function) == source
    assert str(found).startswith(f"`{function}` in {module} (shape ")
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", [name for name in MEETINGS if name != "time first"])
def test_samples_that_meet(name):
    """Found out, or refused by the engine itself."""
    found = varreg.verify(MEETINGS[name][0].double().train(), F.cross_entropy, pairs())
    assert found.status in ("different", "refused"), str(found)
    if found.status == "different":
        assert "Samples meet in the model" in found.reason
        assert found.parting.at.function == MEETINGS[name][1]
        assert str(found.parting) in str(found)
        assert "GroupNorm" in found.advice
        assert found.outputs > 1e-3
        assert f"'{found.worst.parameter}'" in str(found)
    else:
        assert found.reason.startswith("varreg: ")


def test_samples_that_do_not_meet_part_nowhere():
    model, x = net(nn.LayerNorm(8)), torch.randn(M, 4)
    rows = x.split(1)
    assert find_parting(model, lambda i: model(x if i is None else rows[i]), M, 1e-9) is None


def test_a_model_that_does_something_else_for_one_sample():
    found = varreg.verify(Branching(), F.cross_entropy, pairs())
    assert found.status == "different"
    assert (found.parting.at.function, found.parting.instead) == ("linear", "neg")
    assert "`linear` in 'net.0' (Linear), where one sample goes on with `neg`" in str(found)


def test_a_hook_that_clips():
    """It changes what flows back, and the loss is what it should be: not taken for a
    factor of it.
    """

    def forward(s, x):
        h = s.net(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return h

    found = varreg.verify(Fn(forward, net=net()), F.cross_entropy, pairs())
    assert found.status == "different"
    assert "a hook or a backward function" in found.reason


def hook_after_forward(output, y):
    output.register_hook(lambda grad: grad - grad.mean(0))
    return F.cross_entropy(output, y)


def node_after_forward(output, y):
    output.grad_fn.register_prehook(lambda grads: (grads[0] - grads[0].mean(0),))
    return F.cross_entropy(output, y)


@pytest.mark.parametrize("loss", [hook_after_forward, node_after_forward])
def test_a_hook_put_on_after_the_forward(loss):
    found = varreg.verify(net(), loss, pairs())
    assert found.status == "different"
    assert "a hook or a backward function" in found.reason


def zero_first(h):
    h = h.clone()
    h[0] = 0
    return h


@pytest.mark.parametrize(
    "change",
    [
        zero_first,
        lambda h: h.pow(len(h)),
        lambda h: h / len(h),
        lambda h: h * torch.linspace(1, 2, M)[: len(h), None],
    ],
    ids=["first row", "power of the number", "divided by the number", "constant rows"],
)
def test_samples_by_their_number(change):
    """What no tracer can tell from what is meant: one sample alone is another function."""
    model = Fn(lambda s, x: s.out(change(s.fc(x))), fc=nn.Linear(4, 8), out=nn.Linear(8, 3))
    found = varreg.verify(model, F.cross_entropy, pairs())
    assert found.status == "different"
    assert found.parting is not None


def contrastive(z, y):
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def test_a_loss_that_mixes_samples():
    found = varreg.verify(net(), contrastive, pairs())
    assert found.status == "different"
    assert "The loss mixes samples" in found.reason
    assert found.parting is None
    assert found.outputs < 1e-12
    assert "share of the gradient" in found.advice


def per_token(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ignored_tokens(dtype):
    x, y = torch.randn(M, 5, 4, dtype=dtype), torch.randint(0, 3, (M, 5))
    model = net().to(dtype)
    assert varreg.verify(model, per_token, (x, y))
    y[::2, 2:] = -100
    found = varreg.verify(model, per_token, (x, y), samples=M)
    assert found.status == "different"
    # 2 of 2 + 5 for every two samples, times two
    assert "counts 0.571 to 1.43 times as much" in found.reason
    assert "That is exact here" in found.advice
    constant = lambda output, y: per_token(output, y) * (y >= 0).sum() / (5 * len(y))
    assert varreg.verify(model, constant, (x, y))


def test_class_weights():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    found = varreg.verify(net(), loss, pairs(), samples=M)
    assert found.status == "different"
    assert "counts 0.5 to 1.5 times as much" in found.reason
    assert "class weights" in found.reason


@pytest.mark.parametrize(("reduction", "other"), [("mean", "sum"), ("sum", "mean")])
def test_the_wrong_reduction(reduction, other):
    loss = nn.CrossEntropyLoss(reduction=other)
    found = varreg.verify(net(), loss, pairs(), reduction=reduction)
    assert found.status == "different"
    assert f"The loss is a {other} over samples" in found.reason
    assert f"Pass reduction='{other}'" in found.advice


def test_another_factor():
    loss = lambda output, y: F.cross_entropy(output, y) * len(y) ** 0.5
    found = varreg.verify(net(), loss, pairs(), samples=9)
    assert found.status == "different"
    assert "is 3 times the mean" in found.reason


def test_samples_that_are_alike_do_not_show_their_weights():
    """More samples than parameters: many weights would explain the gradient, so none is named."""
    model = nn.Linear(1, 1, bias=False)
    x, y = torch.randn(M, 1), torch.rand(M, 1)
    loss = lambda output, y: ((output - y).square() * y).sum() / y.sum()
    found = varreg.verify(model, loss, (x, y))
    assert found.status == "different"
    assert "counts" not in found.reason


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda m, dy, x: {"weight": 1.5 * dy * x}, "p.grad of '1.weight' with varreg differs"),
        (
            lambda m, dy, x: {"weight": (dy * x).mean(0).expand(len(x), -1)},
            (
                r"varreg's (second moment|variance) for '1.weight' is not the true one "
                r"\(served by: Mine"
            ),
        ),
    ],
)
def test_an_error_of_varreg(rule, words):
    """A rule that is wrong, in the gradient or in the moments alone."""
    model, kind = with_rule(rule)
    found = varreg.verify(model, sines, pairs())
    del MODULE_RULES[kind]
    assert found.status == "different"
    assert re.search(words, found.reason)
    assert "please report it" in found.advice
    rows = {row.parameter: row.gap for row in found.rows}
    assert rows.pop("1.weight") > 0.01
    assert max(rows.values()) < 1e-12
    assert str(found).count("not the same") == 2  # the heading, and the row


def test_squares_that_leave_the_range():
    """Exact in float64, but not in the precision that is used: not excused as rounding."""
    torch.set_default_dtype(torch.float32)
    loss = lambda output, y: F.cross_entropy(output, y) * 1e-22
    found = varreg.verify(net(), loss, pairs())
    model = net()
    with varreg.observe(model):
        loss(model(pairs()[0]), pairs()[1]).backward()
        there = varreg.moments(model[0].weight).second_moment.any()
    assert bool(found) == bool(there)
