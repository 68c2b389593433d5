"""Small cuts of real architectures that were once refused, or slow, though their samples never
meet.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varreg
from tests.support.judge import Case, judge
from tests.support.model_table import Fn
from varreg.engine.trace.call import Call
from varreg.engine.trace.decide import follow
from varreg.engine.trace.layout import Layout, Place
from varreg.engine.trace.trial import verdicts

BATCH = 4


def roberta(s, ids):
    """RoBERTa's token types: places that the samples choose, in a buffer of zeros."""
    types = s.types.expand(len(ids), -1).gather(1, (ids != 0).cumsum(1))
    return s.words(ids) + s.kinds(types)


def mixture(s, x):
    """`torch.distributions` broadcasts its parameters, which are of unlike shapes."""
    mean, scale = torch.broadcast_tensors(s.mean(x).view(-1, 3, 2), s.scale(x).exp()[:, :, None])
    return torch.distributions.Normal(mean, scale).log_prob(x[:, None, :2])


def crf(s, x, tags):
    """A path through a table of transitions, and the emissions on it."""
    emissions, rows = s.emit(x), torch.arange(len(x))
    score = s.start[tags[:, 0]] + emissions[rows, 0, tags[:, 0]]
    for t in range(1, x.shape[1]):
        score = score + s.table[tags[:, t - 1], tags[:, t]] + emissions[rows, t, tags[:, t]]
    return score[:, None]


def last_token(s, ids):
    """The classifiers of decoders: the logits of a sample's last token."""
    last = (ids != 0).sum(1) - 1
    return s.head(s.words(ids))[torch.arange(len(ids)), last]


def numbers(*shape, low=0, high=5):
    return lambda batch: (torch.randint(low, high, (batch, *shape)),)


def normal(*shape):
    return lambda batch: (torch.randn(batch, *shape),)


def tagged(batch):
    return torch.randn(batch, 5, 4), torch.randint(0, 3, (batch, 5))


def types():
    return nn.Buffer(torch.zeros(1, 8, dtype=torch.long))


MODELS = {
    "roberta": (
        lambda: Fn(roberta, words=nn.Embedding(5, 3), kinds=nn.Embedding(2, 3), types=types()),
        numbers(6, low=1),
    ),
    "roberta-square": (
        lambda: Fn(roberta, words=nn.Embedding(5, 3), kinds=nn.Embedding(2, 3), types=types()),
        numbers(BATCH, low=1),
    ),
    "mixture": (lambda: Fn(mixture, mean=nn.Linear(4, 6), scale=nn.Linear(4, 3)), normal(4)),
    "crf": (
        lambda: Fn(
            crf,
            emit=nn.Linear(4, 3),
            start=nn.Parameter(torch.randn(3)),
            table=nn.Parameter(torch.randn(3, 3)),
        ),
        tagged,
    ),
    "last-token": (
        lambda: Fn(last_token, words=nn.Embedding(5, 3), head=nn.Linear(3, 2)),
        numbers(6, low=1),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_exact(name):
    make, inputs = MODELS[name]
    for batch in (BATCH, 1):
        assert str(judge(Case(name, "zoo", make, inputs, "exact"), batch)) == "exact"


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

    case = Case(name, "choices", make, inputs, expect, truth="graph")
    assert judge(case, BATCH).kind == expect


@pytest.mark.parametrize("name", ["crf", "last-token", "roberta"])
def test_a_choice_costs_no_trial(name, monkeypatch):
    """A trial runs an operation a hundred times; what an index says is looked up instead, at each
    step.
    """
    make, inputs = MODELS[name]
    model, tried = make(), []
    real = verdicts.try_call
    monkeypatch.setattr(
        verdicts, "try_call", lambda op, *rest: tried.append(op.function) or real(op, *rest)
    )
    varreg.observe(model)
    model(*inputs(BATCH)).square().mean().backward()
    assert not tried


def test_a_parameter_that_goes_through_a_coarser_type():
    """Mamba adds `bias.float().to(x.dtype)`: a gradient's rounding is that of float32, and no
    gradient from outside.
    """
    torch.manual_seed(0)
    bias, weight = nn.Parameter(torch.randn(64).double()), nn.Linear(64, 64).double()
    model = Fn(lambda s, x: s.l(x) + s.bias.float().to(x.dtype)[None], l=weight, bias=bias)
    x = torch.randn(16, 64).double()
    rows = []
    for i in range(len(x)):
        one = copy.deepcopy(model)
        one(x[i : i + 1]).square().sin().sum().backward()
        rows.append(one.bias.grad)
    truth = torch.stack(rows)
    varreg.observe(model)
    (model(x).square().sin().sum() / len(x)).backward()
    m = varreg.moments(bias)
    assert torch.allclose(m.mean, truth.mean(0), rtol=1e-5, atol=1e-6)
    assert torch.allclose(m.second_moment, truth.square().mean(0), rtol=1e-5, atol=1e-6)


def test_a_forward_that_writes_into_its_inputs_is_tried_on_copies():
    """FSMT replaces -100 in the labels that it is given; a second forward must not touch what the
    first one saved.
    """

    def forward(s, x, labels):
        labels.masked_fill_(labels == -100, 0)
        scale = 1.0 if bool((x == x).all()) else 0.5  # values leave torch, so the forward is tried
        logits = s.l(x) * scale
        return -logits.log_softmax(-1).gather(1, labels[:, None])

    model = Fn(forward, l=nn.Linear(4, 3)).double()
    x, labels = torch.randn(BATCH, 4).double(), torch.tensor([0, 2, 1, 2])
    plain = copy.deepcopy(model)
    plain(x, labels.clone()).mean().backward()
    varreg.observe(model)
    version = labels._version
    F.relu(model(x, labels)).mean().backward()
    assert labels._version == version + 1
    assert torch.allclose(model.l.weight.grad, plain.l.weight.grad, rtol=1e-12)


def test_places_of_what_is_true_are_not_a_row_each():
    """Four places in a mask of four samples, as in the routing of experts; two of them are of one
    sample.
    """
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 0]]).bool()
    samples = torch.where(mask)[1]
    call = Call(torch.where, (mask,), carriers=[(mask, Layout(BATCH, 1))])
    assert not isinstance(follow(call, samples, 1), Place)
