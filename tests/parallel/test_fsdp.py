"""Parameters sharded by `fully_shard` (FSDP2): moments follow the gradient's sharding, and all ends
where one process does. With gloo, in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import varreg
from tests.parallel.test_ddp import CLOSE, same
from tests.support import ranks
from tests.support import sharded_ranks as shards
from tests.support.once import once
from tests.support.ranks import NEEDS_FSDP, B, data, launch, model

pytestmark = NEEDS_FSDP


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def several(request, tmp_path_factory):
    return once(
        tmp_path_factory, f"shards-{request.param}", lambda: launch(shards.together, request.param)
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return once(tmp_path_factory, "shards-2", lambda: launch(shards.together, 2))


@pytest.mark.parametrize("kind", ["exact", "groups"])
def test_every_optimizer_ends_where_one_process_does(alone, two, kind):
    # λ per tensor, per model and calibrated among them
    assert len(two[0][kind]) == (10 if kind == "exact" else 5)
    same_ends(alone, two, kind)


def test_some_optimizers_end_where_one_process_does(alone, several):
    assert len(several[0]["exact"]) >= 4
    same_ends(alone, several, "exact")


def same_ends(alone, several, kind) -> None:
    for rank in several:
        for case, parameters in rank[kind].items():
            torch.testing.assert_close(
                parameters, alone[kind][case], **CLOSE, msg=lambda m, case=case: f"{case}: {m}"
            )


@pytest.mark.parametrize("order", ["plain", "before"])
def test_observed_before_or_after(alone, two, order):
    for rank in two:
        same(rank[order], alone["ways"]["plain"])


def test_moments_are_those_of_the_global_batch(alone, several):
    for rank in several:
        same(rank["moments"], alone["moments"])


def test_accumulation(alone, several):
    for rank in several:
        same(rank["accumulated"], alone["accumulated"])


def test_what_is_said(several):
    net = model()
    observer = varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1)
    x, y = data(0)
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    row = observer.summary().model
    for rank in several:
        said = rank["said"]
        same(said["λ"], optimizer.lambda_of(net.first.weight))
        assert said["sharded"]
        assert "sharded" in said["repr"]
        assert said["summary"] == pytest.approx((row.grad_norm, row.trace, B))
        assert said["own"] == said["local"]
        assert "a mesh of one dimension" in said["mesh"]
        assert "Observe the module that was given to fully_shard" in said["part"]
        assert "changed element by element" in said["clipped"]


def test_rounding_is_not_taken_for_clipping_by_value(two):
    assert all(0.5 < rank["wide"] < 3 for rank in two)


def test_cleared_by_zeros(two):
    """With the foreach kernels, which leave no trace on a sharded gradient; a branch goes unused in
    the second micro-batch.
    """
    net = model()
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1, foreach=True)
    for t in range(4):
        x, y = data(t)
        optimizer.zero_grad(set_to_none=False)
        cross_entropy(net(x), y).backward()
        (cross_entropy(net(x, False), y) / 2).backward()
        found = ranks.sums(net)
        optimizer.step()
    for rank in two:
        same(rank["cleared"], (ranks.state(net), found))


def test_half_precision(two):
    """Against the whole batch in bfloat16 on one process, where the same numbers are rounded
    elsewhere: to a few times its precision, 2^−8.
    """
    net = model().to(torch.bfloat16)
    varreg.observe(net)
    x, y = data(0)
    cross_entropy(net(x.to(torch.bfloat16)), y).backward()
    for rank in two:
        found, dtypes = rank["half"]
        assert set(dtypes.values()) == {torch.float32}
        for p, f in zip(net.parameters(), found):
            m = varreg.moments(p)
            if m is not None:
                assert f[2].dtype == f[3].dtype == torch.float32
                assert (f[3] - m.square).norm() < 0.03 * m.square.norm()


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_four(tmp_path, world):
    undisturbed = launch(
        shards.checkpoint, 2, str(tmp_path)
    )  # saves after half of the steps, and goes on
    for rank in launch(shards.checkpoint, world, str(tmp_path), True):
        same(rank, undisturbed[0])
