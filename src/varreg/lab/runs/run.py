"""A training run in progress."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varreg
from varreg.errors import VarregError
from varreg.lab import optimizers, recipe, schema, store
from varreg.lab.environment import environment
from varreg.lab.noise_decay import NoiseDecay
from varreg.lab.runs import checkpoint
from varreg.lab.runs.config import Config, batches
from varreg.lab.runs.early_stopping import Best
from varreg.lab.runs.metrics import effective_lambdas, evaluate
from varreg.lab.runs.training_device import (
    check_device,
    device_random,
    on_device,
    set_device_random,
)
from varreg.lab.tasks import lookup, randomness
from varreg.lab.tasks.augmentation import AUGMENTATIONS, generator_of
from varreg.lab.tasks.batches import Batches, DataSplit, Split
from varreg.lab.tasks.definition import Splits
from varreg.optim.base import Regularized
from varreg.thresholds import WINDOW

EVALUATED = 10_000
"""The largest number of training samples for the evaluation of the training loss: always the same
ones.
"""


class Run:
    """A run in progress: all state that a checkpoint holds."""

    def __init__(self, config: Config, splits: Splits | None = None, data_dir: Path | None = None):
        self.config, self.task = config, lookup.task(config.task)
        self.recipe, options = recipe.split(config.options, config.optimizer)
        optimizers.check(config.optimizer, config.options)
        if self.task.stream is not None and config.optimizer == "SVRG":
            raise VarregError(
                f"varreg: SVRG needs the gradient of all samples, and task {config.task!r} is a "
                "stream without end."
            )
        check_device(self.recipe.device)
        self.device = torch.device(self.recipe.device)
        self.splits = on_device(splits or lookup.load(config.task, data_dir), self.device)
        self.per_epoch = len(self.splits.train) // config.batch
        self.total = self._total()
        if not self.total or not self.per_epoch:
            raise VarregError(
                f"varreg: {config.epochs} epochs of {len(self.splits.train)} samples hold no batch "
                f"of {config.batch}."
            )
        if config.test != "epochs" and not len(self.splits.valid):
            raise VarregError(
                f"varreg: task {config.task!r} has no validation split, and choices are made on "
                "it: hold some samples out."
            )
        randomness.seed_all(config.seed)
        self.model = self.task.model().to(self.device)
        self.named = list(self.model.named_parameters())
        self.optimizer: Any = optimizers.build(config.optimizer, self.named, config.lr, options)
        if isinstance(self.optimizer, Regularized):
            self.optimizer._watches_lambda = False  # the lab tunes the learning rate for λ
        # With s = 0, a regularized optimizer is its base to the bit, and needs no moments.
        self.regularizes = isinstance(self.optimizer, Regularized) and options.get("s") != 0
        measures = self.recipe.noise or self.recipe.noise_decay
        needs_moments = self.regularizes or measures or self.recipe.adascale
        self.observer = self.observe() if needs_moments else None
        self.noise = self.ada = self.decay = None
        if measures and self.observer is not None:
            window = WINDOW if self.recipe.noise_decay else config.log_every
            self.noise = varreg.NoiseScale(self.observer, window=window)
        if self.recipe.noise_decay and self.noise is not None:
            self.decay = NoiseDecay(self.optimizer, self.noise, self.recipe.noise_decay)
        self.best = Best() if self.recipe.keep == "best" else None
        if self.best is not None and hasattr(self.optimizer, "swap_average"):
            raise VarregError(
                f"varreg: {config.optimizer} is judged at its average: leave keep=best out."
            )
        if self.recipe.adascale:
            self.ada = varreg.AdaScale(self.optimizer, self.recipe.adascale)
        self.fetched = (
            Batches(self.splits.train, self.draw, self.total)
            if isinstance(self.splits.train, DataSplit)
            else None
        )
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []
        self.evaluations: dict[str, list[float]] = {column: [] for column in schema.EVALUATIONS}
        self.statistics: dict[str, list[float]] = {"step": []}
        self.evaluates: Callable[[], None] = lambda: None
        """Called when an evaluation begins."""

    _KEPT = ("step", "seconds", "losses", "evaluations", "statistics")

    def _total(self) -> int:
        """Return the number of steps; with AdaScale, the number of steps of the base. A step of
        AdaScale counts as one or more of these.
        """
        batch = self.recipe.adascale or self.config.batch
        return self.recipe.steps or len(self.splits.train) // batch * self.config.epochs

    def observe(self) -> varreg.Observer:
        """Observe the model as the recipe says."""
        groups = self.recipe.groups or None
        return varreg.observe(self.model, groups, batch_norm=self.recipe.batch_norm)

    @property
    def progress(self) -> float:
        """Return the number of steps so far; with AdaScale, of the base."""
        return self.step if self.ada is None else self.ada.progress

    @property
    def is_done(self) -> bool:
        """Return whether all steps are done."""
        return self.progress >= self.total

    @property
    def _clocks(self) -> dict[str, Any]:
        """Return the objects with their own state, besides model and optimizer."""
        parts = {"noise": self.noise, "adascale": self.ada, "decay": self.decay, "best": self.best}
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        kept = {name: getattr(self, name) for name in self._KEPT}
        buffers = dict(self.model.named_buffers())  # a state dict leaves out some buffers
        state = {
            "model": self.model.state_dict(),
            "buffers": buffers,
            "optimizer": self.optimizer.state_dict(),
        }
        made = {"config": store.as_saved(asdict(self.config)), "random": randomness.random_state()}
        clocks = {name: part.state_dict() for name, part in self._clocks.items()}
        return {**state, **made, **kept, **clocks, **device_random(self.device)}

    def fault_of(self, state: Any) -> str:
        """Return the fault of a checkpoint for this run in words, or an empty text."""
        tables = ("model", "buffers", "optimizer", "random", *self._clocks)
        fault = schema.table_fault(state, dict.fromkeys(tables, schema.is_table))
        if fault := fault or schema.record_fault(state):
            return fault
        if state["step"] > self.total:
            return f"step {state['step']} of {self.total}"
        buffers = dict(self.model.named_buffers())
        for what, now in (("model", self.model.state_dict()), ("buffers", buffers)):
            if fault := checkpoint.tensors_fault(state[what], now, what):
                return fault
        return checkpoint.optimizer_fault(state["optimizer"], self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the run to the state of a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])
        for name, part in self._clocks.items():
            part.load_state_dict(state[name])
        randomness.set_random_state(state["random"])
        set_device_random(self.device, state)
        for name in self._KEPT:
            setattr(self, name, state[name])

    def draw(self, step: int) -> tuple[Tensor, int]:
        """Return the samples of a step, and the seed for random numbers that a Dataset draws."""
        epoch, at = divmod(step, self.per_epoch)
        index = batches(len(self.splits.train), self.config.batch, self.config.seed, epoch)[at]
        return index, generator_of(self.config.seed, step).initial_seed()

    def batch(self) -> Split:
        """Return the batch of the next step."""
        config = self.config
        if self.task.stream is not None:
            fresh = self.task.stream(config.seed, self.step, config.batch)
            return Split(*(t.to(self.device) for t in fresh))
        if self.fetched is not None:
            x, y = self.fetched.at(self.step)
        else:
            x, y = self.splits.train.take(*self.draw(self.step))
        augment = AUGMENTATIONS.get(self.recipe.augment, self.task.augment)
        if augment is not None:
            x = augment(x, generator_of(config.seed, self.step))
        return Split(x, y)

    def verify(self) -> None:
        """Compare the moments of a batch with those of its single samples, before any training.

        Raise a VarregError if they differ. If that cannot be checked, print a note.
        """
        if self.observer is None:
            return
        if self.recipe.groups or self.recipe.batch_norm != "refuse":
            return  # contributions are measured, as requested, not single samples
        report = varreg.verify(self.model, self.task.loss, tuple(self.batch()))
        if report.status == "unknown":
            note = f"varreg: note: the moments of task {self.config.task} cannot be verified."
            print(note, report.reason, report.advice, file=sys.stderr)
        elif not report:
            raise VarregError(
                f"varreg: {self.config.optimizer} cannot be used for task {self.config.task}: its "
                f"moments differ from those of single samples.\n{report}"
            )

    def advance(self) -> None:
        """Do one step, with the evaluations that are due before and after it."""
        if self.step == 0:
            self.evaluate()
        self.train()
        due = self.step % self.config.log_every == 0 or (self.step == 1 and self.noise is None)
        if self.observer is not None and (due or self.is_done):
            self.measure()
        is_epoch = self.step % self.per_epoch == 0 and self.recipe.evaluate == "epochs"
        if self.is_done and self.best is not None:
            self.take_best()
        if is_epoch or self.is_done:
            self.evaluate()

    def train(self) -> None:
        """Do one step, and nothing else."""
        start = time.perf_counter()
        if hasattr(self.optimizer, "snapshot") and self.step % self.per_epoch == 0:
            self.optimizer.snapshot(self.full_gradient)
        x, y = self.batch()

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.task.loss(self.model(x), y)
            loss.backward()
            if self.noise is not None:
                self.noise.update()
            if self.recipe.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
            return loss

        lr = self.config.lr * self.recipe.factor(math.floor(self.progress), self.total)
        lr *= 1.0 if self.decay is None else self.decay.factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.losses.append((self.ada or self.optimizer).step(closure).item())
        if self.decay is not None:
            self.decay.step()
        self.seconds += time.perf_counter() - start
        self.step += 1

    def full_gradient(self) -> None:
        """Set the gradients to those of the mean loss over all training samples."""
        train, n = self.splits.train, len(self.splits.train)
        self.optimizer.zero_grad()
        for part in torch.arange(n).tensor_split(-(-n // 1000)):
            x, y = train.rows(int(part[0]), int(part[-1]) + 1)
            (self.task.loss(self.model(x), y) * (len(y) / n)).backward()

    def evaluate(self) -> None:
        """Evaluate the parameters, or their average if the optimizer keeps one for evaluation."""
        self.evaluates()
        record = {"step": self.step, "seconds": self.seconds}
        swap = getattr(self.optimizer, "swap_average", lambda: None)
        swap()
        for name, split in zip(Splits._fields, self.splits, strict=True):
            if (
                name != "test"
                or self.config.test == "epochs"
                or (self.config.test == "end" and self.is_done)
            ):
                record[f"{name}_loss"], record[f"{name}_accuracy"] = evaluate(
                    self.model, split, self.task, most=EVALUATED if name == "train" else None
                )
        swap()
        for key, values in self.evaluations.items():
            values.append(record.get(key, math.nan))
        if self.best is not None and not self.is_done:
            self.best.see(record["valid_loss"], self.step, self.model)

    def take_best(self) -> None:
        """Set the parameters to those with the lowest validation loss, the last ones included."""
        assert self.best is not None
        self.best.see(evaluate(self.model, self.splits.valid, self.task)[0], self.step, self.model)
        self.best.put_back(self.model)

    def measure(self) -> None:
        """Record λ, ρ and the noise scale, of the model and layer by layer; with a `NoiseScale`,
        its averages since the last time; with AdaScale, gain and progress; with NoiseDecay, its λ.
        """
        assert self.observer is not None
        record: dict[str, float] = {}
        if self.regularizes:
            lambdas = effective_lambdas(self.optimizer, self.named)
            record |= {f"lambda/{k}".rstrip("/"): v for k, v in lambdas.items()}
            seen = self.observer.summary().as_dict()
            record |= {k: v for k, v in seen.items() if k.split("/")[0] in ("rho", "noise_scale")}
        if self.decay is not None:
            record["lambda"] = self.decay.factor
        if self.noise is not None:
            record |= {"trace": self.noise.model.noise, "signal": self.noise.model.signal}
        if self.ada is not None:
            record |= {"gain": self.ada.gain, "progress": self.ada.progress}
        past = len(self.statistics["step"])
        self.statistics["step"].append(self.step)
        for key in record.keys() | (self.statistics.keys() - {"step"}):
            self.statistics.setdefault(key, [math.nan] * past).append(record.get(key, math.nan))

    @property
    def diverged(self) -> bool:
        """Return whether a loss is not finite, of a batch or at the last evaluation."""
        seen = (*self.losses[-1:], *self.evaluations["train_loss"][-1:])
        return not all(map(math.isfinite, seen))

    def result(self) -> dict[str, Any]:
        """Return the contents of `result.json`."""
        kept = {name: getattr(self, name) for name in self._KEPT}
        kept["statistics"] = {key: kept["statistics"][key] for key in sorted(kept["statistics"])}
        return {
            "config": asdict(self.config),
            "environment": environment(),
            "diverged": self.diverged,
            **kept,
        }
