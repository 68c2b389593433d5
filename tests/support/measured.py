"""Prepare, run and measure a model of the table, and compare its moments with the truth."""

from __future__ import annotations

import copy

import torch
from torch.utils._pytree import tree_leaves

import varreg
from tests.support.model_table import BATCH, Case
from tests.support.truth import (
    Gradients,
    assert_close,
    by_graph,
    losses,
    one_at_a_time,
    sample_weights,
    scale_of,
)


def prepared(case: Case):
    torch.manual_seed(1)
    model, inputs = case.make().double(), case.inputs()
    return model, inputs, sample_weights(BATCH)


_TRUTHS: dict[str, tuple[list[torch.Tensor], Gradients]] = {}
"""The gradients of single samples of a case, with the tensors from which they were computed."""


def truth_of(case: Case, model, inputs, weights) -> Gradients:
    """Return the truth of a case, computed on a copy, with the random state that the observed model
    will have. It is kept, since each property needs the same; nobody may write to it.
    """
    made_of = [*model.parameters(), *model.buffers(), *tree_leaves(inputs), weights]
    kept, g = _TRUTHS.get(case.name, ([], {}))
    if len(kept) == len(made_of) and all(map(torch.equal, kept, made_of)):
        return g
    kept = [t.detach().clone() for t in made_of]
    if case.random:
        torch.manual_seed(2)
        g = by_graph(copy.deepcopy(model), inputs, weights)
    else:
        g = one_at_a_time(copy.deepcopy(model), inputs, weights)
    _TRUTHS[case.name] = kept, g
    return g


def run(model, inputs, weights, scale: float = 1.0) -> torch.Tensor:
    torch.manual_seed(2)
    loss = losses(model(*inputs), weights).mean() * scale
    loss.backward()
    return loss


def assert_moments(model, g: Gradients, rtol: float = 1e-9) -> None:
    scale = scale_of(g)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert varreg.moments(p) is None
            continue
        m, expected = varreg.moments(p), g[name]
        if m is None:
            assert not expected.any(), f"{name} was not observed"
            continue
        assert m.count == len(expected)
        assert_close(m.mean, expected.mean(0), scale, f"{name}: mean", rtol)
        assert_close(
            m.second_moment, expected.square().mean(0), scale**2, f"{name}: second moment", rtol
        )
        assert_close(m.variance, expected.var(0, correction=0), scale**2, f"{name}: variance", rtol)
        assert (m.variance >= 0).all()
