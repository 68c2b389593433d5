"""Where the batch is in a tensor: which of its rows belong to which sample.

A tensor that carries the batch has one of three places:

- `Layout`: dimension `dim` is, in row-major order, `[outer, batch, inner]` flattened. A plain
  batch-first tensor has `dim=0, outer=inner=1`; attention's `[time·batch, features]` has
  `outer=time`; `[batch·windows, …]` has `inner=windows`.
- `Ragged`: row r of dimension `dim` belongs to sample `owner[r]`, in any order and number: tokens
  that a mask picked, samples that were sorted.
- `Single`: the whole tensor belongs to one sample, as `x[i]` does in a loop over samples.

`Lost` and `Summed` tensors depend on the batch and have no place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varreg.thresholds import OWNERS


class Layout(NamedTuple):
    """The batch of `batch` samples sits in dimension `dim`: `[outer, batch, inner]` flattened."""

    batch: int
    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def plain(self) -> bool:
        """Return whether each sample has one row of the dimension."""
        return self.outer == self.inner == 1

    @property
    def size(self) -> int:
        """Return the number of rows."""
        return self.outer * self.batch * self.inner


class Owners:
    """The sample that each row belongs to; −1 for a row that belongs to no sample. Compared by
    value.
    """

    __slots__ = ("of",)

    def __init__(self, of: Tensor):
        self.of = of.to("cpu", torch.int64)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owners) and torch.equal(self.of, other.of)

    def __hash__(self) -> int:
        return hash((len(self.of), int(self.of.sum())))

    def __repr__(self) -> str:
        return f"Owners({self.of.tolist()})"


class Ragged(NamedTuple):
    """Row r of dimension `dim` belongs to sample `owners.of[r]`."""

    batch: int
    dim: int
    owners: Owners

    @property
    def plain(self) -> bool:
        return False

    @property
    def size(self) -> int:
        return len(self.owners.of)

    @property
    def is_whole(self) -> bool:
        """Return whether every row belongs to a sample."""
        return bool((self.owners.of >= 0).all())

    @property
    def repeats(self) -> bool:
        """Return whether there are as many rows as samples, but not one of each."""
        owners = self.owners.of
        return len(owners) == self.batch and len(owners.unique()) < self.batch

    @property
    def is_in_order(self) -> bool:
        """Return whether samples follow each other as in the batch."""
        return self.is_whole and bool((self.owners.of.diff() >= 0).all())


class Single(NamedTuple):
    """All of the tensor belongs to sample `sample`."""

    batch: int
    sample: int


Place = Layout | Ragged | Single


class Lost(NamedTuple):
    """The tensor depends on the batch, but no row of it belongs to one known sample."""

    why: str
    mixed: bool = False
    """Samples were mixed, or their order changed: no sample has a gradient of its own."""


class Summed(NamedTuple):
    """A sum over samples, such as a mean loss. Its gradient still separates the samples, as long as
    only linear operations follow.
    """

    batch: int


Where = Layout | Ragged | Single | Lost | Summed


# ---- from rows to samples ------------------------------------------------------------------------


def as_rows(t: Tensor, dim: int = 0) -> Tensor:
    """Return a tensor as a matrix with the rows of a dimension, also if there are none."""
    rows = t.movedim(dim, 0)
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def owners_of(at: Layout | Ragged) -> Tensor:
    """Return the sample that each row of dimension `at.dim` belongs to."""
    return at.owners.of if isinstance(at, Ragged) else _owners_of_layout(at)


@functools.lru_cache(maxsize=OWNERS)
def _owners_of_layout(at: Layout) -> Tensor:
    return torch.arange(at.batch, device="cpu").repeat_interleave(at.inner).repeat(at.outer)


def samples(t: Tensor, at: Place) -> Tensor:
    """Return the tensor with the batch in front: `[batch, …before, (outer, inner,) …after]`.

    A ragged tensor becomes `[batch, most rows, …]`: samples with fewer rows end with rows of zeros.
    """
    if isinstance(at, Single):
        return torch.zeros((at.batch, *t.shape), dtype=t.dtype, device=t.device).index_copy_(
            0, torch.tensor([at.sample], device=t.device), t.unsqueeze(0)
        )
    if isinstance(at, Ragged):
        return _padded(t.movedim(at.dim, 0), at)
    if at.plain:
        return t.movedim(at.dim, 0) if at.dim else t
    unfolded: Tensor = t.unflatten(at.dim, (at.outer, at.batch, at.inner))
    return unfolded.movedim(at.dim + 1, 0)


def _padded(t: Tensor, at: Ragged) -> Tensor:
    owner = at.owners.of
    assert at.is_whole
    counts = torch.bincount(owner, minlength=at.batch)
    order = owner.argsort(stable=True)
    sorted_owner = owner[order]
    position = torch.arange(len(owner), device="cpu") - (counts.cumsum(0) - counts)[sorted_owner]
    most = int(counts.max()) if len(counts) else 0
    out = torch.zeros((at.batch * most, *t.shape[1:]), dtype=t.dtype, device=t.device)
    where = (sorted_owner * most + position).to(t.device)
    out.index_copy_(0, where, t.index_select(0, order.to(t.device)))
    padded: Tensor = out.unflatten(0, (at.batch, most))
    return padded


def rows(t: Tensor, at: Place, features: int = 1) -> Tensor:
    """Return `[batch, rows, …features]`: in each sample, all other dimensions become rows."""
    if at != (at.batch, 0, 1, 1):  # else the batch is in front already
        t = samples(t, at)
    tail = t.shape[t.dim() - features :]
    return t.reshape(at.batch, math.prod(t.shape[1 : t.dim() - features]), *tail)


def per_sample(t: Tensor, at: Place) -> Tensor:
    """Return `[batch, …]`, summed over the rows of each sample: `t`'s shape, with 1 for `dim`."""
    if isinstance(at, Single):
        return samples(t, at)
    found = samples(t, at)
    if isinstance(at, Ragged):
        found = found.sum(1)
    elif not at.plain:
        found = found.sum((at.dim + 1, at.dim + 2))
    return found.unsqueeze(at.dim + 1)


def narrow(t: Tensor, at: Place, start: int, stop: int) -> Tensor | None:
    """Return the rows of the samples `start:stop`, in the same layout; None if they have no
    rows.
    """
    if isinstance(at, Single):
        return t if start <= at.sample < stop else None
    if isinstance(at, Ragged):
        owner = at.owners.of
        chosen = ((owner >= start) & (owner < stop)).nonzero().flatten()
        return t.index_select(at.dim, chosen.to(t.device)) if len(chosen) else None
    if at.plain:
        return t.narrow(at.dim, start, stop - start)
    unfolded: Tensor = t.unflatten(at.dim, (at.outer, at.batch, at.inner))
    part: Tensor = unfolded.narrow(at.dim + 1, start, stop - start)
    return part.flatten(at.dim, at.dim + 2)


def only_sample(t: Tensor) -> Layout | Single:
    """Return the place of a tensor in a batch of one sample: all elements belong to that sample."""
    return Layout(1, 0, 1, t.shape[0]) if t.dim() else Single(1, 0)


# ---- sample numbers, moved in place of data to see where samples go ------------------------------

NOBODY = -1


def numbers(t: Tensor, at: Place | None) -> Tensor:
    """Return a tensor of `t`'s shape that holds, for each element, the number of the sample that
    owns it. It takes little memory: all strides but one are 0. Elements of constants belong to no
    sample.
    """
    if at is None or isinstance(at, Single):
        value = NOBODY if at is None else at.sample
        return torch.full((), value, dtype=torch.int32, device=t.device).expand(t.shape)
    owner = owners_of(at).to(t.device, torch.int32)
    return owner.view([-1 if d == at.dim else 1 for d in range(t.dim())]).expand(t.shape)


def place_of(moved: Tensor, batch: int) -> Place | None:
    """Return the place that sample numbers show; None where they follow no single dimension."""
    if not moved.numel():
        dim = list(moved.shape).index(0)
        return Ragged(batch, dim, Owners(torch.empty(0, device="cpu")))
    if not moved.dim():
        return Single(batch, int(moved)) if int(moved) != NOBODY else None
    found = [(d, o) for d in range(moved.dim()) if (o := _owners_along(moved, d)) is not None]
    known = [(d, o) for d, o in found if bool((o != NOBODY).any())]
    if not known:
        return None
    if batch == 1:
        return Layout(1, 0, 1, moved.shape[0])
    if len(known) == moved.dim() and all(bool((o == o[0]).all()) for _, o in known):
        return Single(batch, int(known[0][1][0]))  # all elements belong to the same sample
    regular = [at for d, o in known if (at := _regular(o, batch, d)) is not None]
    if len(regular) == 1:
        return regular[0]
    # If one sample owns some rows and nobody the others, the dimension with both tells the rows.
    telling = [(d, o) for d, o in known if bool((o != o[0]).any())]
    return Ragged(batch, telling[0][0], Owners(telling[0][1])) if len(telling) == 1 else None


def _owners_along(moved: Tensor, dim: int) -> Tensor | None:
    """Return the owner of each row along `dim`; None if a row belongs to several samples."""
    varying = [d for d, n in enumerate(moved.shape) if n > 1 and moved.stride(d) != 0]
    if len(varying) <= 1:  # a view: one line of it has all owners, and nothing is copied
        line = moved[tuple(slice(None) if d in varying else 0 for d in range(moved.dim()))].cpu()
        if varying == [dim]:
            return line
        several = line[line != NOBODY].unique()
        number = (
            several[0] if len(several) else torch.tensor(NOBODY, dtype=moved.dtype, device="cpu")
        )
        return number.expand(moved.shape[dim]) if len(several) <= 1 else None
    by_row = moved.movedim(dim, 0).flatten(1)
    most = by_row.amax(1, keepdim=True)
    if not bool(((by_row == most) | (by_row == NOBODY)).all()):
        return None
    return most[:, 0].cpu()


def _regular(owner: Tensor, batch: int, dim: int) -> Layout | None:
    """Return the layout in which rows have these owners, if there is one and only one."""
    size = len(owner)
    if not batch or size % batch:
        return None
    owned = owner != NOBODY
    fits = []
    for inner in _divisors(size // batch):
        at = Layout(batch, dim, size // (batch * inner), inner)
        if torch.equal(owners_of(at)[owned], owner[owned].long()):
            fits.append(at)
    return fits[0] if len(fits) == 1 else None


def _divisors(n: int) -> Sequence[int]:
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})
