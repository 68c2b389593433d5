"""What each sample contributes to a gradient, and the two sums that the method needs of it.

Sample i's contribution c_i to the gradient of a parameter is defined by p.grad = Σ c_i, whatever the loss reduction, loss
scale or accumulation factor is. The batch is split into groups (`Partition`), in the exact case one sample each, and

    S = Σ_u C_u          C_u = Σ_{i in group u} c_i, of n_u samples
    W = Σ_u C_u² / n_u   (for one sample per group: Σ c_i²)

are all that moments need; both add up over micro-batches and ranks. A `Contribution` knows how to produce C_u for a few
groups at a time, so that nothing of the size batch × parameters has to exist at once.

Letters: b samples, u groups, r rows of one sample (time steps, pixels), o and i features, g convolution groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from varreg import native
from varreg.memory import AT_MOST, scratch

_LARGE = 1 << 15  # from here on, adding up group by group beats a reduction over groups


class Partition(NamedTuple):
    """The split of `batch` samples, in order, into `groups` groups whose sizes differ by one at most, larger ones first."""

    batch: int
    groups: int

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Runs of groups of equal size: first group, last group (exclusive), first sample, samples per group."""
        if not self.groups:
            return
        n, larger = divmod(self.batch, self.groups)
        if larger:
            yield 0, larger, 0, n + 1
        if n:
            yield larger, self.groups, larger * (n + 1), n


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """Squares and sums of half-precision numbers are kept in float32."""
    return torch.promote_types(dtype, torch.float32)


def length(c: Tensor) -> float:
    """Σ_u |c_u| of `[u, …]`."""
    return float((c.flatten(1).norm(dim=1) if c.dim() > 1 else c.abs()).sum())


class Contribution:
    """Per-sample contributions to one tensor's gradient, of the given shape. Subclasses say how to get them.

    They are worked on in chunks of groups: as many as `chunk` elements hold, about what stays in the cache; but `at_once` groups at
    least, for the sake of parallel matrix products, unless they would need more than 32 MiB in float32.
    """

    chunk = 1 << 21
    at_once = 8
    with_bias = False
    """Is there a bias, which gets Σ_r δ_br?"""
    bias: Tensor | None = None
    """S and W of that, once they were found together with this one's own."""

    def __init__(self, partition: Partition, shape: torch.Size):
        self.partition = partition
        self.shape = shape

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        """C_u for the groups `first:last` of `n` samples each, the first sample being `start`: `[last − first, *shape]`.

        The caller may overwrite it; it may be scratch memory that the next call overwrites.
        """
        raise NotImplementedError

    def cost(self, n: int) -> int:
        """Elements that have to exist at once for one group of n samples."""
        return math.prod(self.shape)

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        for first, last, start, n in self.partition.runs():
            cost = max(self.cost(n), 1)
            step = max(1, self.chunk // cost, min(self.at_once, AT_MOST // cost))
            for u in range(first, last, step):
                stop = min(u + step, last)
                yield n, self.groups(u, stop, start + (u - first) * n, n)

    def sums(self) -> tuple[Tensor | None, Tensor | None]:
        """(S, W); nothing for an empty batch."""
        total = square = None
        for n, c in self.chunks():
            c = c.to(stat_dtype(c.dtype))
            if c[0].numel() < _LARGE:
                s, w = c.sum(0), c.square_().sum(0)
                w = w.div_(n) if n > 1 else w
                total = s if total is None else total.add_(s)
                square = w if square is None else square.add_(w)
            else:
                if total is None or square is None:
                    total, square = c.new_zeros(self.shape), c.new_zeros(self.shape)
                for one in c:
                    total.add_(one)
                    square.addcmul_(one, one, value=1 / n)
        return total, square

    def precise_sums(self) -> tuple[Tensor | None, Tensor | None]:
        """(S, W) in float64, for contributions whose squares leave the range of float32."""
        total = square = None
        for n, c in self.chunks():
            c = c.double()
            s, w = c.sum(0), c.square_().sum(0).div_(n)
            total, square = (s, w) if total is None or square is None else (total.add_(s), square.add_(w))
        return total, square

    def size(self) -> float:
        """How much was added up, before it cancelled: Σ_u |C_u| at least. Rounding errors are relative to that."""
        return sum(length(c) for _, c in self.chunks())

    def total(self) -> Tensor | None:
        """S alone."""
        total = None
        for _, c in self.chunks():
            s = c.to(stat_dtype(c.dtype)).sum(0)
            total = s if total is None else total.add_(s)
        return total


class Dense(Contribution):
    """Contributions that are at hand, `[batch, *shape]`."""

    def __init__(self, partition: Partition, values: Tensor):
        super().__init__(partition, values.shape[1:])
        self.values = values

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        part = self.values[start : start + (last - first) * n]
        return part.unflatten(0, (last - first, n)).sum(1) if n > 1 else part.clone()

    def sums(self) -> tuple[Tensor | None, Tensor | None]:
        if found := native.reduce.sums(self.values, self.partition.groups):
            return found
        if not self.partition.batch or self.partition.groups != self.partition.batch:
            return super().sums()
        values = self.values.to(stat_dtype(self.values.dtype))
        return values.sum(0), values.square().sum(0)

    def total(self) -> Tensor | None:
        found = native.reduce.total(self.values)
        return super().total() if found is None else found


class Grouped(Contribution):
    """Contributions that are at hand, already summed over each group: `[groups, *shape]`."""

    def __init__(self, partition: Partition, values: Tensor):
        super().__init__(partition, values.shape[1:])
        self.values = values

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        return self.values[first:last].clone()


class Outer(Contribution):
    """c_b = Σ_r δ_br ⊗ a_br: what a matrix product gives, with δ `[b, r, o]` and a `[b, r, i]`."""

    chunk = 1 << 18
    at_once = 4

    def __init__(self, partition: Partition, delta: Tensor, a: Tensor, shape: torch.Size | None = None):
        super().__init__(partition, shape or torch.Size((delta.shape[-1], a.shape[-1])))
        self.delta, self.a = delta, a

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        part = slice(start, start + (last - first) * n)
        delta, a = (t[part].reshape(last - first, n * t.shape[1], t.shape[2]) for t in (self.delta, self.a))
        out = scratch("gradients", (last - first, delta.shape[2], a.shape[2]), delta)
        return torch.bmm(delta.transpose(1, 2), a, out=out).view(last - first, *self.shape)

    def sums(self) -> tuple[Tensor | None, Tensor | None]:
        if self.delta.shape[1] != 1 or self.partition.groups != self.partition.batch or not self.partition.batch:
            found = native.sums.outer(self.delta, self.a, self.partition.groups, self.with_bias)
            if found is None:
                return super().sums()
            self.bias = found.bias
            return found.total.view(self.shape), found.square.view(self.shape)
        dtype = stat_dtype(self.delta.dtype)  # one row per sample: (δ ⊗ a)² = δ² ⊗ a², and no per-sample gradient exists
        delta, a = self.delta[:, 0].to(dtype), self.a[:, 0].to(dtype)
        return (delta.t() @ a).view(self.shape), (delta.square().t() @ a.square()).view(self.shape)

    def precise_sums(self) -> tuple[Tensor | None, Tensor | None]:
        dtype = stat_dtype(self.delta.dtype)
        if self.delta.dtype == dtype:
            return super().precise_sums()
        return Outer(self.partition, self.delta.to(dtype), self.a.to(dtype), self.shape).precise_sums()

    def size(self) -> float:
        """Σ_b |δ_b||a_b|, which is Σ_br |δ_br||a_br| at least: rows of one sample may cancel."""
        return float((self.delta.flatten(1).norm(dim=1) * self.a.flatten(1).norm(dim=1)).sum())  # [b, r, features] each

    def total(self) -> Tensor | None:
        delta, a = (t.reshape(t.shape[0] * t.shape[1], t.shape[2]) for t in (self.delta, self.a))
        return (delta.t() @ a).view(self.shape)


class Bias(Contribution):
    """c_b = Σ_r δ_br: what a bias gets, from the δ that a weight's contributions are made of.

    Where those were summed up without existing one by one, its sums came with them; else `make` has its contributions.
    """

    def __init__(self, of: Outer | Lazy, make: Callable[[], Contribution]):
        super().__init__(of.partition, of.shape[:1])
        self._of, self._make = of, make
        of.with_bias = True

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        return self._make().groups(first, last, start, n)

    def sums(self) -> tuple[Tensor | None, Tensor | None]:
        both = self._of.bias
        return self._make().sums() if both is None else (both[0], both[1])

    def precise_sums(self) -> tuple[Tensor | None, Tensor | None]:
        return self._make().precise_sums()

    def total(self) -> Tensor | None:
        return self._make().total() if self._of.bias is None else self._of.bias[0]


class Lazy(Contribution):
    """Contributions that a function makes a few groups at a time: `make(first, last, start, n)`. `sums(with_bias)` may have S and W at once,
    and `total()` S alone.
    """

    def __init__(
        self,
        partition: Partition,
        shape: torch.Size,
        make: Callable[[int, int, int, int], Tensor],
        cost: Callable[[int], int] | None = None,
        sums: Callable[[bool], native.sums.Sums | None] | None = None,
        total: Callable[[], Tensor] | None = None,
    ):
        super().__init__(partition, shape)
        self._make, self._cost, self._sums, self._total = make, cost, sums, total

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        return self._make(first, last, start, n)

    def cost(self, n: int) -> int:
        return self._cost(n) if self._cost else super().cost(n)

    def sums(self) -> tuple[Tensor | None, Tensor | None]:
        found = self._sums(self.with_bias) if self._sums else None
        if found is None:
            return super().sums()
        self.bias = found.bias
        return found.total, found.square

    def total(self) -> Tensor | None:
        return self._total() if self._total and self.partition.batch else super().total()


class Scattered(Contribution):
    """Contributions to a table, of which the rows `ids`, each of them once, were looked up for all samples alike."""

    def __init__(self, looked_up: Contribution, ids: Tensor, shape: torch.Size):
        super().__init__(looked_up.partition, shape)
        self.looked_up, self.ids = looked_up, ids

    def _scatter(self, t: Tensor | None) -> Tensor | None:
        return None if t is None else t.new_zeros(self.shape).index_copy_(0, self.ids, t.reshape(-1, *self.shape[1:]))

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        c = self.looked_up.groups(first, last, start, n)
        return c.new_zeros(len(c), *self.shape).index_copy_(1, self.ids, c.reshape(len(c), -1, *self.shape[1:]))

    def sums(self) -> tuple[Tensor | None, Tensor | None]:
        total, square = self.looked_up.sums()
        return self._scatter(total), self._scatter(square)

    def total(self) -> Tensor | None:
        return self._scatter(self.looked_up.total())


class Sum(Contribution):
    """Several uses of one parameter: a sample's contributions are added up before anything is squared."""

    def __init__(self, parts: list[Contribution]):
        super().__init__(parts[0].partition, parts[0].shape)
        self.parts = parts

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        out = self.parts[0].groups(first, last, start, n).clone()
        for part in self.parts[1:]:
            out += part.groups(first, last, start, n)
        return out

    def cost(self, n: int) -> int:
        return max(part.cost(n) for part in self.parts)


def combine(parts: list[Contribution]) -> Contribution:
    """All uses of a parameter in one backward as one contribution; matrix products join along their rows."""
    outers = [p for p in parts if type(p) is Outer]
    others = [p for p in parts if type(p) is not Outer]
    if len(outers) > 1:
        delta, a = (torch.cat([getattr(p, name) for p in outers], dim=1) for name in ("delta", "a"))
        outers = [Outer(outers[0].partition, delta, a, outers[0].shape)]
    joined = [*outers, *others]
    return joined[0] if len(joined) == 1 else Sum(joined)
