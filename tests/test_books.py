"""The books: sums and counts since gradients were last cleared, whatever clears, reads, scales or splits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import varreg
from tests.models import Fn, weight
from tests.ranks import launch
from tests.test_conformance import assert_moments
from tests.truth import losses, one_at_a_time, sample_weights
from varreg.engine.ledger import LEDGERS

# ---- gradients that were zero, and were cleared --------------------------------------------------------------------


def gated() -> nn.Module:
    """A LoRA pair whose second factor is zero, and a gate that is zero: `down`, `inner` get zero gradients."""
    model = Fn(
        lambda s, x: s.base(x) + x @ s.down @ s.up + s.gate * s.inner(x),
        base=nn.Linear(4, 3),
        inner=nn.Linear(4, 3),
        down=weight(4, 2),
        up=nn.Parameter(torch.zeros(2, 3)),
        gate=nn.Parameter(torch.zeros(1)),
    )
    return model.double()


def zero_grad(model):
    model.zero_grad(set_to_none=False)


def zero_each(model):
    for p in model.parameters():
        p.grad.zero_()


def zero_foreach(model):
    torch._foreach_zero_([p.grad for p in model.parameters()])


def replace(model):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def replace_after_none(model):
    """The new zeros may lie where the old gradient did, and have its version."""
    for p in model.parameters():
        p.grad = None
        p.grad = torch.zeros_like(p)


CLEARS = [zero_grad, zero_each, zero_foreach, replace, replace_after_none]


@pytest.mark.parametrize("clear", CLEARS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
def test_cleared_gradients_that_were_zero(clear, read):
    model = gated()
    varreg.observe(model)
    for n in (5, 7, 6):
        x, w = torch.randn(n, 4), sample_weights(n)
        g = one_at_a_time(copy.deepcopy(model), (x,), w)
        losses(model(x), w).mean().backward()
        assert_moments(model, g)
        assert not varreg.moments(model.down).variance.any()
        clear(model)
        if read:
            assert all(varreg.moments(p) is None for p in model.parameters())


def test_zeros_that_were_there_before_the_first_backward():
    model = gated()
    replace(model)
    varreg.observe(model)
    x, w = torch.randn(5, 4), sample_weights(5)
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    losses(model(x), w).mean().backward()
    assert_moments(model, g)
    zero_grad(model)
    outside = sum(100 * p.sum() for p in model.parameters())
    with pytest.raises(RuntimeError, match="received a gradient from outside"):
        (losses(model(x), w).mean() + outside).backward()


@pytest.mark.parametrize("buffer", ["own", "shared"])
def test_zero_gradients_accumulate(buffer):
    """Nothing writes between micro-batches. In one buffer for all gradients, a write to one counts as a write to all."""
    model = gated()
    if buffer == "shared":
        parameters = list(model.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view(p.shape)
    varreg.observe(model)
    x, w = torch.randn(9, 4), sample_weights(9)
    for _ in range(2):
        g = one_at_a_time(copy.deepcopy(model), (x,), w)
        for part in (slice(0, 2), slice(2, 5), slice(5, 9)):
            (losses(model(x[part]), w[part]).sum() / 9).backward()
        assert_moments(model, g)
        zero_grad(model)


@pytest.mark.parametrize("clip", [False, True], ids=["as is", "clipped"])
def test_a_step_takes_zero_gradients_that_were_clipped_as_measured(clip):
    """Clipping writes zeros over zeros. The variance of momentum decays all the same."""
    model = gated()
    varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.0, momentum=0.9)
    model.up.data.normal_()
    found = []
    for t in range(3):
        optimizer.zero_grad(set_to_none=False)
        losses(model(torch.randn(6, 4)), sample_weights(6)).mean().backward()
        if clip:
            clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        found.append(optimizer.state[model.down]["vr_variance"].clone())
        if t == 0:
            model.up.data.zero_()
    torch.testing.assert_close(found[1], found[0] * 0.81)
    torch.testing.assert_close(found[2], found[0] * 0.81**2)


def several(rank: int, world: int, how: str):
    """Counts of all parameters, when gradients are cleared by zeros, and when they are not."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = gated()
    if how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        net = model
    else:
        net = DistributedDataParallel(model, gradient_as_bucket_view=how == "ddp views")
    varreg.observe(model)
    found = []
    for step in range(4):
        for _ in range(2):
            losses(net(torch.randn(3, 4)), sample_weights(3)).mean().backward()
            found.append({(None if (m := varreg.moments(p)) is None else m.count) for p in model.parameters()})
        if step != 1:
            zero_grad(model)
            found.append({varreg.moments(p) for p in model.parameters()})
    return found


@pytest.mark.parametrize("how", ["ddp", "ddp views", "fsdp"])
def test_cleared_gradients_that_were_zero_among_processes(how):
    each = [{6}, {12}, {None}]
    for found in launch(several, 2, how):
        assert found == [*each, {6}, {12}, {18}, {24}, {None}, *each]


# ---- moments that a user keeps -------------------------------------------------------------------------------------


def values(m) -> list:
    found = [m.count, m.groups, m.total, m.square, m.mean, m.second_moment, m.variance, m.rho]
    return [v.clone() if isinstance(v, torch.Tensor) else v for v in found]


@pytest.mark.parametrize("groups", [None, 2])
def test_moments_that_are_kept_stay_what_they_were(groups):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    varreg.observe(model, groups=groups)
    kept = []
    for n in (5, 4, 6):
        losses(model(torch.randn(n, 4)), sample_weights(n)).mean().backward()
        kept += [(m, values(m)) for p in model.parameters() if (m := varreg.moments(p)) is not None]
    clip_grad_norm_(model.parameters(), 1e-3)
    model.zero_grad(set_to_none=False)
    losses(model(torch.randn(6, 4)), sample_weights(6)).mean().backward()
    assert len(kept) == 12
    for m, before in kept:
        torch.testing.assert_close(values(m), before, rtol=0, atol=0)


def test_sums_that_nobody_keeps_are_added_to_in_place():
    model = nn.Linear(4, 3).double()
    varreg.observe(model)
    places = set()
    for n in range(2, 5):
        model(torch.randn(n, 4)).square().mean().backward()
        places.add(LEDGERS[model.weight].square.data_ptr())
    assert len(places) == 1
    assert varreg.moments(model.weight).count == 9
    held = varreg.moments(model.weight).square
    model(torch.randn(3, 4)).square().mean().backward()
    assert held.data_ptr() in places
    assert LEDGERS[model.weight].square.data_ptr() not in places
