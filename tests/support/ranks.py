"""The functions that each process of the distributed tests runs. `launch(function, world)` runs one
on every rank, and returns the results of all ranks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import varreg
from tests.support.forked import PRELOADED
from tests.support.optimizer_table import RULES
from varreg import _torch
from varreg.distributed import register_comm_hook

NEEDS_FSDP = pytest.mark.skipif(
    not _torch.CAN_JOIN_FSDP, reason="fully_shard with varreg needs torch 2.13 or newer"
)

B, STEPS = 12, 20


def launch(function, world: int, *args):
    """Run `function(rank, world, *args)` on every rank; return what each of them returns.

    The ranks are forked off a server that has imported torch and varreg: that saves each of them
    seconds.
    """
    # The pool of the lab uses the same server, if it runs: whoever is first says what it imports.
    mp.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world, function, folder, args), world, start_method="forkserver")
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(world)]


def _rank(rank: int, world: int, function, folder: str, args) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    torch.save(function(rank, world, *args), f"{folder}/{rank}.pt")
    dist.barrier()  # nobody leaves while another one still talks to it
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(
        0
    )  # at an ordinary exit, torch 2.13 with gloo aborts now and then, with plain DDP as well


class Branched(nn.Module):
    """A layer that only some forwards use, a tied weight, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.extra.weight
        self.norm = nn.LayerNorm(8)
        self.norm.bias.requires_grad_(False)

    def forward(self, x, branch=True):
        x = torch.tanh(self.first(x))
        if branch:
            x = x + torch.tanh(self.tied(torch.tanh(self.extra(x))))
        return self.last(self.norm(x))


def model() -> nn.Module:
    """The same in every process, whatever its default dtype is."""
    net, generator = Branched().double(), torch.Generator().manual_seed(0)
    for p in net.parameters():
        p.data.copy_(0.4 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return net


def data(t: int, n: int = B):
    g = torch.Generator().manual_seed(t)
    return torch.randn(n, 6, generator=g, dtype=torch.float64), torch.randint(
        0, 3, (n,), generator=g
    )


def share(t: int, rank: int, world: int):
    n = B // world
    x, y = data(t)
    return x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]


def whole(t: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy of a tensor; of a sharded one, put together from all ranks."""
    if t is None:
        return None
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()


def state(net: nn.Module) -> list[torch.Tensor]:
    return [whole(p.detach()) for p in net.parameters()]


def sums(net: nn.Module) -> list:
    found = [varreg.moments(p) for p in net.parameters()]
    return [
        None if m is None else (m.count, m.groups, whole(m.total), whole(m.square)) for m in found
    ]


def wrapped(net: nn.Module, world: int, **options) -> nn.Module:
    return DistributedDataParallel(net, **options) if world > 1 else net


# Each of these runs in one process with world = 1, too: that is what the ranks are compared with.
# -----------------------------------


def every_optimizer(rank: int, world: int, groups: int | None):
    out = {}
    for name, rule in list(RULES.items())[
        : None if world < 4 else 3
    ]:  # less of it where it is slow
        for setting, arguments in list(rule.settings.items())[: 2 if world < 4 else 1]:
            net = model()
            ddp = wrapped(net, world)
            with varreg.observe(net, groups=groups):
                optimizer = rule.regularized(net.parameters(), **arguments)
                for t in range(STEPS):
                    x, y = share(t, rank, world)
                    optimizer.zero_grad()
                    cross_entropy(ddp(x), y).backward()
                    optimizer.step()
            out[name, setting] = state(net)
    for per in ("tensor", "model"):
        out["per", per] = trained(rank, world, per=per)
    out["calibrated", "element"] = trained(rank, world, calibrate=True, lambda_max=1.5)
    return out


def trained(rank, world, steps=STEPS, around=False, seen=None, ddp_options=None, **options):
    """VRSGD with momentum; `around` observes the DDP module itself."""
    net = model()
    ddp = wrapped(net, world, **(ddp_options or {}))
    with varreg.observe(ddp if around else net):
        optimizer = varreg.VRSGD(net.parameters(), lr=0.1, momentum=0.9, **options)
        for t in range(steps):
            x, y = share(t, rank, world)
            optimizer.zero_grad(set_to_none=t % 2 == 0)
            cross_entropy(ddp(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            if seen is not None:
                seen.append(sums(net))
            optimizer.step()
    return state(net)


def trained_in_groups(rank: int, world: int):
    net = model()
    ddp = wrapped(net, world)
    varreg.observe(net, groups=4)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1)
    for t in range(STEPS):
        x, y = share(t, rank, world)
        optimizer.zero_grad()
        cross_entropy(ddp(x), y).backward()
        optimizer.step()
    return state(net)


def ways_to_wrap(rank: int, world: int):
    tiny = {"bucket_cap_mb": 1e-4}
    return {
        "plain": trained(rank, world),
        "around": trained(rank, world, around=True),
        "views": trained(rank, world, ddp_options={"gradient_as_bucket_view": True}),
        "small buckets": trained(rank, world, ddp_options=tiny),
        "small views": trained(rank, world, ddp_options={**tiny, "gradient_as_bucket_view": True}),
        "static graph": trained(rank, world, ddp_options={"static_graph": True}),
        "unused": trained(rank, world, ddp_options={"find_unused_parameters": True}),
    }


def moments(rank: int, world: int):
    seen: list = []
    trained(rank, world, steps=3, seen=seen)
    return seen


def accumulated(rank: int, world: int):
    """Four micro-batches, synchronised with the last; then two synchronised ones without clearing
    in between.
    """
    out = []
    for synchronise_all in (False, True):
        net = model()
        ddp = wrapped(net, world)
        varreg.observe(net)
        optimizer = varreg.VRSGD(net.parameters(), lr=0.1, momentum=0.9)
        for t in range(STEPS):
            optimizer.zero_grad()
            for i in range(4):
                x, y = share(4 * t + i, rank, world)
                off = world > 1 and i < 3 and not synchronise_all
                with ddp.no_sync() if off else contextlib.nullcontext():
                    (cross_entropy(ddp(x), y) / 4).backward()
            optimizer.step()
        out.append((state(net), sums(net)))
    return out


def unused(rank: int, world: int):
    """A branch that every third step leaves out on all ranks."""
    net = model()
    ddp = wrapped(net, world, find_unused_parameters=True)
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1, momentum=0.9)
    for t in range(STEPS):
        x, y = share(t, rank, world)
        optimizer.zero_grad()
        cross_entropy(ddp(x, t % 3 != 1), y).backward()
        optimizer.step()
    return state(net)


def unused_on_some(rank: int, world: int):
    """A branch that the first half of the ranks takes."""
    net = model()
    ddp = wrapped(net, world, find_unused_parameters=True)
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1)
    out = []
    for t in range(STEPS):
        x, y = share(t, rank, world)
        optimizer.zero_grad()
        cross_entropy(ddp(x, rank < world // 2), y).backward()
        out.append(sums(net))
        nn.utils.clip_grad_value_(net.parameters(), 0.01)
        optimizer.step()
    return state(net), out


def uneven(rank: int, world: int):
    """Batches of different sizes, with each rank's loss weighted by its samples."""
    net = model()
    ddp = wrapped(net, world)
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1, momentum=0.9)
    for t in range(STEPS):
        x, y = data(t)
        cut = [0, *(1 + 2 * r for r in range(1, world)), B]
        mine = slice(cut[rank], cut[rank + 1])
        x, y = x[mine], y[mine]
        optimizer.zero_grad()
        (cross_entropy(ddp(x), y) * (world * len(y) / B)).backward()
        optimizer.step()
    return state(net), sums(net)


def rank_weighted(rank: int, world: int):
    """Uneven batches with DDP's own average over ranks."""
    net = model()
    ddp = wrapped(net, world)
    varreg.observe(net)
    x, y = data(0)
    mine = slice(0, 3) if rank == 0 else slice(3, B)
    cross_entropy(ddp(x[mine]), y[mine]).backward()
    return sums(net)


def joined(rank: int, world: int, by_initial: bool):
    """Rank r has 4 + 3r batches of its own; each step's moments, and the parameters at the end."""
    net = model()
    ddp = wrapped(net, world)
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1, momentum=0.9)
    out = []
    with ddp.join(divide_by_initial_world_size=by_initial):
        for t in range(4 + 3 * rank):
            x, y = share(t, rank, world)
            optimizer.zero_grad()
            cross_entropy(ddp(x), y).backward()
            out.append(
                (
                    sums(net),
                    [p.grad.clone() for p in net.parameters() if p.grad is not None],
                    state(net),
                )
            )
            optimizer.step()
    return state(net), out


def hooks(rank: int, world: int):
    """Communication hooks: one of the user's beside ours, one that was there before, and what is
    left when the observer is gone.
    """
    out = {}
    net = model()
    ddp = DistributedDataParallel(net)
    called = []

    def own(state, bucket):
        called.append(state)
        buffer = bucket.buffer() / dist.get_world_size()
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])

    register_comm_hook(ddp, "mine", own)
    observer = varreg.observe(net)
    x, y = share(0, rank, world)
    cross_entropy(ddp(x), y).backward()
    out["beside"] = sums(net), called
    observer.remove()
    net.zero_grad()
    cross_entropy(ddp(x), y).backward()
    out["removed"] = sums(net), [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    varreg.observe(net)
    cross_entropy(ddp(x), y).backward()
    out["again"] = sums(net)

    other = DistributedDataParallel(model())
    other.register_comm_hook(None, lambda state, bucket: own(state, bucket))
    try:
        varreg.observe(other)
    except ValueError as error:
        out["before"] = str(error)
    assert not other._forward_hooks
    return out


class Convs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 3), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))).flatten(1))


def images(t: int, rank: int, world: int):
    g = torch.Generator().manual_seed(t)
    x, y = (
        torch.randn(B, 2, 6, 6, generator=g, dtype=torch.float64),
        torch.randint(0, 3, (B,), generator=g),
    )
    n = B // world
    return x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]


def odd(rank: int, world: int):
    """Weights in channels-last order; several observers in one model; more groups than a rank has
    samples; what is left after remove().
    """
    net, generator = Convs().double(), torch.Generator().manual_seed(0)
    for p in net.parameters():
        p.data.copy_(0.4 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    net = net.to(memory_format=torch.channels_last)
    ddp = wrapped(net, world)
    first, second = varreg.observe(net.one), varreg.observe(net.two)
    third = varreg.observe(net.head, groups=4 * B // 3 if world > 1 else None)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1)
    for t in range(6):
        x, y = images(t, rank, world)
        optimizer.zero_grad()
        cross_entropy(ddp(x), y).backward()
        optimizer.step()
    out = state(net), sums(net)
    watched = weakref.ref(first)
    for observer in (first, second, third):
        observer.remove()
    del first, second, third, observer
    gc.collect()
    return (*out, watched() is None)


def late(rank: int, world: int):
    """Only the body is observed; on the last rank a part of it goes out of use; tiny buckets, so
    that DDP reduces it before anything was measured.
    """
    net = model()
    ddp = wrapped(net, world, find_unused_parameters=True, bucket_cap_mb=1e-4)
    body = nn.ModuleList([net.first, net.extra, net.tied])
    observers = [varreg.observe(m) for m in body[:2]]
    optimizer = varreg.VRSGD([p for m in body[:2] for p in m.parameters()], lr=0.1)
    counts = []
    for t in range(6):
        x, y = share(t, rank, world)
        optimizer.zero_grad()
        cross_entropy(ddp(x, t < 2 or rank < world - 1), y).backward()
        counts.append(
            [m.count for p in net.extra.parameters() if (m := varreg.moments(p)) is not None]
        )
        optimizer.step()
    assert len(observers) == 2
    return state(net), counts


def no_batch(rank: int, world: int):
    """Rank r has 2r batches, the first one none."""
    ddp = DistributedDataParallel(model())
    varreg.observe(ddp)
    optimizer = varreg.VRSGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for t in range(2 * rank):
            x, y = share(t, rank, world)
            optimizer.zero_grad()
            cross_entropy(ddp(x), y).backward()
            optimizer.step()
    return state(ddp)


def outside(rank: int, world: int):
    """Several processes, and no DDP: an error, rather than parameters that drift apart."""
    net = model()
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1)
    x, y = share(0, rank, world)
    cross_entropy(net(x), y).backward()
    before = state(net)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error), all(torch.equal(a, b) for a, b in zip(before, state(net)))
    return None


def not_synchronised(rank: int, world: int):
    """A step after `no_sync` alone."""
    net = model()
    ddp = DistributedDataParallel(net)
    varreg.observe(net)
    optimizer = varreg.VRSGD(net.parameters(), lr=0.1)
    x, y = share(0, rank, world)
    with ddp.no_sync():
        cross_entropy(ddp(x), y).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return None


def together(rank: int, world: int):
    """Run all functions that need no argument, in one start of the processes."""
    return {
        "exact": every_optimizer(rank, world, None),
        "groups": every_optimizer(rank, world, 4)
        if world < 4
        else {("SGD", "plain"): trained_in_groups(rank, world)},
        "ways": ways_to_wrap(rank, world) if world == 2 else {"plain": trained(rank, world)},
        "moments": moments(rank, world),
        "accumulated": accumulated(rank, world),
        "unused": unused(rank, world),
        "uneven": uneven(rank, world),
        **({"odd": odd(rank, world)} if world == 1 else {}),
        **({} if world == 1 else more(rank, world)),
    }


def more(rank: int, world: int):
    return {
        "unused on some": unused_on_some(rank, world),
        "rank weighted": rank_weighted(rank, world),
        "joined": {by: joined(rank, world, by) for by in (True, False)},
        "hooks": hooks(rank, world),
        "odd": odd(rank, world),
        "late": late(rank, world),
        "no batch": no_batch(rank, world),
        "outside": outside(rank, world),
        "not synchronised": not_synchronised(rank, world),
    }
