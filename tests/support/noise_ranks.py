"""The functions that each process of the tests of the noise scale and AdaScale runs."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

import varreg
from tests.support.ranks import B, model, share, state, whole, wrapped
from tests.support.sharded_ranks import backward_in_parts, distributed, error_of
from varreg import _torch

STEPS, PARTS = 4, 2


def trained(rank: int, world: int, kind: str):
    """Train with AdaScale around SGD and two micro-batches to a step, and measure both noise
    scales. It also runs in one process: the ranks are compared with that.
    """
    net = model()
    outer = distributed(net, world, kind)
    observer = varreg.observe(net)
    noise, l1 = varreg.NoiseScale(observer), varreg.NoiseScale(observer, l1=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    ada, gains = varreg.AdaScale(optimizer, base_batch=3), []
    for t in range(STEPS):
        optimizer.zero_grad()
        parts = [share(PARTS * t + i, rank, world) for i in range(PARTS)]
        backward_in_parts(net, outer, kind, parts)
        noise.update()
        l1.update()
        ada.step()
        gains.append(ada.gain)
    assert noise.batch == PARTS * B
    assert [r.name for r in noise.layers] == ["first", "extra", "last", "tied", "norm"]
    return {
        "noise": [noise.value, *noise.interval],
        "l1": [l1.value, *l1.interval],
        "rows": l1.state_dict()["rows"],
        "gains": gains,
        "parameters": state(net),
    }


GAUGES = ("norm_test", "gsnr", "evidence", "noise_scale", "noise_scale_l1")


def gauges_of(rank: int, world: int, kind: str):
    """The gauges of the second of two steps, with two micro-batches each: those of the model, and
    those of each parameter.
    """
    net = model()
    outer = distributed(net, world, kind)
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1)
    for t in range(2):
        optimizer.zero_grad()
        parts = [share(PARTS * t + i, rank, world) for i in range(PARTS)]
        backward_in_parts(net, outer, kind, parts)
        found = [varreg.moments(p) for p in net.parameters()]
        each = [found, *(m for m in found if m is not None)]  # of the model, of each parameter
        values = {name: [*map(getattr(varreg.gauges, name), each)] for name in GAUGES}
        values["cabs"] = [varreg.gauges.cabs(m, 0.1, 2.5) for m in each]
        optimizer.step()
    if kind != "fsdp":  # that of sharded parameters is of this rank's shards
        values["λ"] = [varreg.gauges.effective_lambda(optimizer)]
    return values


def norms_of(rank: int, world: int, kind: str):
    """The norms of this rank's own samples, two micro-batches to a step, in the second step."""
    net = model()
    outer = distributed(net, world, kind)
    observer = varreg.observe(net, norms=True)
    for t in range(2):
        net.zero_grad()
        parts = [share(PARTS * t + i, rank, world) for i in range(PARTS)]
        backward_in_parts(net, outer, kind, parts)
    found = observer.norms()
    return found.values.view(PARTS, -1)


def fisher_of(rank: int, world: int, kind: str):
    """The Fisher over the data of all ranks; under DDP, with one batch more on rank 0."""
    net = model()
    outer = distributed(net, world, kind)
    data = [share(t, rank, world) for t in range(3)]
    if kind == "ddp" and world > 1:
        data = [*data[:2], *([share(2, 0, 1)] if rank == 0 else [])]
    out = {}
    for which in ("empirical", "exact"):
        found = varreg.fisher(outer, data, which)
        for name, t in found.items():
            out[which, name.removeprefix("module.")] = whole(t)
    return out


def not_synchronised(rank: int, world: int):
    """Return the errors of an update and of a step, if moments cover one process only."""
    net = model()
    ddp = wrapped(net, world)
    noise = varreg.NoiseScale(varreg.observe(net))
    ada = varreg.AdaScale(torch.optim.SGD(net.parameters(), lr=0.1), base_batch=2)
    x, y = share(0, rank, world)
    with ddp.no_sync():
        cross_entropy(ddp(x), y).backward()
    return [error_of(call) for call in (noise.update, ada.step)]


def cleared_late(rank: int, world: int, set_to_none: bool):
    """Return the samples that each step counts if gradients are cleared after its forward."""
    net = model()
    outer = wrapped(net, world)
    varreg.observe(net)
    optimizer, counts = torch.optim.SGD(net.parameters(), lr=0.1), []
    for t in range(STEPS):
        x, y = share(t, rank, world)
        loss = cross_entropy(outer(x), y)
        optimizer.zero_grad(set_to_none)
        loss.backward()
        counts.append({varreg.moments(p).count for p in net.parameters() if p.requires_grad})
    return counts


def together(rank: int, world: int):
    """Run all functions, in one start of the processes."""
    kinds = ("ddp", "fsdp") if _torch.CAN_JOIN_FSDP else ("ddp",)
    return {
        **{kind: trained(rank, world, kind) for kind in kinds},
        "fisher": {kind: fisher_of(rank, world, kind) for kind in kinds},
        "gauges": {kind: gauges_of(rank, world, kind) for kind in kinds},
        "norms": {kind: norms_of(rank, world, kind) for kind in kinds},
        "cleared late": [cleared_late(rank, world, how) for how in (True, False)],
        "said": not_synchronised(rank, world),
    }
