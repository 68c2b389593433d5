"""Gradient noise and λ among what Accelerate logs: one tracker."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import varreg
from varreg.callbacks import AccelerateTracker


def main() -> None:
    """Train, with a page and TensorBoard's log in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate_tracker"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", type=int, default=5, help="record every so many steps")
    options = parser.parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = varreg.VRAdam(model.parameters(), lr=1e-3, calibrate=True)
    loader = DataLoader(TensorDataset(x, y), 64, shuffle=True, drop_last=True)

    tracker = AccelerateTracker(model, optimizer, options.folder, every=options.every)
    accelerator = Accelerator(
        cpu=True, log_with=[tracker, "tensorboard"], project_dir=str(options.folder)
    )
    accelerator.init_trackers("digits")
    model, prepared, loader = accelerator.prepare(model, optimizer, loader)
    for step in range(1, options.epochs * len(loader) + 1):
        if step % len(loader) == 1:
            batches = iter(loader)
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        prepared.step()
        accelerator.log({"loss": loss.item()}, step)  # it adds what the tracker has measured
        prepared.zero_grad()
    accelerator.end_training()
    print(f"Page: {options.folder / 'monitor.html'}")
    print(f"Effective λ: {tracker.latest['varreg/lambda_effective']:.3f}")


if __name__ == "__main__":
    main()
