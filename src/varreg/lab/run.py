"""One training run, in a folder of its own, that can be killed at any moment and goes on where it was.

The folder has `config.json`; while it runs, `checkpoint.pt`; and at the end `result.json` and `weights.pt`. A run that was killed and started again
ends bit for bit as one that was not: batches depend on the seed and the step alone, and a checkpoint holds all else, metrics included.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import varreg
from varreg.lab import names, optimizers, saved, store, tasks
from varreg.lab.environment import environment
from varreg.lab.tasks import Split, Splits, Task

Results = dict[str, dict[str, Any]]
"""Of runs, by their names."""
EVALUATED = 10_000
"""At most so many training samples are looked at to evaluate the training loss: always the same ones."""


_LONGEST = 246
"""Bytes of a name before its checksum: file systems take 255 in all."""


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
    """Steps between two looks at λ, ρ and the noise."""
    test: Literal["never", "end", "epochs"] = "never"
    """When the test split is read: never where choices are made, at the end for a verdict, after every epoch for a figure."""

    @property
    def name(self) -> str:
        """Of the folder: what a person looks for, and a checksum of all of it, so that no two runs share one."""
        whole = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        said = f"{self.task} {names.spell(self.optimizer, self.options)} lr={self.lr:g} seed={self.seed}"
        said = said.replace("/", "-")[:160].encode()[:_LONGEST].decode(errors="ignore")
        return f"{said} {whole}"


@functools.lru_cache(maxsize=2)
def batches(n: int, batch: int, seed: int, epoch: int) -> tuple[Tensor, ...]:
    """The indices of an epoch's batches; what is left at its end is left out, so that all batches are of one size."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))
    return tuple(order[: n // batch * batch].split(batch))


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, task: Task, batch: int = 250) -> tuple[float, float]:
    """Mean loss and accuracy; nan where there is none."""
    was, total, right = model.training, 0.0, 0.0 if task.accuracy and len(split) else math.nan
    model.eval()
    for x, y in zip(split.x.split(batch), split.y.split(batch), strict=True):
        output = model(x)
        total += float(task.loss(output, y)) * len(y)
        right += float(task.accuracy(output, y)) * len(y) if task.accuracy else 0.0
    model.train(was)
    return (total / len(split), right / len(split)) if len(split) else (math.nan, math.nan)


def effective_lambdas(optimizer: Any, named: Sequence[tuple[str, Tensor]]) -> dict[str, float]:
    """λ of the last step: its mean, weighted by squared gradients, of each parameter and ("") of all; and ("mean") its plain mean over all."""
    out, weighted, weight, plain, count = {}, 0.0, 0.0, 0.0, 0
    for name, p in named:
        lam = optimizer.lambda_of(p)
        if lam is None or p.grad is None:
            continue
        square = p.grad.square()
        a, b = float((square * lam).sum()), float(square.sum())
        out[name] = a / b if b else math.nan
        weighted, weight, plain, count = weighted + a, weight + b, plain + float(lam.mean()) * p.numel(), count + p.numel()
    return {**out, "": weighted / weight, "mean": plain / count} if weight else out


class Run:
    """A run in progress: what a checkpoint holds."""

    def __init__(self, config: Config, splits: Splits | None = None, data_dir: Path | None = None):
        self.config, self.task = config, tasks.task(config.task)
        optimizers.check(config.optimizer, config.options)
        if self.task.stream is not None and config.optimizer == "SVRG":
            raise ValueError(f"varreg: SVRG needs the gradient of all samples, and task {config.task!r} is a stream without end.")
        self.splits = splits or tasks.load(config.task, data_dir)
        self.per_epoch = len(self.splits.train) // config.batch
        self.total = self.per_epoch * config.epochs
        if not self.total:
            raise ValueError(
                f"varreg: {config.epochs} epochs of {len(self.splits.train)} samples hold no batch of {config.batch}."
            )
        if config.test != "epochs" and not len(self.splits.valid):
            raise ValueError(
                f"varreg: task {config.task!r} has no validation split, and choices are made on it: hold some samples out."
            )
        tasks.seed_all(config.seed)
        self.model = self.task.model()
        self.named = list(self.model.named_parameters())
        self.optimizer: Any = optimizers.build(config.optimizer, self.named, config.lr, config.options)
        measures = (
            optimizers.entry(config.optimizer).regularized and config.options.get("s") != 0
        )  # with s = 0, it is the base to the bit
        self.observer = varreg.observe(self.model) if measures else None
        self.seen = Split(self.splits.train.x[:EVALUATED], self.splits.train.y[:EVALUATED])
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []
        self.evaluations: dict[str, list[float]] = {column: [] for column in saved.EVALUATIONS}
        self.statistics: dict[str, list[float]] = {"step": []}

    _KEPT = ("step", "seconds", "losses", "evaluations", "statistics")

    def state_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in self._KEPT}
        buffers = dict(self.model.named_buffers())  # those that a state dict leaves out, too
        state = {"model": self.model.state_dict(), "buffers": buffers, "optimizer": self.optimizer.state_dict()}
        made = {"config": store.as_saved(asdict(self.config)), "random": tasks.random_state()}
        return {**state, **made, **kept}

    def fault_of(self, state: Any) -> str:
        """Say what is wrong with a checkpoint for this run, or nothing."""
        tables = ("model", "buffers", "optimizer", "random")
        fault = saved.table_fault(state, dict.fromkeys(tables, saved.is_table))
        if fault := fault or saved.record_fault(state):
            return fault
        if state["step"] > self.total:
            return f"step {state['step']} of {self.total}"
        buffers = dict(self.model.named_buffers())
        for what, now in (("model", self.model.state_dict()), ("buffers", buffers)):
            if fault := _tensors_fault(state[what], now, what):
                return fault
        return _optimizer_fault(state["optimizer"], self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])
        tasks.set_random_state(state["random"])
        for name in self._KEPT:
            setattr(self, name, state[name])

    def batch(self) -> Split:
        config, train = self.config, self.splits.train
        if self.task.stream is not None:
            return self.task.stream(config.seed, self.step, config.batch)
        index = batches(len(train), config.batch, config.seed, self.step // self.per_epoch)[self.step % self.per_epoch]
        return Split(train.x[index], train.y[index])

    def verify(self) -> None:
        """Compare what the optimizer will be told of samples with single samples, before it trains.

        Moments that are not theirs are an error. Where it cannot be told, there is a note.
        """
        if self.observer is None:
            return
        found = varreg.verify(self.model, self.task.loss, tuple(self.batch()))
        if found.status == "unknown":
            said = f"varreg: note: the moments of task {self.config.task} cannot be verified."
            print(said, found.reason, found.advice, file=sys.stderr)
        elif not found:
            raise ValueError(
                f"varreg: {self.config.optimizer} cannot be used for task {self.config.task}: what "
                f"it would be told of samples is not what single samples say.\n{found}"
            )

    def advance(self) -> None:
        """One step, with the evaluations that are due before and after it."""
        if self.step == 0:
            self.evaluate()
        start = time.perf_counter()
        if hasattr(self.optimizer, "snapshot") and self.step % self.per_epoch == 0:
            self.optimizer.snapshot(self.full_gradient)
        x, y = self.batch()

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.task.loss(self.model(x), y)
            loss.backward()
            return loss

        self.losses.append(self.optimizer.step(closure).item())
        self.seconds += time.perf_counter() - start
        self.step += 1
        if self.observer is not None and (self.step % self.config.log_every == 0 or self.step == 1):
            self.measure()
        if self.step % self.per_epoch == 0:
            self.evaluate()

    def full_gradient(self) -> None:
        """The gradient of the mean over all training samples."""
        train, n = self.splits.train, len(self.splits.train)
        self.optimizer.zero_grad()
        parts = -(-n // 1000)
        for x, y in zip(train.x.tensor_split(parts), train.y.tensor_split(parts), strict=True):
            (self.task.loss(self.model(x), y) * (len(y) / n)).backward()

    def evaluate(self) -> None:
        """Of the parameters, or of their average where the optimizer keeps one to be used."""
        record = {"step": self.step, "seconds": self.seconds}
        swap = getattr(self.optimizer, "swap_average", lambda: None)
        swap()
        for name, split in zip(Splits._fields, (self.seen, *self.splits[1:]), strict=True):
            if name != "test" or self.config.test == "epochs" or (self.config.test == "end" and self.step == self.total):
                record[f"{name}_loss"], record[f"{name}_accuracy"] = evaluate(self.model, split, self.task)
        swap()
        for key, values in self.evaluations.items():
            values.append(record.get(key, math.nan))

    def measure(self) -> None:
        """λ, ρ and the noise scale, of all and layer by layer."""
        assert self.observer is not None
        record = {f"lambda/{k}".rstrip("/"): v for k, v in effective_lambdas(self.optimizer, self.named).items()}
        record |= {k: v for k, v in self.observer.summary().as_dict().items() if not k.startswith("snr")}
        past = len(self.statistics["step"])
        self.statistics["step"].append(self.step)
        for key in record.keys() | (self.statistics.keys() - {"step"}):
            self.statistics.setdefault(key, [math.nan] * past).append(record.get(key, math.nan))

    @property
    def diverged(self) -> bool:
        """Is a loss not finite, of a batch or at the last evaluation?"""
        seen = (*self.losses[-1:], *self.evaluations["train_loss"][-1:])
        return not all(map(math.isfinite, seen))

    def result(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in self._KEPT}
        kept["statistics"] = {key: kept["statistics"][key] for key in sorted(kept["statistics"])}
        return {"config": asdict(self.config), "environment": environment(), "diverged": self.diverged, **kept}


def _tensors_fault(was: dict[str, Any], now: dict[str, Any], what: str) -> str:
    """Say which tensor is missing, unknown, or of another shape or dtype. Torch itself would cast."""
    if set(was) != set(now):
        return f"other names in its {what}: {', '.join(map(repr, sorted(set(was) ^ set(now))[:3]))}"
    for name, t in now.items():
        if isinstance(t, Tensor) and _form(was[name]) != _form(t):
            return f"{_form(was[name])} for {name!r} of its {what}, which is {_form(t)}"
    return ""


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return saved.kind(value)
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _optimizer_fault(was: dict[str, Any], optimizer: Any) -> str:
    """Say which option or state is not that of this optimizer."""
    if fault := saved.table_fault(was, {"state": saved.is_table}):
        return f"an optimizer with {fault}"
    old, new = was.get("param_groups"), optimizer.state_dict()["param_groups"]
    if not isinstance(old, list) or len(old) != len(new) or not all(map(saved.is_table, old)):
        return "other groups of parameters in its optimizer"
    for a, b in zip(old, new, strict=True):
        if not set(b) <= set(a) or a["params"] != b["params"]:  # a step may add its own to them
            return "other options or parameters in its optimizer"
    params = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    for i, state in was["state"].items():
        if i not in params or not saved.is_table(state):
            return f"a state of its optimizer for an unknown parameter {i!r}"
        for key, t in state.items():
            if isinstance(t, Tensor) and t.dtype not in _state_dtypes(t, params[i]):
                return f"{_form(t)} for {key!r} of its optimizer, of a parameter of {_form(params[i])}"
    return ""


def _state_dtypes(state: Tensor, p: Tensor) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a state of a parameter may have: sums over half precision are single."""
    if not state.is_floating_point() or not state.dim() or state.shape != p.shape:
        return (state.dtype,)
    return (p.dtype, torch.float32) if p.dtype.itemsize < 4 else (p.dtype,)


ANEW = "Delete it, and the same command runs this run anew; or restore it."


def read_result(folder: Path, config: Config) -> dict[str, Any] | None:
    """The result of this configuration in a run's folder, or None where it did not end yet.

    One that is damaged, or of another configuration, is a `store.DamagedError`.
    """
    path = folder / "result.json"
    store.check_inside(folder.parent, path)
    if not path.exists():
        return None
    result: dict[str, Any] = store.read_json(path, ANEW)
    _check_config(path, result, config)
    if fault := saved.result_fault(result, config.epochs):
        raise store.damaged(path, "the result of a run", fault, ANEW)
    return result


def _check_config(path: Path, found: Any, config: Config) -> None:
    """Refuse what was made with another configuration: the name of its folder proves nothing."""
    if fault := saved.table_fault(found, {"config": saved.is_table}):
        raise store.damaged(path, "the configuration that it was made with", fault, ANEW)
    other = saved.differences(found["config"], store.as_saved(asdict(config)))
    if other:
        raise store.DamagedError(f"varreg: {path} comes from another configuration ({store.printable(other)}). {ANEW}")


def resume(going: Run, folder: Path) -> None:
    """Set a run to where the checkpoint in its folder says it was; without one, do nothing."""
    path, about = folder / "checkpoint.pt", folder / "config.json"
    if not path.exists():
        return
    state = store.read_tensors(path, ANEW)
    if saved.is_table(state) and "config" not in state and about.exists():  # of a version before
        said = store.read_json(about, ANEW)
        state["config"] = said.get("config") if saved.is_table(said) else said
    _check_config(path, state, going.config)
    if fault := going.fault_of(state):
        raise store.damaged(path, "a checkpoint of this run", fault, ANEW)
    try:
        going.load_state_dict(state)
    except Exception as error:  # of torch, NumPy or Python, each with kinds of its own
        came = f"one that does not fit ({type(error).__name__}: {error})"
        raise store.damaged(path, "a checkpoint of this run", came, ANEW) from error


class StoppedError(Exception):
    """A run that was asked to stop, and can be gone on with."""


def run(
    config: Config,
    folder: Path,
    splits: Splits | None = None,
    data_dir: Path | None = None,
    every: float = 5.0,
    progress: Callable[[int, int], None] = lambda step, total: None,
    stop: Callable[[], bool] = lambda: False,
    patience: float | None = None,
) -> dict[str, Any]:
    """Train to the end, from wherever the folder says it was, with a checkpoint `every` so many seconds; the result, as in `result.json`.

    `progress` is told the step and their number now and then; once `stop()` is true, a last checkpoint is written and `StoppedError` raised.
    Where another process is at work on it for more than `patience` seconds, it is a `store.BusyError`.
    """
    store.check_inside(folder, folder / config.name)
    folder = folder / config.name
    store.check_writable(folder)
    with store.alone(folder, "this run", patience):
        done = read_result(folder, config)
        return done if done is not None else train(Run(config, splits, data_dir), folder, every, progress, stop)


def train(
    going: Run, folder: Path, every: float, progress: Callable[[int, int], None], stop: Callable[[], bool]
) -> dict[str, Any]:
    """What `run` does, for a run that was built."""
    config = going.config
    store.sweep(folder)
    resume(going, folder)
    store.write_json(folder / "config.json", {"config": asdict(config), "environment": environment()})
    saved = shown = time.monotonic()
    while going.step < going.total and not going.diverged:
        going.advance()
        now, stopped = time.monotonic(), stop()
        if now - saved >= every or stopped:
            store.write_tensors(folder / "checkpoint.pt", going.state_dict())
            saved = time.monotonic()
        if now - shown >= min(every, 0.2):
            progress(going.step, going.total)
            shown = now
        if stopped:
            raise StoppedError(config.name)
    store.write_tensors(folder / "weights.pt", going.model.state_dict())
    store.write_json(folder / "result.json", going.result())
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    done: dict[str, Any] = store.read_json(folder / "result.json")
    return done
