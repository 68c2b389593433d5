"""Variance regularization in Lightning: the optimizer is returned by `configure_optimizers`, as any other, and λ is logged."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import varreg
from digits import data
from varreg.lab.models import digits_cnn


class Digits(lightning.LightningModule):
    """A classifier that is observed from the start of training."""

    def __init__(self, lr: float):
        super().__init__()
        self.lr = lr
        self.model = digits_cnn()

    def setup(self, stage: str) -> None:
        if stage == "fit":
            varreg.observe(self.model)  # the first line

    def configure_optimizers(self) -> Any:
        optimizer = varreg.VRSGD(self.model.parameters(), lr=self.lr, momentum=0.9, history="geometric")  # the second
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        whole = optimizer.lambda_summary().model
        if whole:
            self.log("lambda/mean", whole.mean, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(1) == y).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.02)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    x, y, x_test, y_test = data(0)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        accelerator="cpu",
        gradient_clip_val=1.0,
        enable_model_summary=False,
    )
    module = Digits(options.lr)
    trainer.fit(module, DataLoader(TensorDataset(x, y), 64, shuffle=True))
    trainer.test(module, DataLoader(TensorDataset(x_test, y_test), 512))


if __name__ == "__main__":
    main()
