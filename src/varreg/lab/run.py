"""One training run, in a folder of its own, that can be killed at any moment and goes on where it was.

The folder has `config.json`; while it runs, `checkpoint.pt`; and at the end `result.json` and `weights.pt`. A run that was killed and started again
ends bit for bit as one that was not: batches depend on the seed and the step alone, and a checkpoint holds all else, metrics included.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import varreg
from varreg.lab import store
from varreg.lab.tasks import Split, Splits, task

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad", "Adadelta")
} | {name: getattr(varreg, name) for name in varreg.__all__ if name.startswith("VR")}


@dataclass(frozen=True)
class Config:
    """All that a run depends on."""

    task: str
    optimizer: str
    lr: float
    seed: int = 0
    epochs: int = 1
    batch: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer."""
    log_every: int = 10
    """Steps between two looks at λ."""
    test: Literal["never", "end", "epochs"] = "never"
    """When the test split is read: never where choices are made, at the end for a verdict, after every epoch for a figure."""

    @property
    def name(self) -> str:
        """Of the folder: what a person looks for, and a checksum of all of it, so that no two runs share one."""
        options = "".join(f" {k}={v}" for k, v in sorted(self.options.items()))
        whole = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.task} {self.optimizer}{options} lr={self.lr:g} seed={self.seed} {whole}"


def batches(n: int, batch: int, seed: int, epoch: int) -> tuple[Tensor, ...]:
    """The indices of an epoch's batches; what is left at its end is left out, so that all batches are of one size."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))
    return tuple(order[: n // batch * batch].split(batch))


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, loss: Callable[[Tensor, Tensor], Tensor], batch: int = 1000) -> tuple[float, float]:
    """Mean loss and accuracy."""
    was, total, right = model.training, 0.0, 0
    model.eval()
    for x, y in zip(split.x.split(batch), split.y.split(batch), strict=True):
        output = model(x)
        total += float(loss(output, y)) * len(y)
        right += int((output.argmax(1) == y).sum())
    model.train(was)
    return total / len(split), right / len(split)


def mean_lambda(optimizer: Any) -> tuple[float, float]:
    """λ of the last step: its mean, and its mean weighted by squared gradients; nan where there was none."""
    count = plain = weighted = weight = 0.0
    for group in optimizer.param_groups:
        for p in group["params"]:
            lam = optimizer.lambda_of(p)
            if lam is not None and p.grad is not None:
                square = p.grad.square()
                count += p.numel()
                plain += float(lam.mean()) * p.numel()
                weighted += float((square * lam).sum())
                weight += float(square.sum())
    return plain / count if count else math.nan, weighted / weight if weight else math.nan


class Run:
    """A run in progress: what a checkpoint holds."""

    def __init__(self, config: Config, splits: Splits | None = None, data_dir: Path | None = None):
        self.config, self.task = config, task(config.task)
        if config.optimizer not in OPTIMIZERS:
            raise ValueError(f"varreg: there is no optimizer {config.optimizer!r}; there are: {', '.join(OPTIMIZERS)}.")
        self.splits = splits or self.task.load(data_dir)
        torch.manual_seed(config.seed)
        self.model = self.task.model()
        self.optimizer = OPTIMIZERS[config.optimizer](self.model.parameters(), lr=config.lr, **config.options)  # type: ignore[call-arg]
        if hasattr(self.optimizer, "lambda_of"):
            varreg.observe(self.model)
        self.step, self.seconds = 0, 0.0
        self.steps: dict[str, list[float]] = {"loss": [], "mean_lambda": [], "effective_lambda": []}
        self.epochs: dict[str, list[float]] = {f"{split}_{what}": [] for split in Splits._fields for what in ("loss", "accuracy")}

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "steps": self.steps,
            "epochs": self.epochs,
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in ("step", "seconds", "steps", "epochs"):
            setattr(self, name, state[name])
        torch.set_rng_state(state["rng"])

    def train(self, until: int) -> None:
        """Up to step `until`, which is not beyond the end of the epoch."""
        config, train = self.config, self.splits.train
        per_epoch = len(train) // config.batch
        order = batches(len(train), config.batch, config.seed, self.step // per_epoch)
        start = time.perf_counter()
        for index in order[self.step % per_epoch : until - self.step // per_epoch * per_epoch]:
            self.optimizer.zero_grad()
            loss = self.task.loss(self.model(train.x[index]), train.y[index])
            loss.backward()
            self.optimizer.step()
            self.steps["loss"].append(loss.item())
            self.step += 1
            if self.step % config.log_every == 0 and hasattr(self.optimizer, "lambda_of"):
                mean, effective = mean_lambda(self.optimizer)
                self.steps["mean_lambda"].append(mean)
                self.steps["effective_lambda"].append(effective)
        self.seconds += time.perf_counter() - start
        if self.step % per_epoch == 0:
            last = self.step == self.total
            for name, split in zip(Splits._fields, self.splits, strict=True):
                if name != "test" or config.test == "epochs" or (config.test == "end" and last):
                    for what, value in zip(("loss", "accuracy"), evaluate(self.model, split, self.task.loss), strict=True):
                        self.epochs[f"{name}_{what}"].append(value)

    @property
    def total(self) -> int:
        return len(self.splits.train) // self.config.batch * self.config.epochs

    @property
    def diverged(self) -> bool:
        return bool(self.steps["loss"]) and not math.isfinite(self.steps["loss"][-1])


def run(
    config: Config,
    folder: Path,
    splits: Splits | None = None,
    data_dir: Path | None = None,
    every: int = 200,
    progress: Callable[[int, int], None] = lambda step, total: None,
) -> dict[str, Any]:
    """Train to the end, from wherever the folder says it was, with a checkpoint `every` steps; the result, as in `result.json`."""
    folder = folder / config.name
    store.check_writable(folder)
    store.sweep(folder)
    if (folder / "result.json").exists():
        done: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return done
    going = Run(config, splits, data_dir)
    store.write_json(folder / "config.json", asdict(config))
    if (folder / "checkpoint.pt").exists():
        going.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True))
    per_epoch = going.total // config.epochs
    while going.step < going.total and not going.diverged:
        end_of_epoch = (going.step // per_epoch + 1) * per_epoch
        going.train(min(end_of_epoch, going.step + every))
        store.write_tensors(folder / "checkpoint.pt", going.state_dict())
        progress(going.step, going.total)
    store.write_tensors(folder / "weights.pt", going.model.state_dict())
    result = {
        "config": asdict(config),
        "step": going.step,
        "diverged": going.diverged,
        "seconds": going.seconds,
        "steps": going.steps,
        "epochs": going.epochs,
    }
    store.write_json(folder / "result.json", result)
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    return result
