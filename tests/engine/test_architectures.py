"""Small cuts of real architectures: exact, and without trials of functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import varreg
from tests.support.judge import Case, judge
from tests.support.model_table import Fn
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
