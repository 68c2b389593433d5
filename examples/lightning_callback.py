"""Gradient noise of a Lightning training, with a plain torch optimizer: one callback."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from varreg.callbacks import LightningCallback


class Digits(lightning.LightningModule):
    """A classifier that knows nothing of varreg."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)


def main() -> None:
    """Train, with a page and a log in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning_callback"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--every", type=int, default=5, help="record every so many steps")
    options = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        callbacks=[LightningCallback(options.folder, every=options.every)],  # the line
        logger=CSVLogger(options.folder),
        accelerator="cpu",
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(TensorDataset(x, y), 64, shuffle=True))
    print(f"Page: {options.folder / 'monitor.html'}")


if __name__ == "__main__":
    main()
