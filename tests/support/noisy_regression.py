"""A regression whose ρ is heavy-tailed, trained step by step."""

from __future__ import annotations

import torch
from torch import nn

import varreg
from varreg.thresholds import LAMBDA_EVERY, LAMBDA_LOOKS

STRETCH = LAMBDA_EVERY * LAMBDA_LOOKS


def training(steps=STRETCH, make=varreg.VRSGD, dtype=torch.float64, **options):
    """Yields model and optimizer after each step of a noisy regression, whose ρ is heavy-tailed."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to(dtype)
    varreg.observe(model)
    optimizer = make(model.parameters(), lr=1e-3, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = torch.randn(8, 6, dtype=dtype), torch.randn(8, 3, dtype=dtype)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        yield model, optimizer
