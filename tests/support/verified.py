"""Small models, batches and losses for `varreg.verify`."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import varreg

M = 12


def net(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def pairs():
    return torch.randn(M, 4), torch.arange(M) % 3


def sines(output, y):
    """A mean over samples of something that is not linear, of outputs of any structure."""
    found = [
        t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()
    ]
    return sum(t.reshape(len(y), -1).sin().sum(1).mean() for t in found)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.weight


def with_rule(rule):
    class Mine(Scaled):
        pass

    varreg.register_rule(Mine)(rule)
    return nn.Sequential(nn.Linear(4, 4), Mine()), Mine
