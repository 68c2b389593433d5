"""Gradient noise in TensorBoard, from a loop of one's own."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import varreg
from varreg.callbacks import TensorBoard


def main() -> None:
    """Train a classifier of digits with a plain torch optimizer, and log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/log_tensorboard"))
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
        SummaryWriter(options.folder) as writer,
        TensorBoard(observer, optimizer, writer, every=10) as log,
    ):
        for _ in range(options.steps):
            batch = torch.randint(len(x), (64,))
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step(loss)
    print(f"Noise scale: {log.recorder.noise.model.text}")
    print(f"Look: tensorboard --logdir {options.folder}")


if __name__ == "__main__":
    main()
