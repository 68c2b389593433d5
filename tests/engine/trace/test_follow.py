"""Functions that the tracer knows: it follows a batch that is moved, folded or chosen from."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import varreg
from tests.support import judge as judged
from tests.support.measured import assert_moments, prepared, run, truth_of
from tests.support.model_table import BATCH, Case, Fn, ids, normal, weight
from tests.support.small_net import linear
from varreg.engine.trace.call import Call
from varreg.engine.trace.decide import follow
from varreg.engine.trace.layout import Layout, Place


def dispatched(s, x):
    """Samples are sorted, served, and put back."""
    order = torch.arange(x.shape[0]).flip(0)
    y = s.a(x).index_select(0, order)
    return s.b(y).index_select(0, order)


def filled(s, x):
    """Time steps are written into a buffer whose first dimension is time."""
    out = torch.zeros(x.shape[1], x.shape[0], 3)
    for t in range(x.shape[1]):
        out[t] = x[:, t]
    return s.l(out).transpose(0, 1)


def reentrant(s, x):
    """One module is checkpointed twice, with the batch in different places."""

    def ck(h):
        return checkpoint(s.k, h, use_reentrant=True)

    return ck(ck(s.l(x)).transpose(0, 1)).transpose(0, 1)


EXACT = [
    Case(
        "positions-as-many-as-samples-expanded",
        lambda: Fn(
            lambda s, x: x[:, None] * s.q.expand(BATCH, -1) * torch.arange(1.0, BATCH + 1)[:, None],
            q=weight(1, 3),
        ),
        normal(3),
    ),
    Case(
        "expanded-over-another-dimension",
        lambda: Fn(
            lambda s, x: (
                s.l(x.expand(BATCH, *x.shape)) * torch.arange(1.0, BATCH + 1)[:, None, None]
            ).transpose(0, 1),
            l=linear(),
        ),
        normal(3),
    ),
    Case(
        "repeated-over-another-dimension",
        lambda: Fn(
            lambda s, x: (
                s.l(x.repeat(BATCH, 1, 1)) * torch.arange(1.0, BATCH + 1)[:, None, None]
            ).transpose(0, 1),
            l=linear(),
        ),
        normal(3),
    ),
    Case("written-time-first", lambda: Fn(filled, l=linear()), normal(BATCH, 3)),
    Case(
        "cell-folded",
        lambda: Fn(lambda s, x: s.r(x.flatten(0, 1)).view(x.shape), r=nn.GRUCell(3, 3)),
        normal(5, 3),
    ),
    Case(
        "lstm-folded",
        lambda: Fn(
            lambda s, x: s.r(x.flatten(0, 1))[0].view(x.shape), r=nn.LSTM(3, 3, batch_first=True)
        ),
        normal(2, 5, 3),
    ),
    Case(
        "bags-folded",
        lambda: Fn(
            lambda s, i: s.l(s.e(i.flatten(0, 1))).view(len(i), -1),
            e=nn.EmbeddingBag(7, 3),
            l=linear(3, 1),
        ),
        ids(2, 4, high=7),
    ),
    Case(
        "bilinear-with-a-parameter",
        lambda: Fn(
            lambda s, x: s.b(x, s.q * torch.ones(len(x), 1)), b=nn.Bilinear(3, 3, 2), q=weight(1, 3)
        ),
        normal(3),
    ),
    Case(
        "batched-weights",
        lambda: Fn(
            lambda s, x: torch.bmm(x, (s.a @ s.b).expand(len(x), -1, -1)),
            a=weight(3, 2),
            b=weight(2, 4),
        ),
        normal(5, 3),
    ),
    Case(
        "detached-parameter",
        lambda: Fn(
            lambda s, x: s.l(x) * s.p.detach() + F.linear(x, s.l.weight.data),
            l=linear(),
            p=weight(3),
        ),
        normal(3),
    ),
    Case(
        "constants-like-the-input",
        lambda: Fn(
            lambda s, x: s.l(x * s.pe.to(x) + s.pe.type_as(x) @ x.new_ones(3, 3).tril()),
            l=linear(),
            pe=weight(3),
        ),
        normal(3),
    ),
    Case(
        "ids-time-first",
        lambda: Fn(lambda s, i: s.l(s.e(i.t())).transpose(0, 1), e=nn.Embedding(7, 3), l=linear()),
        ids(5, high=7),
    ),
    Case(
        "keyword-arguments",
        lambda: Fn(
            lambda s, x: torch.layer_norm(
                torch.mm(x, mat2=s.w), (3,), s.g, s.b, 1e-5, cudnn_enable=False
            ),
            w=weight(3, 3),
            g=weight(3),
            b=weight(3),
        ),
        normal(3),
    ),
    Case(
        "in-place-with-a-parameter",
        lambda: Fn(
            lambda s, x: s.l(x).addcmul_(s.p, s.p).lerp_(s.p, 0.3).masked_fill_(x > 1, 0.5),
            l=linear(),
            p=weight(3),
        ),
        normal(3),
    ),
    Case(
        "lookup-changed-in-place",
        lambda: Fn(
            lambda s, i: s.e(i) + s.p(torch.arange(5)).mul_(2.0),
            e=nn.Embedding(7, 3),
            p=nn.Embedding(9, 3),
        ),
        ids(5, high=7),
    ),
    Case(
        "flipped-and-back",
        lambda: Fn(lambda s, x: s.l(s.l(x).flip(0).tanh()).flip(0), l=linear()),
        normal(3),
    ),
    Case("sorted-and-put-back", lambda: Fn(dispatched, a=linear(), b=linear()), normal(3)),
    Case("reentrant-two-layouts", lambda: Fn(reentrant, l=linear(), k=linear()), normal(BATCH, 3)),
    Case(
        "one-sample-anywhere",
        lambda: Fn(
            lambda s, x: s.k(x.t().unsqueeze(0).permute(2, 0, 1).squeeze(1)), k=linear(4, 2)
        ),
        normal(4),
    ),
]


@pytest.mark.parametrize("batch", [BATCH, 1, 2])
@pytest.mark.parametrize("case", EXACT, ids=lambda c: c.name)
def test_exact(case, batch):
    model, inputs, weights = prepared(case)
    inputs, weights = tuple(t[:batch] for t in inputs), weights[:batch]
    if batch != BATCH and case.name.startswith(("positions", "expanded", "repeated", "reentrant")):
        pytest.skip("the sizes are made for the full batch")
    plain = copy.deepcopy(model)
    g = truth_of(case, model, inputs, weights)
    varreg.observe(model)
    run(model, inputs, weights)
    run(plain, inputs, weights)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    assert_moments(model, g)


SAMPLES = 4  # of a choice, which is among four features

CHOICES = {
    "index-select": (lambda h, i: h.index_select(1, i[0] * 0 + torch.arange(4)), "refused"),
    "gather": (lambda h, i: h.gather(1, i), "exact"),
    "gather-negative-dim": (lambda h, i: torch.gather(h, dim=-1, index=i), "exact"),
    "gather-of-others": (lambda h, i: h.gather(0, i), "refused"),
    "pairs": (lambda h, i: h[torch.arange(len(h))[:, None], i], "exact"),
    "pairs-after-ellipsis": (lambda h, i: h[:, None][torch.arange(len(h)), ..., i[:, 0]], "exact"),
    "pairs-between-slices": (
        lambda h, i: h[:, None, :, None][torch.arange(len(h)), :, i[:, 0], None],
        "exact",
    ),
    "pairs-with-others": (lambda h, i: h[torch.arange(len(h)).flip(0), i[:, 0], None], "refused"),
    "columns-of-everybody": (lambda h, i: h[:, i[:, 0]], "refused"),
    "rows-of-others": (lambda h, i: h[i[:, 0]], "refused"),
    "constants": (
        lambda h, i: h * torch.linspace(0, 1, 4).expand(len(h), 4).gather(1, i),
        "exact",
    ),
    "constants-that-are-alike": (lambda h, i: h + torch.ones(4)[i], "exact"),
    "constants-of-others": (
        lambda h, i: h * torch.linspace(0, 1, 4)[i].t()[: h.shape[0], : h.shape[1]],
        "refused",
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_whose_choice_it_is_is_known(name):
    """As many features as samples, so that shapes tell nothing."""
    choose, expect = CHOICES[name]

    def inputs(batch):
        return torch.randn(batch, 4), torch.stack([torch.randperm(4) for _ in range(batch)])

    def forward(s, x, i):
        return s.out(choose(s.l(x), i).flatten(1).sum(-1, keepdim=True))

    def make():
        return Fn(forward, l=nn.Linear(4, 4), out=nn.Linear(1, 2))

    case = judged.Case(name, "choices", make, inputs, expect, truth="graph")
    assert judged.judge(case, SAMPLES).kind == expect


def test_places_of_what_is_true_are_not_a_row_each():
    """Four places in a mask of four samples, as in the routing of experts; two of them are of one
    sample.
    """
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 0]]).bool()
    samples = torch.where(mask)[1]
    call = Call(torch.where, (mask,), carriers=[(mask, Layout(SAMPLES, 1))])
    assert not isinstance(follow(call, samples, 1), Place)
