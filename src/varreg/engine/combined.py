"""Contributions that are made of others: several uses of one parameter, rows of a table, groups."""

from __future__ import annotations

import torch
from torch import Tensor

from varreg.engine.contribution import Contribution, Outer, Sums
from varreg.engine.partition import Partition
from varreg.few_launches import finish_squares


class Scattered(Contribution):
    """Contributions to a table from which all samples look up the same rows `ids`, each of them
    once.
    """

    def __init__(self, looked_up: Contribution, ids: Tensor, shape: torch.Size):
        super().__init__(looked_up.partition, shape)
        self.looked_up, self.ids = looked_up, ids

    def source(self) -> Tensor | None:
        return self.looked_up.source()

    def scatter(self, t: Tensor | None) -> Tensor | None:
        """Return a sum over the looked-up rows as a sum over the whole table."""
        if t is None:
            return None
        return t.new_zeros(self.shape).index_copy_(0, self.ids, t.reshape(-1, *self.shape[1:]))

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        c = self.looked_up.groups(first, last, start, n)
        return c.new_zeros(len(c), *self.shape).index_copy_(
            1, self.ids, c.reshape(len(c), -1, *self.shape[1:])
        )

    def sums(self) -> Sums:
        total, square, *_ = self.looked_up.sums()
        finish_squares()  # before the sums are copied
        return self.scatter(total), self.scatter(square)

    def total(self) -> Tensor | None:
        return self.scatter(self.looked_up.total())


class Sum(Contribution):
    """Several uses of one parameter: a sample's contributions are added up before anything is
    squared.
    """

    def __init__(self, parts: list[Contribution]):
        super().__init__(parts[0].partition, parts[0].shape)
        self.parts = parts

    def source(self) -> Tensor | None:
        return self.parts[0].source()

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        out = self.parts[0].groups(first, last, start, n).clone()
        for part in self.parts[1:]:
            out += part.groups(first, last, start, n)
        return out

    def cost(self, n: int) -> int:
        return max(part.cost(n) for part in self.parts)


def combine(parts: list[Contribution]) -> Contribution:
    """Return all uses of a parameter in one backward as one contribution. Matrix products join
    along their rows.
    """
    outers = [p for p in parts if type(p) is Outer]
    others = [p for p in parts if type(p) is not Outer]
    if len(outers) > 1:
        delta, a = (torch.cat([getattr(p, name) for p in outers], dim=1) for name in ("delta", "a"))
        outers = [Outer(outers[0].partition, delta, a, outers[0].shape)]
    joined = [*outers, *others]
    return joined[0] if len(joined) == 1 else Sum(joined)


class Grouped(Contribution):
    """Contributions in memory, already summed over each group: `[groups, *shape]`."""

    def __init__(self, partition: Partition, values: Tensor):
        self.partition, self.shape, self.values = partition, values.shape[1:], values

    def source(self) -> Tensor:
        return self.values

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        return self.values[first:last].clone()
