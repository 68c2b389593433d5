"""The uses in a compiled graph, for inputs of certain shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from varreg.engine.contribution import Contribution, Dense
from varreg.engine.mechanisms.by_rule import contributions_of
from varreg.engine.partition import Partition
from varreg.engine.rules import Use
from varreg.engine.rules.embedding import SparseRows

if TYPE_CHECKING:
    from varreg.engine.compiled.together import Place, Together


class RuleUse(NamedTuple):
    """A use that a rule measures, for inputs of certain shapes."""

    parameters: tuple[int, ...]
    use: Use

    @property
    def partition(self) -> Partition:
        """Return the partition of the batch."""
        return self.use.partition

    @property
    def saves(self) -> int:
        """Return the number of tensors that are saved for the backward pass."""
        return len(self.use.saved)

    def contributions(self, grad: Tensor, saved: Sequence[Tensor]) -> list[Contribution]:
        """Return the contributions of the samples to each of the parameters."""
        found = contributions_of(self.use, [grad], saved)
        return [found[name] for name in self.use.wants]


class SpreadUse(NamedTuple):
    """A use in which a parameter of this shape, or rows of it, was expanded along the batch."""

    parameters: tuple[int, ...]
    partition: Partition
    shape: torch.Size
    skip: int | None
    """The row of an embedding table that gets no gradient (`padding_idx`)."""
    saves: int
    """The number of tensors that are saved for the backward pass: 1 if rows were looked up."""

    def contributions(self, grad: Tensor, saved: Sequence[Tensor]) -> list[Contribution]:
        """Return the contributions of the samples to the parameter."""
        batch = self.partition.batch
        if not saved:
            return [Dense(self.partition, grad.reshape(batch, *self.shape))]
        ids = saved[0].reshape(1, -1).expand(batch, -1)
        rows = grad.reshape(batch, -1, self.shape[-1])
        return [SparseRows(self.partition, self.shape, ids, rows, self.skip)]


SiteUse = RuleUse | SpreadUse


class Certificate(NamedTuple):
    """The uses in a graph, proven for inputs of certain shapes."""

    partition: Partition
    sites: list[SiteUse]
    rounding: float
    """The unit of rounding of computations under autocast."""
    uses: list[tuple[int, bool]]
    """The number of the parameter in each use, and whether an earlier use has the same one."""
    places: dict[int, Place | None]
    """How native code measures the site of each number that it was asked for."""
    plans: dict[Any, Together]
    """What native code measures together, by the numbers of the sites and of threads."""
