"""The functions that each process of the tests with sharded parameters runs."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import varreg
from tests.support.optimizer_table import RULES
from tests.support.ranks import STEPS, model, share, state, sums, whole, wrapped
from varreg.lab.models import paper_cnn


def sharded(world: int, net=None, **options):
    """Two groups: one layer of its own, and the rest."""
    net = model() if net is None else net
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(net.first, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def distributed(net: torch.nn.Module, world: int, kind: str) -> torch.nn.Module:
    """Return the model to call: in DDP, sharded, or alone."""
    if kind == "ddp":
        return wrapped(net, world)
    return sharded(world, net) if kind == "fsdp" else net


def backward_in_parts(net: torch.nn.Module, outer: torch.nn.Module, kind: str, parts: list) -> None:
    """Call backward for each of several micro-batches; reduce gradients with the last."""
    for i, (x, y) in enumerate(parts):
        is_last = i == len(parts) - 1
        if kind == "fsdp":
            net.set_requires_gradient_sync(is_last)
        waits = kind == "ddp" and not is_last and hasattr(outer, "no_sync")
        with outer.no_sync() if waits else contextlib.nullcontext():
            (cross_entropy(outer(x), y) / len(parts)).backward()


def every_optimizer(rank: int, world: int, groups: int | None):
    out = {}
    for name, rule in list(RULES.items())[
        : 2 if world > 2 or groups else None
    ]:  # all of them once: this is slow
        setting, arguments = next(iter(rule.settings.items()))
        net = sharded(world)
        with varreg.observe(net, groups=groups):
            optimizer = rule.regularized(net.parameters(), **arguments)
            for t in range(STEPS):
                x, y = share(t, rank, world)
                optimizer.zero_grad()
                cross_entropy(net(x), y).backward()
                optimizer.step()
        out[name, setting] = state(net)
        assert {type(s["vr_history"]) for s in optimizer.state.values() if "vr_history" in s} == {
            DTensor
        }
    for per in ("tensor", "model"):
        out["per", per] = trained(rank, world, per=per)
    out["calibrated", "element"] = trained(rank, world, calibrate=True, lambda_max=1.5)
    return out


def trained(rank, world, steps=STEPS, before=False, seen=None, **options):
    """Train as `ranks.trained` does; with `before`, observe before sharding."""
    net = model()
    if before:
        observer = varreg.observe(net)
        sharded(world, net)
    else:
        sharded(world, net)
        observer = varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1, momentum=0.9, **options)
    for t in range(steps):
        x, y = share(t, rank, world)
        optimizer.zero_grad(set_to_none=t % 2 == 0)
        cross_entropy(net(x), y).backward()
        clip_grad_norm_(net.parameters(), 0.5)
        if seen is not None:
            seen.append(sums(net))
        optimizer.step()
    observer.remove()
    return state(net)


def moments(rank: int, world: int):
    seen: list = []
    trained(rank, world, steps=3, seen=seen)
    return seen


def accumulated(rank: int, world: int):
    out = []
    for synchronise_all in (False, True):
        net = sharded(world)
        varreg.observe(net)
        optimizer = varreg.VRSGD(net.parameters(), lr=0.1, momentum=0.9)
        for t in range(STEPS):
            optimizer.zero_grad()
            for i in range(4):
                x, y = share(4 * t + i, rank, world)
                net.set_requires_gradient_sync(synchronise_all or i == 3)
                (cross_entropy(net(x), y) / 4).backward()
            optimizer.step()
        out.append((state(net), sums(net)))
    return out


def what_is_said(rank: int, world: int):
    """λ, summaries, errors."""
    net = sharded(world)
    observer = varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1)
    x, y = share(0, rank, world)
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    weight = net.first.weight
    lam, m = optimizer.lambda_of(weight), varreg.moments(weight)
    row = observer.summary().model
    out = {
        "λ": whole(lam),
        "sharded": isinstance(lam, DTensor)
        and isinstance(m.rho, DTensor)
        and lam.placements == weight.placements,
        "repr": repr(m),
        "summary": (row.grad_norm, row.trace, row.count),
        "own": optimizer.lambda_summary().model.elements,
        "local": sum(p.to_local().numel() for p in net.parameters() if p.requires_grad),
    }
    errors = {"mesh": error_of(two_dimensions, world)}
    errors["part"] = error_of(lambda: varreg.observe(sharded(world).last))
    clip_grad_value_(net.parameters(), 0.01)
    return {**out, **errors, "clipped": error_of(optimizer.step)}


def wide(rank: int, world: int):
    """The paper's CNN in float32: what rounding leaves of dot products must not be taken for a
    change of single elements.
    """
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    net = paper_cnn()
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.001, momentum=0.9)
    x, y = torch.randn(100, 1, 28, 28), torch.randint(0, 10, (100,))
    mine = slice(50 * rank, 50 * rank + 50)
    for t in range(4):
        optimizer.zero_grad()
        cross_entropy(net(x[mine]), y[mine]).backward()
        if t > 1:
            clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
    return float(optimizer.lambda_summary().model.mean)


def cleared(rank: int, world: int):
    """By zeros, with torch's foreach kernels; and a branch that the last of two micro-batches
    leaves out.
    """
    net = sharded(world)
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1, foreach=True)
    for t in range(4):
        x, y = share(t, rank, world)
        optimizer.zero_grad(set_to_none=False)
        cross_entropy(net(x), y).backward()
        (cross_entropy(net(x, False), y) / 2).backward()
        found = sums(net)
        optimizer.step()
    return state(net), found


def error_of(function, *args) -> str:
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return ""


def two_dimensions(world: int):
    net = model()
    fully_shard(
        net, mesh=init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    )
    varreg.observe(net)
    net(torch.zeros(2, 6, dtype=torch.float64))


def half_precision(rank: int, world: int):
    """Gathered in bfloat16, kept in float32: statistics are in float32."""
    net = sharded(
        world,
        model().float(),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1)
    x, y = share(0, rank, world)
    cross_entropy(net(x.float()), y).backward()
    found = sums(net)
    optimizer.step()
    return found, {
        key: value.dtype
        for s in optimizer.state.values()
        for key, value in s.items()
        if key.startswith("vr_")
    }


def checkpoint(rank: int, world: int, folder: str, resume: bool = False):
    """Twenty steps, with a save after ten; or a load, and the last ten. Batches do not depend on
    the number of ranks.
    """
    net = sharded(world)
    varreg.observe(net)
    optimizer = varreg.VRAdam(net.parameters(), lr=0.01)
    if resume:
        weights, kept = get_state_dict(net, optimizer)
        dcp.load({"model": weights, "optimizer": kept}, checkpoint_id=folder)
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=kept)
    for t in range(10 if resume else 0, 20):
        x, y = share(t, rank, world)
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
        if t == 9:
            weights, kept = get_state_dict(net, optimizer)
            dcp.save({"model": weights, "optimizer": kept}, checkpoint_id=folder)
    return state(net)


def together(rank: int, world: int):
    exact = every_optimizer(rank, world, None)
    if world > 2:  # it is slow there
        return {
            "exact": exact,
            "moments": moments(rank, world),
            "accumulated": accumulated(rank, world),
            "said": what_is_said(rank, world),
        }
    return {
        "exact": exact,
        "groups": every_optimizer(rank, world, 4),
        "before": trained(rank, world, before=True),
        "plain": trained(rank, world),
        "moments": moments(rank, world),
        "accumulated": accumulated(rank, world),
        "said": what_is_said(rank, world),
        "half": half_precision(rank, world),
        "cleared": cleared(rank, world),
        "wide": wide(rank, world),
    }
