"""Packed sequences: which rows of the packed data belong to which sample.

`pack_padded_sequence` sorts samples by length and puts the rows of each time step side by side:
each step has a row for every sample whose sequence has not ended, and `batch_sizes` has their
number. Let `order` be the samples from the longest to the shortest. Then step t has the rows of the
samples `order[:batch_sizes[t]]`, and row k of the states `[layers, samples, features]` belongs to
sample `order[k]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.engine.trace.layout import Layout, Owners, Place, Ragged, Single, owners_of

PACK = _torch.pack_padded_sequence
PAD = _torch.pad_packed_sequence
PAD_LIST = _torch.pad_sequence
RECURRENT = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))


def is_packed(function: Any, args: Sequence[Any]) -> bool:
    """Return whether a recurrent layer gets packed sequences. Then its second argument has the
    sizes of the steps; otherwise, the states.
    """
    if function not in RECURRENT or len(args) < 3 or not isinstance(args[1], Tensor):
        return False
    return not args[1].is_floating_point()


def sizes_in(function: Any, args: Sequence[Any]) -> Tensor | None:
    """Return the argument with the number of rows of each step; it has no values of the batch."""
    if function == PAD or is_packed(function, args):
        sizes = args[1]
        return sizes if isinstance(sizes, Tensor) else None
    return None


def rows_of_steps(batch_sizes: Tensor) -> Tensor:
    """Return, for each row of packed data, its position among the rows of its step."""
    return torch.cat([torch.arange(int(n), device="cpu") for n in batch_sizes])


def order_of(at: Layout | Ragged, batch_sizes: Tensor) -> Tensor | None:
    """Return the samples from the longest to the shortest; None if the rows are not packed in this
    order.
    """
    owners = owners_of(at)
    order = owners[: int(batch_sizes[0])]
    position = rows_of_steps(batch_sizes)
    if at.dim or len(position) != len(owners) or len(order.unique()) != len(order):
        return None
    return order if torch.equal(order[position], owners) else None


def _order_of_states(at: Layout | Ragged, batch_sizes: Tensor) -> Tensor | None:
    return owners_of(at) if at.dim == 1 and at.size == int(batch_sizes[0]) else None


def place_along(order: Tensor, batch: int, dim: int) -> Place:
    """Return the place of a tensor whose rows along `dim` belong to these samples."""
    if torch.equal(order, torch.arange(batch, device="cpu")):
        return Layout(batch, dim)
    return Ragged(batch, dim, Owners(order))


def place_packed(
    args: Sequence[Any], batched: Sequence[tuple[Tensor, Place]], output: int
) -> Place | None:
    """Return where a recurrent layer's output carries the batch; None if samples mix."""
    data, batch_sizes = args[:2]
    orders: list[Tensor] = []
    for x, at in batched:
        if isinstance(at, Single):
            return None
        order = order_of(at, batch_sizes) if x is data else _order_of_states(at, batch_sizes)
        if order is None or (orders and not torch.equal(order, orders[0])):
            return None
        orders.append(order)
    batch = batched[0][1].batch
    if output:
        return place_along(orders[0], batch, 1)
    given = next((at for x, at in batched if x is data), None)
    return given or Ragged(batch, 0, Owners(orders[0][rows_of_steps(batch_sizes)]))
