"""Several processes with DistributedDataParallel: the moments of the global batch, the parameters
of one process. With gloo, in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import varreg
from tests.support import ranks
from tests.support.once import once
from tests.support.ranks import B, data, launch, model

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def several(request, tmp_path_factory):
    return once(
        tmp_path_factory, f"ranks-{request.param}", lambda: launch(ranks.together, request.param)
    )


def same(a, b) -> None:
    torch.testing.assert_close(a, b, **CLOSE)


def bit_for_bit(found: list) -> None:
    """All ranks have the same."""
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["exact", "groups"])
def test_every_optimizer_ends_where_one_process_does(alone, several, kind):
    for rank in several:
        assert rank[kind].keys() <= alone[kind].keys()
        assert len(rank[kind]) == (17 if len(several) == 2 else 6 if kind == "exact" else 1)
        for case, parameters in rank[kind].items():
            torch.testing.assert_close(
                parameters, alone[kind][case], **CLOSE, msg=lambda m, case=case: f"{case}: {m}"
            )
    bit_for_bit([rank[kind] for rank in several])


def test_however_it_is_wrapped(alone, several):
    for rank in several:
        for way, parameters in rank["ways"].items():
            torch.testing.assert_close(
                parameters, alone["ways"]["plain"], **CLOSE, msg=lambda m, way=way: f"{way}: {m}"
            )


def test_moments_are_those_of_the_global_batch(alone, several):
    for rank in several:
        same(rank["moments"], alone["moments"])
    assert alone["moments"][0][0][0] == B


def test_accumulation(alone, several):
    for rank in several:
        same(rank["accumulated"], alone["accumulated"])
    assert alone["accumulated"][0][1][0][0] == 4 * B


def test_unused_parameters(alone, several):
    for rank in several:
        same(rank["unused"], alone["unused"])


def test_uneven_batches_weighted_by_samples(alone, several):
    for rank in several:
        same(rank["uneven"], alone["uneven"])


def truth(parts, divisor, branch=lambda r: True, parameters=()):
    """Σc and Σc² of every parameter, one sample at a time: sample i of rank r contributes
    g_i/(m_r·divisor) to the gradient.
    """
    net = model()
    for p, value in zip(net.parameters(), parameters):
        p.data.copy_(value)
    total = [torch.zeros_like(p) for p in net.parameters()]
    square = [torch.zeros_like(p) for p in net.parameters()]
    for r, (x, y) in enumerate(parts):
        for i in range(len(y)):
            net.zero_grad()
            cross_entropy(net(x[i : i + 1], branch(r)), y[i : i + 1]).backward()
            for j, p in enumerate(net.parameters()):
                if p.grad is not None:
                    c = p.grad / (len(y) * divisor)
                    total[j] += c
                    square[j] += c.square()
    return total, square


def test_uneven_batches_as_ddp_averages_them(several):
    """Each rank's samples weigh as much as the rank does: contributions to what DDP makes
    of them.
    """
    world = len(several)
    x, y = data(0)
    parts = [(x[:3], y[:3]), *[(x[3:], y[3:])] * (world - 1)]
    total, square = truth(parts, world)
    for rank in several:
        for found, t, w in zip(rank["rank weighted"], total, square):
            if found is not None:
                assert found[0] == sum(len(y) for _, y in parts)
                same(found[2:], (t, w))


def test_a_branch_that_only_some_ranks_take(several):
    """The others' samples count, and contribute nothing. Parameters stay the same on all ranks,
    clipped by value or not.
    """
    world = len(several)
    parts = [ranks.share(0, r, world) for r in range(world)]
    total, square = truth(parts, world, lambda r: r < world // 2)
    for rank in several:
        for found, t, w in zip(rank["unused on some"][1][0], total, square):
            if found is not None:
                assert found[0] == B
                same(found[2:], (t, w))
    assert (
        sum(found is not None for found in several[0]["unused on some"][1][0]) == len(total) - 1
    )  # all but the frozen one
    bit_for_bit([rank["unused on some"] for rank in several])


@pytest.mark.parametrize("by_initial", [True, False])
def test_join(several, by_initial):
    """Ranks run out of data one by one. No hang; and every step's moments are those of the ranks
    that are left, as DDP averages them.
    """
    world = len(several)
    last = several[-1]["joined"][by_initial][1]
    assert len(last) == 4 + 3 * (world - 1)
    for t, (found, gradients, parameters) in enumerate(last):
        left = [r for r in range(world) if t < 4 + 3 * r]
        parts = [ranks.share(t, r, world) for r in left]
        total, square = truth(parts, world if by_initial else len(left), parameters=parameters)
        for f, a, b in zip(found, total, square):
            if f is not None:
                assert f[0] == len(left) * B // world
                same(f[2:], (a, b))
        same([f[2] for f in found if f is not None], gradients)
        for r in left:
            torch.testing.assert_close(
                several[r]["joined"][by_initial][1][t], last[t], rtol=0, atol=0
            )
    bit_for_bit(
        [rank["joined"][by_initial][0] for rank in several]
    )  # DDP hands the last one's parameters to all


def test_hooks(several):
    world = len(several)
    total, square = truth([ranks.share(0, r, world) for r in range(world)], world)
    for rank in several:
        found, called = rank["hooks"]["beside"]
        assert set(called) == {"mine"}
        for f, again, t, w in zip(found, rank["hooks"]["again"], total, square):
            if f is not None:
                same(f[2:], (t, w))
                same(again[2:], (t, w))
        none, gradients = rank["hooks"]["removed"]
        assert none == [None] * len(total)
        same(gradients, [t for t, f in zip(total, found) if f is not None])
        assert "varreg.distributed.register_comm_hook" in rank["hooks"]["before"]


def test_odd_ones(alone, several):
    """Channels-last weights, several observers in one model, more groups than a rank has samples;
    and remove() lets go.
    """
    parameters, found, _ = alone["odd"]
    for rank in several:
        same(rank["odd"][0][:4], parameters[:4])  # the head's groups are others than in one process
        same(rank["odd"][1][:4], found[:4])
        assert rank["odd"][1][4][:2] == (B, B)
        assert rank["odd"][2], "the observer is kept alive"
    bit_for_bit([rank["odd"][:2] for rank in several])


def test_a_part_that_goes_out_of_use_on_one_rank(several):
    """Ranks stay together, and count the same samples."""
    bit_for_bit([rank["late"] for rank in several])
    assert {count for counts in several[0]["late"][1] for count in counts} == {B}


def test_join_of_a_rank_without_any_batch(several):
    bit_for_bit([rank["no batch"] for rank in several])


def test_without_ddp_it_is_an_error(several):
    for rank in several:
        message, unchanged = rank["outside"]
        assert "parameters would drift apart" in message
        assert "DistributedDataParallel or fully_shard" in message
        assert unchanged
        assert "not in no_sync" in rank["not synchronised"]


def test_a_single_process_needs_no_process_group():
    assert not torch.distributed.is_initialized()
    net = model()
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1)
    cross_entropy(net(data(0)[0]), data(0)[1]).backward()
    optimizer.step()
    assert optimizer.lambda_of(next(net.parameters())) is not None


def one_rank(rank, world):
    ddp = torch.nn.parallel.DistributedDataParallel(model())
    varreg.observe(ddp)
    optimizer = varreg.VRSGD(ddp.parameters(), lr=0.1)
    cross_entropy(ddp(data(0)[0]), data(0)[1]).backward()
    optimizer.step()
    return ranks.state(ddp), ranks.sums(ddp)


def test_a_group_of_one():
    net = model()
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1)
    cross_entropy(net(data(0)[0]), data(0)[1]).backward()
    optimizer.step()
    (found,) = launch(one_rank, 1)
    same(found, (ranks.state(net), ranks.sums(net)))


def test_register_comm_hook_wants_ddp():
    with pytest.raises(ValueError, match="expects a DistributedDataParallel"):
        varreg.distributed.register_comm_hook(model(), None, None)
