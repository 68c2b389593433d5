"""A page about a training that you can keep open: one line in the loop."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import varreg


def main() -> None:
    """Train a classifier of digits, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/monitor_digits"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=10, help="record every so many steps")
    parser.add_argument("--show", action="store_true", help="open the page in a browser")
    options = parser.parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = varreg.VRSGD(model.parameters(), lr=0.02, momentum=0.9, calibrate=True)

    observer = varreg.observe(model)
    with varreg.Monitor(observer, optimizer, options.folder, every=options.every) as monitor:
        if options.show:
            monitor.show()
        for _ in range(options.steps):
            batch = torch.randint(len(x), (64,))
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)  # the line
    print(f"{monitor}\nNoise scale: {monitor.noise.model.text}")


if __name__ == "__main__":
    main()
