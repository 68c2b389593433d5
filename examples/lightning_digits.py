"""Variance regularization in Lightning: the optimizer is returned by `configure_optimizers`, as any
other, and λ is logged.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import varreg
from digits import data
from varreg.lab.models import digits_cnn


class Digits(lightning.LightningModule):
    """A classifier that is observed while it trains."""

    def __init__(self, lr: float):
        super().__init__()
        self.lr = lr
        self.model = digits_cnn()

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.observer = varreg.observe(self.model)  # the first line

    def teardown(self, stage: str) -> None:
        if stage == "fit":
            self.observer.remove()  # so that a second fit() may observe again

    def configure_optimizers(self) -> Any:
        optimizer = varreg.VRSGD(
            self.model.parameters(), lr=self.lr, momentum=0.9, calibrate=True
        )  # the second
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
    """Train and test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="samples in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    parser.add_argument("--folder", type=Path, help="save checkpoints here, one for each epoch")
    parser.add_argument("--resume", type=Path, help="the checkpoint to go on from")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    x, y, x_test, y_test = data(0)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        precision=options.precision,
        callbacks=[ModelCheckpoint(options.folder, "{epoch}", save_top_k=-1)]
        if options.folder
        else None,
        enable_checkpointing=options.folder is not None,
        logger=False,
        accelerator="cpu",
        enable_model_summary=False,
    )
    module, dataset = Digits(options.lr), TensorDataset(x, y)
    # Shuffled by the number of the epoch alone, so that a resumed run sees the same batches.
    order: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1, rank=0)
    trainer.fit(
        module,
        DataLoader(dataset, options.batch, sampler=order, drop_last=True),
        ckpt_path=options.resume,
    )
    trainer.test(module, DataLoader(TensorDataset(x_test, y_test), 512))


if __name__ == "__main__":
    main()
