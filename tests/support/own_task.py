"""A user's task, as in the documentation."""

import math

import torch
from torch import nn

from varreg.lab import Split, Splits, Task


def spirals(turns: float = 1.0) -> Task:
    def split(n: int, seed: int) -> Split:
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 2, (n,), generator=generator)
        r = torch.rand(n, generator=generator)
        angle = 2 * math.pi * turns * r + math.pi * y
        points = torch.stack([r * angle.cos(), r * angle.sin()], 1)
        return Split(points + 0.02 * torch.randn(n, 2, generator=generator), y)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    return Task(
        about="two spirals in the plane",
        load=lambda data_dir: Splits(split(1000, 1), split(300, 2), split(300, 3)),
        model=model,
        batch=50,
        epochs=10,
    )
