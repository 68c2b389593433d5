"""`varreg.verify`: models that are refused, and models whose moments cannot be verified."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import varreg
from tests.support.model_table import Fn
from tests.support.verified import M, net, pairs, sines, with_rule
from varreg.engine.mechanisms.by_module import MODULE_RULES


def test_refused():
    found = varreg.verify(net(nn.BatchNorm1d(8)), F.cross_entropy, pairs())
    assert found.status == "refused"
    assert not found
    assert found.reason.startswith("varreg: '1' (BatchNorm1d) is BatchNorm in training")
    assert str(found).startswith("varreg.verify: refused.\nvarreg: '1' (BatchNorm1d)")
    assert not found.rows
    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    found = varreg.verify(sparse, sines, (torch.randint(0, 5, (M, 2)), torch.zeros(M)))
    assert found.status == "refused"
    assert "sparse=True" in found.reason


def test_refused_in_forward():
    model = Fn(lambda s, x: s.b(s.a(x).cumsum(0)), a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    found = varreg.verify(model, F.cross_entropy, pairs())
    assert found.status == "refused"
    assert found.reason.startswith("varreg: in ")
    assert not _get_current_function_mode_stack()


def test_refused_in_training_alone():
    """The engine repeats a call that has no rule, which gives other numbers where it drops some."""

    def forward(s, x):
        q = s.q.expand(len(x), -1, -1) + x[:, None]
        return F.scaled_dot_product_attention(
            q, s.k, s.k, dropout_p=s.p if s.training else 0.0
        ).sum(1)

    model = Fn(forward, q=nn.Parameter(torch.randn(3, 4)), k=nn.Parameter(torch.randn(5, 4)))
    for model.p in (0.5, 0.0):
        expected = "verified"
        try:
            with varreg.observe(model):
                F.cross_entropy(model(pairs()[0]), pairs()[1]).backward()
        except (RuntimeError, ValueError):
            expected = "refused"
        model.zero_grad()
        assert varreg.verify(model, F.cross_entropy, pairs()).status == expected
    assert expected == "verified"


def test_errors_under_varreg():
    def rule(module, dy, x):
        raise KeyError("weight")

    model, kind = with_rule(rule)
    found = varreg.verify(model, sines, pairs())
    del MODULE_RULES[kind]
    assert found.status == "refused"
    assert "fails with it (KeyError: 'weight')" in found.reason
    assert "please report it" in found.advice


RANDOM = {
    "torch": (lambda s, x: s.net(x + torch.randn_like(x)), "`randn_like`"),
    "python": (lambda s, x: s.net(x * random.random()), "other than by dropout."),
    "skipped": (lambda s, x: s.net(x) if float(torch.rand(())) < 0.3 else s.net(2 * x), "`rand`"),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_models(name):
    forward, words = RANDOM[name]
    found = varreg.verify(Fn(forward, net=net()), F.cross_entropy, pairs())
    assert found.status == "unknown"
    assert words in found.reason
    assert str(found).startswith("varreg.verify: cannot be verified.\nThe model or its loss draws")


def test_random_loss():
    loss = lambda output, y: F.cross_entropy(output + torch.rand(3), y)
    assert varreg.verify(net(), loss, pairs()).status == "unknown"


def test_a_batch_of_one():
    x, y = pairs()
    found = varreg.verify(net(), F.cross_entropy, (x[:1], y[:1]))
    assert (found.status, found.rows) == ("unknown", ())
    assert "one sample" in found.reason


def test_contributions():
    found = varreg.verify(
        net(nn.BatchNorm1d(8)), F.cross_entropy, pairs(), batch_norm="contribution"
    )
    assert found.status == "unknown"
    assert "shares" in found.reason


def test_a_model_that_needs_several_samples():
    model = Fn(lambda s, x: s.net(x).view(2, -1).view(len(x), 3), net=net())
    found = varreg.verify(model, F.cross_entropy, pairs())
    assert found.status in ("unknown", "refused")
    if found.status == "unknown":
        assert "fails on sample 0 alone (RuntimeError: shape '[2, -1]' is invalid" in found.reason


def test_a_model_for_one_size_of_batch():
    model = Fn(lambda s, x: s.net(x).view(M, 3), net=net())
    found = varreg.verify(model, F.cross_entropy, pairs())
    assert found.status == "unknown"
    assert "fails on 8 samples of the batch of 12 (RuntimeError" in found.reason
    assert "samples=12" in found.advice


def test_numbers_that_are_not_finite():
    x, y = pairs()
    loss = lambda output, y: F.cross_entropy(output, y, ignore_index=0)
    found = varreg.verify(net(), loss, (x, y), samples=M)
    assert found.status == "unknown"
    assert "The loss of sample 0 alone is nan." in found.reason
    x[3] = float("inf")
    found = varreg.verify(net(), F.cross_entropy, (x, y), samples=M)
    assert found.status == "unknown"
    assert "the batch" in found.reason
    root = Fn(lambda s, x: s.l(x).abs().sqrt(), l=nn.Linear(4, 3))
    nn.init.zeros_(root.l.weight)
    nn.init.zeros_(root.l.bias)
    found = varreg.verify(root, F.cross_entropy, pairs())
    assert found.status == "unknown"
    assert "The gradient of the batch for 'l.weight' is not finite" in found.reason
