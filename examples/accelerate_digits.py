"""Variance regularization in a Hugging Face Accelerate loop: accumulation, clipping, a scheduler,
and a run that goes on where it stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import varreg
from digits import data
from varreg.lab.models import digits_cnn


def main() -> None:
    """Train, and print loss and accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="samples in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    parser.add_argument(
        "--folder",
        type=Path,
        help="save everything here after each epoch, and go on from what is there",
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    x, y, x_test, y_test = data(0)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=options.accumulate, mixed_precision=options.precision
    )

    model = digits_cnn()
    varreg.observe(model)  # the first line, before prepare() wraps anything
    regularized = varreg.VRSGD(  # the second
        model.parameters(), lr=options.lr, momentum=0.9, calibrate=True
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(regularized, 0.99)
    # Micro-batches weigh the same, so let them be of the same size: then samples do, too.
    loader = DataLoader(TensorDataset(x, y), options.batch, shuffle=True, drop_last=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, regularized, loader, scheduler)

    saved = sorted(options.folder.glob("epoch-*")) if options.folder else []
    if saved:
        accelerator.load_state(
            str(saved[-1])
        )  # weights, λ's history, learning rate and random numbers
    for epoch in range(len(saved) + 1, options.epochs + 1):
        for images, labels in loader:
            with accelerator.accumulate(
                model
            ):  # a step for every few micro-batches: the moments add up as the gradients do
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(
                        model.parameters(), 1.0
                    )  # λ is that of the gradient before
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).double().mean()
        whole = regularized.lambda_summary().model  # prepare()'s wrapper does not have it
        print(
            f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy:.1%}, mean λ "
            f"{whole.mean if whole else 1:.4f}"
        )
        if options.folder:
            accelerator.save_state(str(options.folder / f"epoch-{epoch:03d}"))


if __name__ == "__main__":
    main()
