"""Every model of the table has every property: exact moments, and a model that is otherwise
untouched.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._pytree import tree_map

import varreg
from tests.support.measured import assert_moments, prepared, run, truth_of
from tests.support.model_table import BATCH, CASES
from tests.support.truth import (
    assert_close,
    by_vmap,
    losses,
    scale_of,
)

pytestmark = pytest.mark.sampled(4)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
each_repeatable_case = pytest.mark.parametrize(
    "case", [c for c in CASES if not c.random], ids=lambda c: c.name
)


@each_case
def test_moments_are_those_of_single_samples(case):
    model, inputs, weights = prepared(case)
    g = truth_of(case, model, inputs, weights)
    varreg.observe(model)
    run(model, inputs, weights)
    assert_moments(model, g)


@pytest.mark.parametrize("case", [c for c in CASES if c.vmap], ids=lambda c: c.name)
def test_moments_agree_with_vmap(case):
    model, inputs, weights = prepared(case)
    g = by_vmap(copy.deepcopy(model), inputs, weights)
    varreg.observe(model)
    run(model, inputs, weights)
    assert_moments(model, g)


@each_case
def test_the_model_is_untouched(case):
    model, inputs, weights = prepared(case)
    plain = copy.deepcopy(model)
    before = {k: v.clone() for k, v in plain.state_dict().items()}
    torch.manual_seed(2)
    expected = plain(*inputs)
    run(plain, inputs, weights)
    observer = varreg.observe(model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    torch.manual_seed(2)
    actual = model(*inputs)
    tree_map(
        lambda a, b: None if a is None else torch.testing.assert_close(a, b, rtol=0, atol=0),
        actual,
        expected,
    )
    assert all(
        "_varreg_where" not in t.__dict__
        for t in (*inputs, *(actual if isinstance(actual, tuple) else (actual,)))
        if t is not None
    )
    del actual
    run(model, inputs, weights)
    scale = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert_close(p.grad, q.grad, scale, f"{name}.grad", 1e-12)
            assert p.grad.dtype == q.grad.dtype
    assert repr(observer).count("\n") == 2 + len(list(model.named_parameters()))


@each_case
def test_contributions_sum_to_the_gradient(case):
    model, inputs, weights = prepared(case)
    varreg.observe(model)
    run(model, inputs, weights)
    for p in model.parameters():
        if (m := varreg.moments(p)) is not None:
            torch.testing.assert_close(m.total, p.grad, rtol=1e-12, atol=1e-14)


@each_repeatable_case
def test_permuting_the_batch_changes_nothing(case):
    model, inputs, weights = prepared(case)
    g = truth_of(case, model, inputs, weights)
    order = torch.randperm(BATCH)
    varreg.observe(model)
    run(model, tree_map(lambda t: t[order], inputs), weights[order])
    assert_moments(model, g)


@each_repeatable_case
def test_doubling_the_batch_leaves_the_moments(case):
    model, inputs, weights = prepared(case)
    g = truth_of(case, model, inputs, weights)
    varreg.observe(model)
    run(model, tree_map(lambda t: torch.cat([t, t]), inputs), torch.cat([weights, weights]))
    assert_moments(model, {n: torch.cat([v, v]) for n, v in g.items()})


@each_case
def test_scaling_the_loss_leaves_rho(case):
    model, inputs, weights = prepared(case)
    other = copy.deepcopy(model)
    varreg.observe(model), varreg.observe(other)
    run(model, inputs, weights)
    run(other, inputs, weights, scale=8.0)  # a power of two: exact in floating point
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        a, b = varreg.moments(p), varreg.moments(q)
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(b.second_moment, 64 * a.second_moment)
            assert torch.equal(b.rho.nan_to_num(-1), a.rho.nan_to_num(-1))


@each_repeatable_case
@pytest.mark.parametrize("k", [2, 3, BATCH])
def test_groups_estimate_the_variance_from_group_means(case, k):
    model, inputs, weights = prepared(case)
    g = truth_of(case, model, inputs, weights)
    scale = scale_of(g)
    varreg.observe(model, groups=k)
    run(model, inputs, weights)
    for name, p in model.named_parameters():
        m = varreg.moments(p)
        if m is None:
            continue
        groups = g[name].tensor_split(k)
        n = torch.tensor([len(c) for c in groups])
        means = torch.stack([c.mean(0) for c in groups])
        spread = (means - g[name].mean(0)).square() * n.view(-1, *[1] * (means.dim() - 1))
        variance = (
            spread.sum(0) / (k - 1) * (BATCH - 1) / BATCH
        )  # an unbiased σ², then the paper's v² = (m−1)/m σ²
        assert m.groups == k
        assert_close(m.variance, variance, scale**2, f"{name}: variance from {k} groups")
        assert_close(m.mean, g[name].mean(0), scale, f"{name}: mean")
        assert_close(
            m.second_moment, variance + g[name].mean(0).square(), scale**2, f"{name}: second moment"
        )


@each_repeatable_case
def test_uneven_micro_batches_equal_the_one_big_batch(case):
    model, inputs, weights = prepared(case)
    g = truth_of(case, model, inputs, weights)
    varreg.observe(model)
    for part in (slice(0, 1), slice(1, 5), slice(5, BATCH)):
        (
            losses(model(*tree_map(lambda t, part=part: t[part], inputs)), weights[part]).sum()
            / BATCH
        ).backward()
    assert_moments(model, g)


@each_repeatable_case
def test_a_summed_loss(case):
    model, inputs, weights = prepared(case)
    g = truth_of(case, model, inputs, weights)
    varreg.observe(model, reduction="sum")
    losses(model(*inputs), weights).sum().backward()
    assert_moments(model, g)
