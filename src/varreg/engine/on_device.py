"""Copies for many parameters of a device, in one launch.

At first, S shares the memory of `p.grad`. At the end of the backward each ledger gets its own copy
of S. One block of memory holds all copies, and W after them, so that a step can use the block as
one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from varreg.few_launches import by_type
from varreg.thresholds import DEVICE_SMALL

if TYPE_CHECKING:
    from varreg.engine.ledger import Ledger


def copy_shared_totals(ledgers: Iterable[Ledger]) -> None:
    """Copy S of ledgers whose S shares the memory of `p.grad`."""
    sharing = [ledger for ledger in ledgers if ledger.is_total_shared]
    _copy([(ledger, "total") for ledger in sharing])
    for ledger in sharing:
        ledger.is_total_shared = False


def _copy(sums: Sequence[tuple[Ledger, str]]) -> None:
    """Replace the named sums of ledgers by copies: one block for all sums of a type."""
    owners = {id(getattr(ledger, name)): (ledger, name) for ledger, name in sums}
    for alike in by_type([getattr(ledger, name) for ledger, name in sums]):
        for t, copy in zip(alike, joined_copies(alike), strict=True):
            setattr(*owners[id(t)], copy)


def copy_sums(reached: Sequence[tuple[Tensor, Ledger]]) -> set[int]:
    """Copy S into memory of the ledgers at the end of a backward; copy W next to S if a step will
    join them. Return the ids of the parameters whose gradient is S itself: they need no check.
    """
    same_memory, totals, squares = set(), [], []
    for p, ledger in reached:
        if ledger.is_total_shared and p.grad is not None and ledger.total is not None:
            ledger.is_total_shared = False
            if p.grad.data_ptr() == ledger.total.data_ptr():
                same_memory.add(id(p))
                totals.append((ledger, "total"))
                if p.numel() <= DEVICE_SMALL:
                    squares.append((ledger, "square"))
    _copy([*totals, *squares])
    return same_memory


def joined_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, which lie one after the other in memory."""
    block = torch.cat([t.reshape(-1) for t in tensors])
    pieces = block.split([t.numel() for t in tensors])
    # `.data` gives each piece its own version
    return [piece.view(t.shape).data for t, piece in zip(tensors, pieces, strict=True)]


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one flat view of tensors that lie one after the other in memory; else None."""
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for t in tensors:
        if t.untyped_storage().data_ptr() != storage or t.storage_offset() != end:
            return None
        if not t.is_contiguous() or t.dtype != first.dtype:
            return None
        end += t.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))
