"""Trials of functions that are not known: none passes by chance, however few samples there are and
whatever values they have.
"""

from __future__ import annotations

import pytest
import torch

from varreg.engine.trace.call import Call
from varreg.engine.trace.layout import Layout
from varreg.engine.trace.trial.trial_values import Verdict
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
