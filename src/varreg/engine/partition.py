"""The partition of a batch into groups, whose contributions are summed before they are squared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from varreg.errors import VarregError


class Partition(NamedTuple):
    """The split of `batch` samples, in order, into `groups` groups whose sizes differ by one at
    most, larger ones first.
    """

    batch: int
    groups: int

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield runs of groups of equal size: first group, last group (exclusive), first sample,
        samples per group.
        """
        if not self.groups:
            return
        n, larger = divmod(self.batch, self.groups)
        if larger:
            yield 0, larger, 0, n + 1
        if n:
            yield larger, self.groups, larger * (n + 1), n


class Grouping:
    """How an observer partitions batches: into single samples, or into a number of groups.

    The groups are of the global batch. Where several processes share it, each of them (`rank` of
    `world`) makes its share of the groups.
    """

    def __init__(self, groups: int | None):
        self.groups = groups
        self.rank, self.world = 0, 1

    @property
    def key(self) -> tuple[int | None, int, int]:
        """Return the options that partitions depend on, besides the batch."""
        return self.groups, self.rank, self.world

    def partition(self, batch: int) -> Partition:
        """Return the partition of a batch of this process."""
        groups = batch if self.groups is None else self._share(self.groups)
        if self.world > 1:
            groups = min(groups, batch)  # another rank may have more: counts are added up
        if groups > batch > 0:
            raise VarregError(
                f"varreg: groups={groups} needs at least {groups} samples in a batch, got {batch}. "
                "Use fewer groups, larger batches, or drop the last incomplete batch "
                "(DataLoader(drop_last=True))."
            )
        return Partition(batch, min(groups, batch))

    def _share(self, groups: int) -> int:
        """Return the number of groups of the global batch that this process makes, at least one."""
        return max(1, groups // self.world + (self.rank < groups % self.world))
