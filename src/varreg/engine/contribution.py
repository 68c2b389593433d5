"""The contribution of each sample to a gradient, and the two sums over samples, S and W.

Sample i's contribution c_i to the gradient of a parameter is defined by p.grad = Σ c_i, whatever
the loss reduction, loss scale or accumulation factor is. The batch is split into groups
(`Partition`), in the exact case one sample each, and

    S = Σ_u C_u          C_u = Σ_{i in group u} c_i, of n_u samples
    W = Σ_u C_u² / n_u   (for one sample per group: Σ c_i²)

are all that moments need; both add up over micro-batches and ranks. A `Contribution` knows how to
produce C_u for a few groups at a time, so that nothing of the size batch × parameters has to exist
at once.

Letters: b samples, u groups, r rows of a sample (time steps, pixels), o and i features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from varreg.backends import BACKENDS
from varreg.engine.partition import Partition
from varreg.memory import Workspace
from varreg.native.layer_sums import Sums as LayerSums
from varreg.thresholds import (
    CHUNK,
    CHUNK_GROUPS,
    DEVICE_CHUNK,
    GROUP_BY_GROUP,
    OUTER_CHUNK,
    OUTER_GROUPS,
    WORKSPACE,
)

GRADIENTS = Workspace()
"""Memory for the contributions of a few groups."""

Sums = tuple[Tensor | None, ...]
"""S and W; None for an empty batch. A third one is another S, which becomes `p.grad`."""


@functools.cache
def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums and squares: float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def length(c: Tensor) -> Tensor:
    """Return Σ_u |c_u| of `[u, …]`."""
    return (c.flatten(1).norm(dim=1) if c.dim() > 1 else c.abs()).sum()


class Contribution:
    """Per-sample contributions to the gradient of one tensor of the given shape. Subclasses compute
    them.

    The sums are computed in chunks of groups. A chunk has about `chunk` elements, so that it stays
    in the cache. If a workspace can hold `at_once` groups, a chunk has at least that many, so that
    matrix products run in parallel. On a device, chunks are large, since each chunk needs several
    kernel launches.
    """

    chunk, at_once = CHUNK, CHUNK_GROUPS
    norms: Tensor | None = None  # |c_i|², `[batch]`, if `kernels` has computed it
    kernels: Any = None  # kernels of a layer, in place of those of the backend

    def __init__(self, partition: Partition, shape: torch.Size):
        self.partition = partition
        self.shape = shape

    def source(self) -> Tensor | None:
        """Return a tensor on the device that computes the contributions; None for the CPU."""
        return None

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        """Return C_u of the groups `first:last`, as `[last − first, *shape]`. Each group has `n`
        samples; the first group begins with sample `start`.

        The caller may overwrite the result. The next call, of this or of another contribution, may
        overwrite it, too, since it may be in the workspace `GRADIENTS`.
        """
        raise NotImplementedError

    def cost(self, n: int) -> int:
        """Return the number of elements in memory for one group of n samples."""
        return math.prod(self.shape)

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield C_u of some groups at a time, with the number of samples in each."""
        source = self.source()
        on_device = source is not None and not source.is_cpu
        for first, last, start, n in self.partition.runs():
            cost = max(self.cost(n), 1)
            fit = DEVICE_CHUNK if on_device else self.chunk
            step = max(1, fit // cost, min(self.at_once, WORKSPACE // cost))
            for u in range(first, last, step):
                stop = min(u + step, last)
                yield n, self.groups(u, stop, start + (u - first) * n, n)

    def sums(self) -> Sums:
        """Return (S, W), in memory of their own; (None, None) for an empty batch."""
        total = square = None
        for n, c in self.chunks():
            c = c.to(stat_dtype(c.dtype))
            if c[0].numel() < GROUP_BY_GROUP or not c.is_cpu:
                s, w = c.sum(0), c.square_().sum(0)
                w = w.div_(n) if n > 1 else w
                total = s if total is None else total.add_(s)
                square = w if square is None else square.add_(w)
            else:
                if total is None or square is None:
                    total, square = c.new_zeros(self.shape), c.new_zeros(self.shape)
                # this reads each group once, in the order of memory
                for one in c:
                    total.add_(one)
                    square.addcmul_(one, one, value=1 / n)
        return total, square

    def precise_sums(self) -> Sums:
        """Return (S, W) in float64, for contributions whose squares leave the range of float32."""
        total = square = None
        for n, c in self.chunks():
            c = c.double()  # before squaring: only the squares leave the range
            s, w = c.sum(0), c.square_().sum(0).div_(n)
            total = s if total is None else total.add_(s)
            square = w if square is None else square.add_(w)
        return total, square

    def size(self) -> Tensor | float:
        """Return Σ_u |C_u|, or an upper bound of it. Rounding errors are relative to this size,
        also where contributions cancel.
        """
        return sum((length(c) for _, c in self.chunks()), 0.0)

    def total(self) -> Tensor | None:
        """Return S alone."""
        total = None
        for _, c in self.chunks():
            s = c.to(stat_dtype(c.dtype)).sum(0)
            total = s if total is None else total.add_(s)
        return total


class Dense(Contribution):
    """Contributions in memory, `[batch, *shape]`."""

    def __init__(self, partition: Partition, values: Tensor):
        self.partition, self.shape, self.values = partition, values.shape[1:], values

    def source(self) -> Tensor:
        return self.values

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        part = self.values[start : start + (last - first) * n]
        return part.unflatten(0, (last - first, n)).sum(1) if n > 1 else part.clone()

    def sums(self) -> Sums:
        if sums := BACKENDS[self.values.device.type].sums(self.values, self.partition.groups):
            return sums
        if not self.partition.batch or self.partition.groups != self.partition.batch:
            return super().sums()
        values = self.values.to(stat_dtype(self.values.dtype))
        return values.sum(0), values.square().sum(0)

    def total(self) -> Tensor | None:
        total = BACKENDS[self.values.device.type].total(self.values)
        return super().total() if total is None else total


class Weight(Contribution):
    """Contributions to a weight. Its bias gets contributions from the same δ, so that one pass can
    compute the sums of both.
    """

    bias: Bias | None = None
    """Contributions to the bias of the same use, if it has one."""

    def sums(self) -> Sums:
        return self.sums_with_bias()[0]

    def sums_with_bias(self) -> tuple[Sums, Sums | None]:
        """Return the sums of the weight, and those of its bias; None in place of the latter if
        there is no bias, or if `self.bias` has to compute them itself.
        """
        both = self.sums_in_one_pass(self.kernels)
        if both is None:
            return super().sums(), None
        self.norms = both.norms
        total, square = both.total.view(self.shape), both.square.view(self.shape)
        copies = () if both.again is None else (both.again.view(self.shape),)
        return (total, square, *copies), None if both.bias is None else tuple(both.bias)

    def sums_in_one_pass(self, kernels: Any = None) -> LayerSums | None:
        """Return S and W, and those of the bias if there is one, without per-sample gradients in
        memory; None if no kernel can do so, and PyTorch must. `kernels` replaces the kernels of the
        backend.
        """
        raise NotImplementedError


class Outer(Weight):
    """Matrix products: c_b = Σ_r δ_br ⊗ a_br, with δ `[b, r, o]` and a `[b, r, i]`."""

    chunk, at_once = OUTER_CHUNK, OUTER_GROUPS

    def __init__(
        self,
        partition: Partition,
        delta: Tensor,
        a: Tensor,
        shape: torch.Size | None = None,
        bias: Bias | None = None,
    ):
        self.partition, self.delta, self.a, self.bias = partition, delta, a, bias
        self.shape = shape or torch.Size((delta.shape[-1], a.shape[-1]))

    def source(self) -> Tensor:
        return self.delta

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        part = slice(start, start + (last - first) * n)
        delta, a = (
            t[part].reshape(last - first, n * t.shape[1], t.shape[2]) for t in (self.delta, self.a)
        )
        out = GRADIENTS.take((last - first, delta.shape[2], a.shape[2]), delta)
        return torch.bmm(delta.transpose(1, 2), a, out=out).view(last - first, *self.shape)

    def sums_with_bias(self) -> tuple[Sums, Sums | None]:
        batch, groups = self.partition
        kernels: Any = BACKENDS[self.delta.device.type]
        if self.delta.shape[1] != 1 or not batch or kernels.KNOWS_SINGLE_ROWS:
            return super().sums_with_bias()
        # one row per sample: (δ ⊗ a)² = δ² ⊗ a², and no per-sample gradient exists
        delta, a = (t.to(stat_dtype(t.dtype)) for t in (self.delta, self.a))
        if sums := kernels.single_rows(delta, a, self.bias is not None, groups):
            if (weight := sums[:3])[0].shape != self.shape:
                weight = tuple(t.view(self.shape) for t in weight)
            return weight, sums[3:] or None
        if groups != batch:
            return super().sums_with_bias()
        delta, a = delta[:, 0], a[:, 0]
        bias = kernels.sums(delta, groups) if self.bias else None  # it gets the rows of δ
        pairs = (delta, a), (delta.square(), a.square())
        return tuple((x.t() @ y).view(self.shape) for x, y in pairs), bias

    def sums_in_one_pass(self, kernels: Any = None) -> LayerSums | None:
        outer, has_bias = (kernels or BACKENDS[self.delta.device.type]).outer, self.bias is not None
        sums: LayerSums | None = outer(self.delta, self.a, self.partition.groups, has_bias)
        return sums

    def precise_sums(self) -> Sums:
        dtype = stat_dtype(self.delta.dtype)
        if self.delta.dtype == dtype:
            return super().precise_sums()
        delta, a = self.delta.to(dtype), self.a.to(dtype)
        return Outer(self.partition, delta, a, self.shape).precise_sums()

    def size(self) -> Tensor | float:
        """Return Σ_b |δ_b||a_b|, at least Σ_br |δ_br||a_br|: rows of one sample may cancel."""
        delta, a = (t.flatten(1).norm(dim=1) for t in (self.delta, self.a))
        return torch.sum(delta * a)

    def total(self) -> Tensor | None:
        delta, a = (t.reshape(t.shape[0] * t.shape[1], t.shape[2]) for t in (self.delta, self.a))
        return (delta.t() @ a).view(self.shape)


class Bias(Contribution):
    """Contributions to a bias, c_b = Σ_r δ_br. They are made when they are first needed, since the
    pass over δ for the weight may have computed their sums.
    """

    def __init__(self, partition: Partition, shape: torch.Size, make: Callable[[], Contribution]):
        self.partition, self.shape, self.make = partition, shape, make

    @functools.cached_property
    def made(self) -> Contribution:
        """Return the contributions, computed from δ alone."""
        return self.make()

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        return self.made.groups(first, last, start, n)

    def sums(self) -> Sums:
        return self.made.sums()

    def precise_sums(self) -> Sums:
        return self.made.precise_sums()

    def total(self) -> Tensor | None:
        return self.made.total()
