"""The functions that each process of the monitor's tests runs."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import varreg
from tests.support.ranks import model, share
from tests.support.sharded_ranks import distributed
from varreg import _torch

STEPS = 6


def trained(rank: int, world: int, kind: str, folder: Path, every: int | None = 1) -> int:
    """Train with a monitor on every rank; return how many steps this rank measured."""
    net = model()
    outer = distributed(net, world, kind)
    observer = varreg.observe(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with varreg.Monitor(observer, optimizer, folder / kind, every=every, layers=True) as monitor:
        for t in range(STEPS):
            x, y = share(t, rank, world)
            optimizer.zero_grad()
            loss = cross_entropy(outer(x), y)
            loss.backward()
            optimizer.step()
            monitor.step(loss)
            if every is None:
                time.sleep(0.01 * rank)  # their clocks differ
    return monitor.noise.updates


def together(rank: int, world: int, folder: str) -> dict[str, int]:
    """With DDP, and with shards; there also by the clock, in which all must agree."""
    home = Path(folder)
    out = {"ddp": trained(rank, world, "ddp", home)}
    if _torch.CAN_JOIN_FSDP:
        out["fsdp"] = trained(rank, world, "fsdp", home)
        out["clock"] = trained(rank, world, "fsdp", home / "clock", every=None)
    return out
