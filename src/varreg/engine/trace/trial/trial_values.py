"""Tools of trials: split the samples, replace values of some of them, and compare results."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from varreg import _torch, devices
from varreg.engine.trace.layout import Layout, Place, Single, as_rows, owners_of
from varreg.thresholds import SAME, SAME_AT_MOST, SAME_TO_LARGEST, USUAL_SIZES

Run = Callable[[list[Tensor]], list[Tensor]]
"""The function under trial: from tensors that carry the batch to its results."""
FAILURES = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError)
"""Errors of a function that does not accept the values of a trial."""


class _Seed(threading.local):
    """The seed from which random functions draw in a trial."""

    value = 0


class _Trials(threading.local):
    """The number of trials that run in this thread, one inside of another."""

    number = 0


_seed, _trials = _Seed(), _Trials()


def is_trial_running() -> bool:
    """Return whether a trial runs in this thread. Its random numbers must not count as the
    user's.
    """
    return _trials.number > 0


class Verdict(enum.Enum):
    """The result of a trial."""

    APART = "samples are kept apart"
    MIXED = "samples meet, or change places"
    UNDECIDED = "the trial says nothing"


def splits(batch: int) -> Iterator[Tensor]:
    """Yield masks of samples. For any two samples, some mask has the first and not the second."""
    code = torch.randperm(batch, device="cpu")
    for bit in range(max(batch - 1, 1).bit_length()):  # two samples differ in some bit
        side = (code >> bit) % 2 == 1
        yield side
        yield ~side


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore random generators after the `with` block, and keep its tensors out of checkpoints
    around it.

    A checkpoint that saved tensors of a trial would not find them when it runs again without the
    trial.
    """
    with devices.kept_generators(), contextlib.ExitStack() as stack:
        if _torch.saved_tensors_hooks is None or _torch.saved_tensors_hooks(True) is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_identity, _identity))
        _trials.number += 1
        try:
            yield
        finally:
            _trials.number -= 1


def _identity(t: Tensor) -> Tensor:
    return t


@contextlib.contextmanager
def same_random_numbers(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Make random functions draw the same numbers in each `with` block, and restore the
    generators.
    """
    used = {t.device for t in inputs}
    with devices.kept_generators(used):
        devices.seed_generators(_seed.value, used)
        yield


@contextlib.contextmanager
def other_random_numbers() -> Iterator[None]:
    """Make random functions draw other numbers than in the rest of the trial, inside of the `with`
    block.
    """
    _seed.value = 1
    try:
        yield
    finally:
        _seed.value = 0


def rows_of(t: Tensor, at: Place, chosen: Tensor) -> Tensor:
    """Return a mask that broadcasts to `t`: the rows that belong to chosen samples."""
    if isinstance(at, Single):
        return chosen[at.sample].to(t.device)
    owners = owners_of(at)
    mask = chosen[owners.clamp(min=0)] & (owners >= 0)
    return mask.view([-1 if d == at.dim else 1 for d in range(t.dim())]).to(t.device)


def shuffle(t: Tensor, at: Place, order: Tensor) -> Tensor | None:
    """Return the tensor with samples in another order; None if they differ in size."""
    if not isinstance(at, Layout):
        return None
    rows = (
        torch.arange(at.size, device="cpu").view(at.outer, at.batch, at.inner)[:, order].flatten()
    )
    return t.index_select(at.dim, rows.to(t.device))


def shuffle_all(inputs: list[Tensor], places: Sequence[Place], order: Tensor) -> list[Tensor]:
    """Return all inputs with samples in `order`, which may name one sample more than once."""
    shuffled = [shuffle(t, at, order) for t, at in zip(inputs, places, strict=True)]
    return [t for t in shuffled if t is not None]


def are_alike(t: Tensor, at: Place) -> bool:
    """Return whether all samples have the same values."""
    if not isinstance(at, Layout) or at.batch == 1:
        return False
    other = shuffle(t, at, torch.arange(at.batch, device="cpu").roll(1))
    return other is not None and torch.equal(t, other)


def noise_like(t: Tensor) -> Tensor:
    """Return normal random values with the standard deviation of `t`, or 1 if that is extreme."""
    size = spread(t)
    return torch.randn_like(t) * (size if USUAL_SIZES[0] < size < USUAL_SIZES[1] else 1.0)


def spread(t: Tensor) -> float:
    """Return the standard deviation of a tensor's values; 0 for a single value."""
    return float(devices.widest(t.detach()).std()) if t.numel() > 1 else 0.0


def random_like(t: Tensor, positive: bool, below: int = 0) -> Tensor:
    """Return random values with the shape, type and spread of a tensor.

    Whole numbers are drawn from those of the tensor, or below a limit.
    """
    if t.dtype is torch.bool:
        return torch.rand(t.shape, device=t.device) < 0.5
    if t.is_complex():
        return torch.randn_like(t)
    if not t.is_floating_point():  # any other number might not be a valid index
        if below:
            return torch.randint(below, t.shape, device=t.device, dtype=t.dtype)
        return t.flatten()[torch.randint(t.numel(), t.shape, device=t.device)]
    return torch.rand_like(t) * 0.8 + 0.1 if positive else noise_like(t)


def other_order(batch: int) -> Tensor:
    """Return a random order in which no sample stays in its place."""
    ring = torch.randperm(batch, device="cpu")
    return torch.empty_like(ring).index_copy_(0, ring, ring.roll(1))


def other_samples(inputs: list[Tensor], places: Sequence[Place]) -> list[Tensor]:
    """Return inputs in which every sample has the values of another, or random ones."""
    order = other_order(places[0].batch)
    others = []
    for t, at in zip(inputs, places, strict=True):
        shuffled = shuffle(t, at, order)
        others.append(random_like(t, positive=False) if shuffled is None else shuffled)
    return others


def exchange(
    inputs: list[Tensor], others: list[Tensor], places: Sequence[Place], chosen: Tensor
) -> list[Tensor]:
    """Return the inputs, with the values of chosen samples replaced by others."""
    return [
        torch.where(rows_of(t, at, chosen), o, t)
        for t, o, at in zip(inputs, others, places, strict=True)
    ]


def is_close(a: Tensor, b: Tensor, times: float = 1.0) -> Tensor:
    """Return, element by element, whether two tensors are equal within `times` the usual rounding,
    relative to the largest value.
    """
    if not (a.is_floating_point() or a.is_complex()):
        return a == b
    eps = min(times * SAME * torch.finfo(a.dtype).eps, SAME_AT_MOST)
    finite = a.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    scale = float(finite.max()) if a.numel() else 0.0
    return torch.isclose(a, b, rtol=eps, atol=eps * SAME_TO_LARGEST * scale, equal_nan=True)


def samples_in(mask: Tensor, at: Place) -> Tensor:
    """Return the samples that have a True in their rows of the mask."""
    out = torch.zeros(at.batch, dtype=torch.bool, device="cpu")
    if isinstance(at, Single):
        out[at.sample] = bool(mask.any())
        return out
    by_row = as_rows(mask, at.dim).any(1).cpu()
    owners = owners_of(at)[by_row]
    out[owners[owners >= 0]] = True
    return out
