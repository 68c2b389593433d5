"""The sums of a weight and of its bias: from one pass, and the same whichever of the two is wanted,
frozen, used twice, or comes first.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import varreg
from tests.support.measured import assert_moments, run
from tests.support.model_table import Fn, weight
from tests.support.truth import losses, one_at_a_time, sample_weights
from varreg import native
from varreg.backends import BACKENDS, TWINS, use
from varreg.engine.contribution import Bias
from varreg.few_launches import finish_squares

BATCH = 6


def frozen(module: nn.Module, name: str) -> nn.Module:
    getattr(module, name).requires_grad_(False)
    return module


MODELS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear over rows": (lambda: nn.Linear(4, 3), (5, 4)),
    "convolution": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 5, 4)),
    "depthwise convolution": (lambda: nn.Conv1d(4, 4, 3, groups=4), (4, 6)),
    "layer norm": (lambda: nn.LayerNorm(4), (5, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5)),
    "the bias is named first": (
        lambda: Fn(lambda s, x: F.linear(x, bias=s.b, weight=s.w), w=weight(3, 4), b=weight(3)),
        (4,),
    ),
    "the weight is frozen": (lambda: frozen(nn.Linear(4, 3), "weight"), (5, 4)),
    "the bias is frozen": (lambda: frozen(nn.Conv1d(4, 3, 2), "bias"), (4, 5)),
    "the weight is used twice": (
        lambda: Fn(lambda s, x: s.l(F.linear(x, s.l.weight)), l=nn.Linear(4, 4)),
        (5, 4),
    ),
    "the bias is used twice": (
        lambda: Fn(lambda s, x: s.l(x) * (1 + s.l.bias), l=nn.Linear(4, 4)),
        (5, 4),
    ),
    "the bias is used twice, first alone": (
        lambda: Fn(lambda s, x: s.l(x * s.l.bias), l=nn.Linear(4, 4)),
        (4,),
    ),
    "the weight is made of others": (
        lambda: parametrizations.weight_norm(nn.Conv1d(4, 3, 2)),
        (4, 5),
    ),
}


def truth(name: str):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x, w = make().double(), torch.randn(BATCH, *shape).double(), sample_weights(BATCH)
    return model, x, w, one_at_a_time(copy.deepcopy(model), (x,), w)


@pytest.mark.parametrize(
    "backend", [native, BACKENDS["mps"], TWINS], ids=["C", "few launches", "definition"]
)
@pytest.mark.parametrize("name", MODELS)
def test_moments_of_a_weight_and_of_its_bias(name, backend):
    model, x, w, g = truth(name)
    varreg.observe(model)
    with use("cpu", backend):
        for _ in range(2):  # the second time, the ledgers know which uses to wait for
            model.zero_grad()
            run(model, (x,), w)
            finish_squares()
            assert_moments(model, g)


@pytest.mark.parametrize("name", MODELS)
def test_groups_of_a_weight_and_of_its_bias(name):
    model, x, w, g = truth(name)
    varreg.observe(model, groups=4)  # two groups of two samples, and two of one
    run(model, (x,), w)
    for n, p in model.named_parameters():
        if p.requires_grad:
            c = g[n] / BATCH
            groups = torch.stack([c[:2].sum(0), c[2:4].sum(0), c[4], c[5]])
            sizes = torch.tensor([2.0, 2, 1, 1]).double().view(4, *[1] * p.dim())
            m = varreg.moments(p)
            torch.testing.assert_close(m.total, c.sum(0), rtol=1e-9, atol=1e-12)
            square = (groups.square() / sizes).sum(0)
            torch.testing.assert_close(m.square, square, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_totals_of_a_weight_and_of_its_bias(name, norms):
    model, x, w, g = truth(name)
    varreg.observe(model, per="tensor", norms=norms)
    for _ in range(2):
        model.zero_grad()
        run(model, (x,), w)
        for n, p in model.named_parameters():
            if p.requires_grad:
                m = varreg.moments(p)
                for found, expected in (
                    (m.total_mean_square, g[n].mean(0).square().sum()),
                    (m.total_second_moment, g[n].square().mean(0).sum()),
                ):
                    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wanted", [("weight",), ("bias",)])
@pytest.mark.parametrize("per", ["element", "model"])
def test_a_backward_for_one_of_the_two(wanted, per):
    """The other one has no gradient in this backward, and nothing is added to it."""
    model, x, w, _ = truth("linear over rows")
    varreg.observe(model, per=per)
    model.zero_grad()
    losses(model(x), w).mean().backward(inputs=[getattr(model, name) for name in wanted])
    for name, p in model.named_parameters():
        assert (varreg.moments(p) is not None) == (name in wanted)


@pytest.mark.skipif(native.status() != "in use", reason=f"native kernel: {native.status()}")
@pytest.mark.parametrize(
    ("name", "per"),
    [
        ("linear", "element"),
        ("linear over rows", "element"),
        ("linear over rows", "model"),
        ("convolution", "element"),
        ("convolution", "model"),
    ],
)
def test_one_pass_gives_the_sums_of_both(name, per, monkeypatch):
    model, x, w, _ = truth(name)

    def refuse(self):
        raise AssertionError("the bias was summed by itself")

    monkeypatch.setattr(Bias, "made", property(refuse))
    varreg.observe(model, per=per)
    run(model, (x,), w)
    assert varreg.moments(next(model.parameters())) is not None
