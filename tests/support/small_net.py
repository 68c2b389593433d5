"""A small network, a batch for it, and its truth."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.support.truth import losses, one_at_a_time, sample_weights


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(n: int = 6):
    return torch.randn(n, 4), sample_weights(n)


def backward(model, x, w, scale=1.0):
    (losses(model(x), w).mean() * scale).backward()


def truth(model, x, w):
    return one_at_a_time(copy.deepcopy(model), (x,), w)


def linear(i=3, o=3):
    return nn.Linear(i, o)
