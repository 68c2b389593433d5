"""Gradient noise in Weights & Biases, offline: `wandb sync` uploads it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
import wandb
from sklearn.datasets import load_digits
from torch import nn

import varreg
from varreg.callbacks import WandB


def main() -> None:
    """Train a classifier of digits with a plain torch optimizer, and log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/log_wandb"))
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    with (
        varreg.observe(model) as observer,
        wandb.init(project="digits", mode="offline", dir=options.folder) as run,
        WandB(observer, optimizer, run, every=10) as log,
    ):
        for _ in range(options.steps):
            batch = torch.randint(len(x), (64,))
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step(loss)
    print(f"Noise scale: {log.recorder.noise.model.text}")
    print(f"Look: wandb sync {options.folder}/wandb/offline-run-*")


if __name__ == "__main__":
    main()
