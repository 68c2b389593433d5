"""A training loop with and without variance regularization, and the control that tells a better
step from a longer one.

The change to the loop is two lines, marked below. Four arms: SGD; VR-SGD; VR-SGD with the geometric
history; and SGD with its learning rate multiplied by the mean λ that VR-SGD had, weighted by
squared gradients. Where the last arm does as well as the second, it was the length of the steps.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import varreg
from digits import data
from varreg.lab.models import digits_cnn
from varreg.tables import table


def train(make: Any, epochs: int, batch: int, seed: int) -> tuple[float, float, float]:
    """Return the mean training loss of the last epoch, test accuracy, and the mean effective λ."""
    torch.manual_seed(seed)
    x, y, x_test, y_test = data(seed)
    model: nn.Module = digits_cnn()
    varreg.observe(model)  # the first line
    optimizer = make(model.parameters())  # the second: VRSGD in place of SGD
    effective, losses = [], [0.0]
    for _ in range(epochs):
        losses = []
        for index in torch.randperm(len(x)).split(batch)[: len(x) // batch]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[index]), y[index])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if isinstance(optimizer, varreg.VRSGD) and (whole := optimizer.lambda_summary().model):
                effective.append(whole.effective)
    with torch.no_grad():
        accuracy = float((model(x_test).argmax(1) == y_test).double().mean())
    return statistics.mean(losses), accuracy, statistics.mean(effective) if effective else 1.0


def main() -> None:
    """Train with VR-SGD, with SGD, and with SGD at the longer step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    lr, seeds = options.lr, range(options.seeds)

    def run(make: Any) -> list[tuple[float, float, float]]:
        return [train(make, options.epochs, options.batch, seed) for seed in seeds]

    arms = {
        "SGD": run(lambda p: torch.optim.SGD(p, lr)),
        "VR-SGD": run(lambda p: varreg.VRSGD(p, lr)),
        "VR-SGD, geometric history": run(lambda p: varreg.VRSGD(p, lr, history="geometric")),
    }
    factor = statistics.mean(r[2] for r in arms["VR-SGD"])
    arms[f"SGD, lr × {factor:.2f}"] = run(lambda p: torch.optim.SGD(p, lr * factor))
    rows = []
    for name, results in arms.items():
        loss, accuracy, lam = zip(*results, strict=True)
        spread = f"{statistics.mean(loss):.3f} ({min(loss):.3f}–{max(loss):.3f})"
        rows.append(
            (name, f"{statistics.mean(lam):.2f}", spread, f"{statistics.mean(accuracy):.1%}")
        )
    print(
        f"digits, {options.epochs} epochs of batches of {options.batch}, lr {lr}, mean (range) "
        f"over {options.seeds} seeds\n"
    )
    print(table(("arm", "effective λ", "training loss", "test accuracy"), rows, total=False))


if __name__ == "__main__":
    main()
