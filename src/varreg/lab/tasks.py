"""What is trained: data, a model for it, and a budget. Each task is a function; its arguments are the task's options."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import pydoc_data.topics
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from varreg.lab import data, models, names


class Split(NamedTuple):
    """Inputs and targets, preloaded."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


class Splits(NamedTuple):
    """Parameters are fitted to `train`, choices are made on `valid`, and `test` is read once, at the end."""

    train: Split
    valid: Split
    test: Split


def right(output: Tensor, y: Tensor) -> Tensor:
    """The share of right answers, where the last dimension of the output holds a score for each class."""
    return (output.argmax(-1) == y).float().mean()


@dataclass(frozen=True)
class Task:
    """Data, a model for it, and a budget."""

    about: str
    load: Callable[[Path | None], Splits]
    """From a data folder, or None, to the three splits."""
    model: Callable[[], nn.Module]
    """A new model, from torch's random state."""
    batch: int
    epochs: int
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    """Of the model's output and the targets; a mean over samples."""
    accuracy: Callable[[Tensor, Tensor], Tensor] | None = right
    """A mean over samples, or None where there is no such thing."""
    stream: Callable[[int, int, int], Split] | None = None
    """Fresh samples for (seed, step, batch), in place of passes over `train`, which is then only evaluated."""


def unit_norm(images: data.Images) -> Split:
    """As in the paper's experiments: every image scaled to Euclidean norm 1."""
    x = images.pixels.float()
    return Split(x / x.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1), images.labels)


def hold_out(train: Split, test: Split, valid: int) -> Splits:
    """The last `valid` training samples, in an order that is always the same, are for choices."""
    if not 0 <= valid < len(train):
        raise ValueError(f"varreg: valid={valid} samples cannot be held out of {len(train)}.")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    fit, choose = order[: len(train) - valid], order[len(train) - valid :]
    return Splits(Split(train.x[fit], train.y[fit]), Split(train.x[choose], train.y[choose]), test)


def _digits(data_dir: Path | None) -> Splits:
    from sklearn.datasets import load_digits  # here, since it takes a second

    embedded = load_digits()
    x, y = torch.tensor(embedded.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(embedded.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:-360], order[-360:]
    return hold_out(Split(x[train], y[train]), Split(x[test], y[test]), 360)


def _fashion_mnist(valid: int, data_dir: Path | None) -> Splits:
    train, test = data.fashion_mnist(data_dir)
    return hold_out(unit_norm(train), unit_norm(test), valid)


def _cifar10(valid: int, data_dir: Path | None) -> Splits:
    train, test = data.cifar10(data_dir)
    return hold_out(unit_norm(train), unit_norm(test), valid)


def digits() -> Task:
    """scikit-learn's embedded 8 × 8 digits, a small CNN."""
    return Task("scikit-learn's embedded 8 × 8 digits, a small CNN", _digits, models.digits_cnn, 64, 15)


def logistic() -> Task:
    """Logistic regression on the same digits: convex."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    return Task("logistic regression on scikit-learn's digits: convex", _digits, model, 64, 15)


def fashion_mnist(valid: int = 10_000) -> Task:
    """The paper's CNN on Fashion-MNIST."""
    return Task("the paper's CNN on Fashion-MNIST", functools.partial(_fashion_mnist, valid), models.paper_cnn, 100, 20)


def cifar10_lenet(valid: int = 5_000) -> Task:
    """LeNet on CIFAR-10, as in the paper."""
    return Task("LeNet on CIFAR-10, as in the paper", functools.partial(_cifar10, valid), models.lenet, 100, 20)


def cifar10_resnet(valid: int = 5_000, width: int = 16) -> Task:
    """ResNet-18 with GroupNorm on CIFAR-10."""
    about = f"ResNet-18 of width {width} with GroupNorm on CIFAR-10"
    return Task(about, functools.partial(_cifar10, valid), functools.partial(models.resnet18, width), 100, 10)


def per_token(output: Tensor, y: Tensor) -> Tensor:
    """The mean over samples of the mean over a sample's tokens."""
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def char_gpt(context: int = 64, layers: int = 2, width: int = 64) -> Task:
    """A character-level GPT on the help texts that come with Python."""

    def load(data_dir: Path | None) -> Splits:
        text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
        codes = torch.tensor([min(ord(c), 127) for c in text])
        windows = codes[: (len(codes) - 1) // context * context + 1].unfold(0, context + 1, context)
        every = Split(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
        a, b = int(0.8 * len(every)), int(0.9 * len(every))
        return Splits(*(Split(every.x[i:j], every.y[i:j]) for i, j in ((0, a), (a, b), (b, len(every)))))

    def model() -> nn.Module:
        return models.GPT(layers, width, max(1, width // 32), 128, context)

    about = f"a character-level GPT ({layers} × {width}, context {context}) on the help texts that come with Python"
    return Task(about, load, model, 32, 10, per_token)


def stream(spread: float = 1.0, noise: float = 1.0, dimension: int = 20) -> Task:
    """Linear regression on a stream whose noise changes from batch to batch.

    Targets are x·w* + σ_t·ε, with log σ_t² normal of standard deviation 2·`spread` and mean σ_t² = `noise`² for every spread: at 0 all
    batches are equally noisy, at 2 a few are very noisy and most are nearly clean. Evaluation is without noise.
    """
    if spread < 0 or noise < 0 or dimension < 1:
        raise ValueError(f"varreg: stream needs spread ≥ 0, noise ≥ 0 and dimension ≥ 1; got {spread}, {noise}, {dimension}.")
    truth = torch.randn(dimension, generator=torch.Generator().manual_seed(0)) / math.sqrt(dimension)

    def clean(n: int, seed: int) -> Split:
        x = torch.randn(n, dimension, generator=torch.Generator().manual_seed(seed))
        return Split(x, (x @ truth).unsqueeze(1))

    def fresh(seed: int, step: int, batch: int) -> Split:
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
        x = torch.randn(batch, dimension, generator=generator)
        sigma = noise * math.exp(spread * float(torch.randn((), generator=generator)) - spread**2)
        return Split(x, (x @ truth + sigma * torch.randn(batch, generator=generator)).unsqueeze(1))

    def load(data_dir: Path | None) -> Splits:
        return Splits(clean(3200, -1), clean(1000, -2), clean(1000, -3))

    about = (
        f"linear regression on a stream, noise of mean square {noise**2:g} that changes from batch to batch (spread {spread:g})"
    )
    return Task(about, load, lambda: nn.Linear(dimension, 1), 32, 10, F.mse_loss, None, fresh)


TASKS: dict[str, Callable[..., Task]] = {
    "digits": digits,
    "logistic": logistic,
    "stream": stream,
    "char-gpt": char_gpt,
    "fashion-mnist": fashion_mnist,
    "cifar10-lenet": cifar10_lenet,
    "cifar10-resnet": cifar10_resnet,
}


def seed_all(seed: int) -> None:
    """Torch's, NumPy's and Python's own random numbers, since a user's task may use any."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def random_state() -> dict[str, Any]:
    """Of torch, NumPy and Python."""
    kind, key, *rest = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(key.astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    kind, key, *rest = state["numpy"]
    np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The same random numbers every time within, and what was before after it."""
    before = random_state()
    seed_all(seed)
    try:
        yield
    finally:
        set_random_state(before)


@functools.cache
def task(spec: str) -> Task:
    """By its name, with options (`stream:spread=2`), or a function of your own that returns a `Task` (`package.module:function,option=value`)."""
    name, _, rest = spec.partition(":")
    function, _, rest_of_own = rest.partition(",")
    if name in TASKS:
        make, options = TASKS[name], names.options(rest, spec)
    elif rest and "=" not in function:
        make, options = imported(name, function), names.options(rest_of_own, spec)
    else:
        raise names.unknown("task", name, TASKS)
    with seeded(0):
        made = names.call(make, options, f"task {spec!r}")
    if isinstance(made, Task) and (made.batch < 1 or made.epochs < 1):
        raise ValueError(f"varreg: task {spec} needs a batch and epochs of at least 1; got {made.batch} and {made.epochs}.")
    if not isinstance(made, Task):
        raise ValueError(f"varreg: {spec} must return a varreg.lab.Task, and returned {type(made).__name__}.")
    return made


def imported(module: str, function: str) -> Callable[..., Task]:
    found = names.imported(module, function, f" Tasks by name: {', '.join(TASKS)}.")
    if not callable(found):
        raise ValueError(f"varreg: module {module!r} has no function {function!r}.")
    return cast("Callable[..., Task]", found)


@functools.lru_cache(maxsize=1)
def load(spec: str, data_dir: Path | None) -> Splits:
    """The splits of a task, read once in a process and checked."""
    made = task(spec)
    with seeded(0):
        splits = made.load(data_dir)
    if not isinstance(splits, tuple) or len(splits) != 3:
        raise ValueError(
            f"varreg: task {spec} must load varreg.lab.Splits(train, valid, test), and loaded {type(splits).__name__}."
        )
    return Splits(*(_checked(spec, name, split) for name, split in zip(Splits._fields, splits, strict=True)))


def _checked(spec: str, name: str, split: Any) -> Split:
    what = f"the {name} split of task {spec}"
    pair = list(split) if isinstance(split, tuple) else []  # not len(split), which is the number of samples
    if len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
        raise ValueError(f"varreg: {what} must be varreg.lab.Split(x, y), of two tensors; got {type(split).__name__}.")
    x, y = pair
    if not x.dim() or not y.dim() or len(x) != len(y):
        raise ValueError(
            f"varreg: {what} has inputs of shape {tuple(x.shape)} and targets of shape {tuple(y.shape)}: one of each is needed."
        )
    for t, word in ((x, "inputs"), (y, "targets")):
        if t.is_floating_point() and not t.isfinite().all():
            raise ValueError(f"varreg: {what} has {word} that are not finite.")
    return Split(x, y)


def fingerprint(spec: str, splits: Splits, model: nn.Module) -> str:
    """Of a task's data (all targets, and a thousand inputs of each split) and of its model's parameters, to tell when either changed."""
    whole = hashlib.sha256()
    for x, y in splits:
        rows = x[:: max(1, len(x) // 1000)].contiguous()
        for t in (rows, y):
            whole.update(f"{t.dtype} {tuple(t.shape)} {len(x)}".encode())
            whole.update(t.cpu().contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    for name, p in model.named_parameters():
        dtype = "" if p.dtype == torch.float32 else f" {p.dtype}"  # as it was before dtypes were in it
        whole.update(f"{name} {tuple(p.shape)}{dtype}".encode())
    return whole.hexdigest()[:16]


def check(spec: str, data_dir: Path | None, batch: int) -> str:
    """Before any training: can the model be trained on the data? Its fingerprint."""
    made, splits = task(spec), load(spec, data_dir)
    for name, split in zip(Splits._fields, splits, strict=True):
        if name != "valid" and not len(split):
            raise ValueError(f"varreg: the {name} split of task {spec} is empty.")
    try:
        with seeded(0):
            model = made.model()
        x, y = splits.train.x[:batch], splits.train.y[:batch]
        model.eval()
        output = model(x)
        loss = made.loss(output, y)
        check_loss(made.loss, loss, output, y, f"the loss of task {spec}")
    except Exception as error:
        if str(error).startswith("varreg: "):
            raise
        raise ValueError(
            f"varreg: task {spec}: its model and loss cannot be used on its data ({type(error).__name__}: {error})."
        ) from error
    if not list(model.parameters()):
        raise ValueError(f"varreg: the model of task {spec} has no parameters.")
    return fingerprint(spec, splits, model)


def check_loss(loss_of: Callable[..., Any], loss: Any, output: Any, y: Any, what: str) -> None:
    """Is it a single number, and a mean over samples? A sum, or what mixes samples, is found out by halves of the batch."""
    if not isinstance(loss, Tensor) or loss.dim():
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"varreg: {what} must be a single number, a mean over samples; got {got}.")
    m = next(len(t) for t in tree_leaves(y) if isinstance(t, Tensor))
    if m < 2:
        return
    halves = []
    for half in (slice(0, m // 2), slice(m // 2, None)):
        these = tree_map(lambda t, half=half: t[half] if isinstance(t, Tensor) else t, (output, y))
        halves.append(loss_of(*these) * (len(range(m)[half]) / m))
    if not torch.isclose(loss, halves[0] + halves[1], rtol=1e-3, atol=1e-5):
        raise ValueError(
            f"varreg: {what} is not a mean over samples: of {m} samples it is {loss.item():.6g}, and the "
            f"weighted mean of its two halves is {(halves[0] + halves[1]).item():.6g}."
        )
