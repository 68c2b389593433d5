"""A small model, and the statistics in an optimizer's state."""

from __future__ import annotations

import torch
from torch import nn

BATCH = 6


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def statistics(optimizer):
    return {
        (id(p), k): v.clone()
        for p, s in optimizer.state.items()
        for k, v in s.items()
        if k.startswith("vr_")
    }


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
