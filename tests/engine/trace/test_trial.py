"""Trials of functions that are not known: none passes by chance, however few samples there are and
whatever values they have.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varreg
from tests.support.model_table import BATCH, Fn
from tests.support.small_net import linear
from varreg.engine.trace.call import Call
from varreg.engine.trace.layout import Layout, Owners, Ragged
from varreg.engine.trace.trial.trial_values import Verdict, samples_in
from varreg.engine.trace.trial.try_call import try_call, try_sum


def before(t):
    """The sample before each one; the first has itself."""
    return torch.cat([t[:1], t[:-1]])


MIXING = {
    "sort": lambda t: t.sort(0)[0],
    "sort-descending": lambda t: t.sort(0, descending=True)[0],
    "msort": torch.msort,
    "gather-by-order": lambda t: t.gather(0, t.argsort(0)),
    "index-by-order": lambda t: t[t.flatten(1).sum(1).argsort()],
    "topk": lambda t: t.topk(len(t), 0)[0],
    "cummax": lambda t: t.cummax(0)[0],
    "cummin": lambda t: t.cummin(0)[0],
    "kthvalue": lambda t: t.kthvalue(1, 0)[0].expand_as(t),
    "median": lambda t: t.median(0)[0].expand_as(t),
    "unique": lambda t: torch.unique(t, dim=0, return_inverse=True)[1][:, None] * t,
    "rank": lambda t: t * (t[:, None] < t[None]).sum(1),
    "searchsorted": lambda t: t + torch.searchsorted(t.flatten().sort()[0], t),
    "larger-of-two": lambda t: torch.maximum(t, before(t)),
    "a-little-of-the-larger": lambda t: t + 1e-3 * torch.relu(before(t) - t),
    "clipped-together": lambda t: t / t.norm().clamp(min=20.0),
    "a-limit-for-all": lambda t: t + torch.relu(t.amax(0) - 3),
    "a-branch-for-all": lambda t: t if bool((t > 0).all()) else t.flip(0),
}
APART = {
    "sort": lambda t: t.sort(1)[0],
    "cummax": lambda t: t.cummax(1)[0],
    "softmax": lambda t: t.softmax(1),
    "clipped": lambda t: t / t.norm(dim=1, keepdim=True).clamp(min=20.0),
    "rounded": lambda t: t.round(),
}


def values(kind: str, batch: int) -> torch.Tensor:
    x = torch.randn(batch, 2)
    if kind == "alike":
        return x[:1].expand(x.shape).contiguous()
    return {"any": x, "in order": x.sort(0)[0], "zero": torch.zeros_like(x)}[kind]


def tried(function, x) -> Verdict:
    place = Layout(len(x))
    return try_call(Call(function, (x,), {}, carriers=[(x, place)]), place, 0)


@pytest.mark.parametrize("kind", ["any", "alike", "in order", "zero"])
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("name", MIXING)
def test_no_function_that_mixes_samples_passes(name, batch, kind):
    for seed in range(8):
        torch.manual_seed(seed)
        assert tried(MIXING[name], values(kind, batch)) is not Verdict.APART


@pytest.mark.parametrize("kind", ["any", "alike", "in order", "zero"])
@pytest.mark.parametrize("name", APART)
def test_a_function_that_keeps_samples_apart_passes(name, kind):
    torch.manual_seed(0)
    assert tried(APART[name], values(kind, 2)) is Verdict.APART


@pytest.mark.parametrize(
    "function",
    [
        lambda t: (t[0] - t[1]).pow(3).sum(),
        lambda t: (t[0] - t[1]).tanh().sum(),
        lambda t: (t[0] * t[1].exp() - t[1] * t[0].exp()).sum(),
    ],
)
def test_what_changes_its_sign_with_the_order_is_no_sum(function):
    """Values of the other sample do not show it: L(a, b) + L(b, a) = L(a, a) + L(b, b) = 0."""
    x = torch.randn(2, 3)
    assert not try_sum(Call(function, (x,), {}, carriers=[(x, Layout(2))]), 0)


def test_a_mask_as_long_as_the_batch_may_change():
    def attend(s, x):
        return F.scaled_dot_product_attention(s.l(x)[None], x[None], x[None], attn_mask=s.mask)[0]

    model = Fn(attend, l=linear(4, 4))
    varreg.observe(model)
    model.mask = torch.eye(BATCH).bool()
    for _ in range(3):
        model(torch.randn(BATCH, 4)).sum().backward()
    model.mask = torch.ones(BATCH, BATCH).bool()
    with pytest.raises(varreg.VarregError, match="mixes samples"):
        model(torch.randn(BATCH, 4))


def test_a_trial_leaves_gradients_alone():
    """A backward of the user's that writes to `p.grad` runs in a trial, too: without a trace."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.w = w
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            ctx.w.grad.add_(1.0)
            return grad, None

    model = Fn(lambda s, x: s.m(Writes.apply(s.l(x), s.w)), l=linear(4, 4), m=linear(4, 4))
    model.w = nn.Parameter(torch.zeros(2))
    varreg.observe(model)
    model.w.grad = kept = torch.zeros(2)
    with pytest.warns(UserWarning, match="'w': there is a gradient and there are no moments"):
        model(torch.randn(BATCH, 4)).sum().backward()
    assert model.w.grad is kept
    assert model.w.grad.tolist() == [1.0, 1.0]


def test_rows_of_no_sample_are_tried_without_a_crash():
    """A trial may choose values for which an index picks nothing."""
    at = Ragged(2, 0, Owners(torch.tensor([])))
    for shape in ((0,), (0, 3)):
        assert samples_in(torch.ones(shape, dtype=torch.bool), at).tolist() == [False, False]


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
    x, labels = torch.randn(4, 4).double(), torch.tensor([0, 2, 1, 2])
    plain = copy.deepcopy(model)
    plain(x, labels.clone()).mean().backward()
    varreg.observe(model)
    version = labels._version
    F.relu(model(x, labels)).mean().backward()
    assert labels._version == version + 1
    assert torch.allclose(model.l.weight.grad, plain.l.weight.grad, rtol=1e-12)
