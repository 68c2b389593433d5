"""Every model of the table: the sums over elements that `per="model"` keeps are those of the
definition, and the model is otherwise untouched.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._pytree import tree_map

import varreg
from tests.support.measured import prepared, run, truth_of
from tests.support.model_table import BATCH, CASES
from tests.support.truth import assert_close
from varreg.backends import TWINS, use

pytestmark = pytest.mark.sampled(4)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
each_repeatable_case = pytest.mark.parametrize(
    "case", [c for c in CASES if not c.random], ids=lambda c: c.name
)


def assert_totals(model, g, rtol: float = 1e-9) -> None:
    scale = max(float(v.square().sum()) for v in g.values() if v.numel())
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert varreg.moments(p) is None
            continue
        m, expected = varreg.moments(p), g[name]
        if m is None:
            assert not expected.any(), f"{name} was not observed"
            continue
        assert isinstance(m, varreg.Totals)
        assert (m.count, m.groups, m.shape) == (len(expected), len(expected), p.shape)
        mean, second = expected.mean(0).square().sum(), expected.square().mean(0).sum()
        variance = expected.var(0, correction=0).sum()
        assert_close(m.total_mean_square, mean, scale, f"{name}: mean", rtol)
        assert_close(m.total_second_moment, second, scale, f"{name}: second moment", rtol)
        assert_close(m.total_variance, variance, scale, f"{name}: variance", rtol)
        assert m.total_variance >= 0


@each_case
def test_totals_are_those_of_single_samples(case):
    model, inputs, weights = prepared(case)
    g = truth_of(case, model, inputs, weights)
    varreg.observe(model, per="model")
    for _ in range(2):  # the first compares p.grad with S, and the second does not keep S
        model.zero_grad()
        run(model, inputs, weights)
        assert_totals(model, g)


@each_case
def test_totals_without_native_code(case):
    model, inputs, weights = prepared(case)
    g = truth_of(case, model, inputs, weights)
    varreg.observe(model, per="tensor")
    with use("cpu", TWINS):
        run(model, inputs, weights)
    assert_totals(model, g)


@each_case
def test_gradients_are_those_of_a_plain_model(case):
    model, inputs, weights = prepared(case)
    plain = copy.deepcopy(model)
    varreg.observe(model, per="model")
    for m in (model, plain):
        for _ in range(2):
            m.zero_grad()
            run(m, inputs, weights)
    scale = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert_close(p.grad, q.grad, scale, f"{name}.grad", 1e-12)
            assert p.grad.dtype == q.grad.dtype


@each_repeatable_case
def test_totals_add_up_over_micro_batches(case):
    model, inputs, weights = prepared(case)
    g = truth_of(case, model, inputs, weights)
    varreg.observe(model, per="model")
    for part in (slice(0, 3), slice(3, BATCH)):
        share = (part.stop - part.start) / BATCH
        run(model, tree_map(lambda t, s=part: t[s], inputs), weights[part], scale=share)
    assert_totals(model, g)


@each_case
def test_norms_come_with_totals(case):
    model, inputs, weights = prepared(case)
    g = truth_of(case, model, inputs, weights)
    observer = varreg.observe(model, per="model", norms=True)
    run(model, inputs, weights)
    assert_totals(model, g)
    expected = sum(v.reshape(len(v), -1).square().sum(1) for v in g.values()).sqrt()
    torch.testing.assert_close(observer.norms().values, expected, rtol=1e-8, atol=1e-12)
