"""The noise scale and AdaScale over several processes: as in one. With gloo, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.parallel.test_ddp import CLOSE, bit_for_bit
from tests.support import noise_ranks
from tests.support.once import once
from tests.support.ranks import NEEDS_FSDP, launch


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def several(request, tmp_path_factory):
    name, world = f"noise-{request.param}", request.param
    return once(tmp_path_factory, name, lambda: launch(noise_ranks.together, world))


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=NEEDS_FSDP)])
def test_it_is_that_of_one_process(several, kind):
    alone = noise_ranks.trained(0, 1, "alone")
    assert 1 < max(alone["gains"]) <= 8
    for rank in several:
        assert rank[kind].keys() == alone.keys()
        torch.testing.assert_close(rank[kind], alone, **CLOSE)
    bit_for_bit([rank[kind] for rank in several])  # ranks do not drift apart


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=NEEDS_FSDP)])
def test_the_fisher_is_that_of_one_process(several, kind):
    alone = noise_ranks.fisher_of(0, 1, "alone")
    for rank in several:
        assert rank["fisher"][kind].keys() == alone.keys()
        torch.testing.assert_close(rank["fisher"][kind], alone, **CLOSE)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=NEEDS_FSDP)])
def test_the_gauges_are_those_of_one_process(several, kind):
    alone = noise_ranks.gauges_of(0, 1, "alone")
    assert any(map(math.isfinite, alone["noise_scale"]))
    for rank in several:
        found = rank["gauges"][kind]
        assert {*alone} - {*found} == ({"λ"} if kind == "fsdp" else set())
        torch.testing.assert_close(found, {name: alone[name] for name in found}, **CLOSE)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=NEEDS_FSDP)])
def test_each_rank_knows_the_norms_of_its_own_samples(several, kind):
    alone = noise_ranks.norms_of(0, 1, "alone")
    together = torch.cat([rank["norms"][kind] for rank in several], 1)
    torch.testing.assert_close(together, alone, **CLOSE)


@pytest.mark.parametrize("how", ["none", "zeros"])
def test_gradients_may_be_cleared_between_forward_and_backward(several, how):
    """Also in the second step, in whose forward DDP makes its buckets anew."""
    for rank in several:
        assert rank["cleared late"][how == "zeros"] == [{noise_ranks.B}] * noise_ranks.STEPS


def test_moments_of_one_process_alone_are_an_error(several):
    for rank in several:
        assert len(rank["said"]) == 2
        assert all("there are several processes, and the moments are" in s for s in rank["said"])
