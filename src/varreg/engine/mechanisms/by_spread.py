"""By spreading: a tensor made of parameters is expanded along the batch, so that autograd itself
delivers its gradient sample by sample.

This measures element-wise operations and joins (`x + bias`, `cat([token, x])`), and functions that
pair a tensor made of parameters with the batch, row by row, such as attention with its queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg import _torch
from varreg.engine.contribution import Contribution, Dense
from varreg.engine.marks import mark, mark_of
from varreg.engine.mechanisms.node import Node, Recipient, measuring, take
from varreg.engine.partition import Partition
from varreg.engine.rules import RULES, STACKED
from varreg.engine.trace.arguments import results, swap
from varreg.engine.trace.call import Call
from varreg.engine.trace.decide import follow, place_result
from varreg.engine.trace.einsum import equation_of, operands_of
from varreg.engine.trace.follow import Guess
from varreg.engine.trace.functions import CELLS, ELEMENTWISE, JOINS, PRODUCTS
from varreg.engine.trace.layout import (
    Layout,
    Place,
    Ragged,
    Single,
    owners_of,
    per_sample,
    samples,
)
from varreg.engine.trace.packed import is_packed, place_packed
from varreg.engine.trace.trace import Trace
from varreg.engine.trace.trial import Verdict

# ---- forward: functions that broadcast -----------------------------------------------------------


def serves(call: Call) -> bool:
    """Return whether a call broadcasts its tensors along the batch."""
    return call.function in ELEMENTWISE or call.function in JOINS or _broadcasts_matrices(call)


def _broadcasts_matrices(call: Call) -> bool:
    """Return whether the call multiplies a matrix of each sample with matrices that all samples
    share.
    """
    if call.function not in PRODUCTS or len(call.carriers) != 1 or len(call.parameters) != 1:
        return False
    (x, at), t = call.carriers[0], call.parameters[0]
    if isinstance(at, Single) or t.dim() <= 2 or at.dim >= x.dim() - 2:
        return False
    dim = at.dim + t.dim() - x.dim()
    return dim < 0 or t.shape[dim] == 1


def measure(trace: Trace, call: Call) -> Any:
    """Run a call that broadcasts, with its parameters spread along the batch; return its result."""
    x, at = call.carriers[0]
    rank = max(t.dim() for t in call.tensors())
    there = at if isinstance(at, Single) else at._replace(dim=at.dim + rank - x.dim())
    spread = {}
    for t in call.parameters:
        shape, is_aligned = _spread_shape(trace, call, t, there, rank)
        spread[id(t)] = _spread(trace, call, t, shape, there, is_aligned, rank)
    args, kwargs = swap(call.args, call.kwargs, spread)
    carriers = [*call.carriers, *((s, there) for s in spread.values())]
    new = call.with_arguments(args, kwargs, carriers)
    out = new.run()
    trace.mark_each(out, lambda t, i: place_result(trace, new, t, i))
    is_complete = call.function not in JOINS or _has_rows_of(out, there)
    if not is_complete and not all(_is_expanded(t, there) for t in call.parameters):
        trace.refuse(call, "its rows in the result belong to no sample")
    return out


def _spread(
    trace: Trace,
    call: Call,
    t: Tensor,
    shape: list[int],
    there: Place,
    is_aligned: bool,
    rank: int,
) -> Tensor:
    """Return a tensor made of parameters as a tensor that carries the batch at `there`, which
    counts `rank` dimensions.
    """
    recipient = trace.recipient(t, call.name.strip("_"))
    if is_aligned and there.batch > 1:
        trace.has_row_per_sample = True
        _warn_of_row_per_sample(trace, call, t, there, rank)
    partition = trace.observer.grouping.partition(there.batch)
    spread: Tensor = SpreadNode.apply(t, recipient, shape, there, is_aligned, partition)
    mark(spread, there)
    return spread


def _warn_of_row_per_sample(trace: Trace, call: Call, t: Tensor, there: Place, rank: int) -> None:
    """Warn of a tensor of parameters that has a different row for each position in the batch. A
    tensor that was expanded or repeated has the same row for all.
    """
    path = trace.observer.forward.path()
    if isinstance(there, Layout) and trace.verdicts.is_due(
        ("row per sample", path, call.function, t.shape)
    ):
        dim = there.dim - (rank - t.dim())
        if there.batch == there.size and not torch.equal(t, t.roll(1, dim)):
            trace.observer.notices.row_per_sample(path, trace.names([t]), there.batch)


def _spread_shape(
    trace: Trace, call: Call, t: Tensor, there: Place, rank: int
) -> tuple[list[int], bool]:
    """Return the shape of a tensor that is expanded along the batch, and whether it has a row for
    each sample already.
    """
    if isinstance(there, Single):
        return list(t.shape), True
    is_join = call.function in JOINS
    padded = t if is_join else t[(None,) * (rank - t.dim())]
    size = padded.shape[there.dim] if padded.dim() else 1
    is_aligned = there.batch == 1 or size == there.size != 1
    if not is_aligned and (size != 1 or is_join):
        why = f"no dimension of its shape {tuple(t.shape)} fits the batch of {there.batch}"
        trace.refuse(call, why, [t])
    return [there.size if d == there.dim else n for d, n in enumerate(padded.shape)], is_aligned


def _has_rows_of(out: Tensor, there: Place) -> bool:
    """Return whether the result of a join has as many rows of the batch as its arguments."""
    where = mark_of(out)
    if isinstance(there, Single) or there.batch == 1:
        return isinstance(where, Place)
    return isinstance(where, Layout | Ragged) and where.size == there.size


def _is_expanded(t: Tensor, there: Place) -> bool:
    """Return whether all rows of a tensor are one expanded row, so that each sample may use its
    own.
    """
    return not isinstance(there, Single) and t.stride(there.dim) == 0


# ---- forward: functions that pair rows -----------------------------------------------------------


def align(trace: Trace, call: Call) -> Call | None:
    """Return the call with spread parameters, if the function pairs their rows with the samples.
    The spread tensors carry the batch from here on. None if the function pairs no parameter.
    """
    x, at = call.carriers[0]
    if is_packed(call.function, call.args):
        at = place_packed(call.args, call.carriers, 1) or at
    if isinstance(at, Single):
        return None
    aligned: dict[int, Tensor] = {}
    for t in call.parameters:
        dim = _paired_dim(call, x, at.dim, t)
        if dim is None and _pairs_rows(trace, call, t):
            dim = at.dim
        if dim is not None and 0 <= dim < t.dim() and t.shape[dim] == at.size > 1:
            there = at._replace(dim=dim)
            aligned[id(t)] = _spread(trace, call, t, list(t.shape), there, True, t.dim())
    if not aligned:
        return None
    return call.with_arguments(*swap(call.args, call.kwargs, aligned), ())


def _paired_dim(call: Call, x: Tensor, dim: int, t: Tensor) -> int | None:
    """Return the dimension of `t` that a function pairs with dimension `dim` of `x`."""
    function, args = call.function, call.args
    if function is F.scaled_dot_product_attention:
        return dim if t.dim() == x.dim() and dim < x.dim() - 2 else None
    if function in PRODUCTS:
        return t.dim() - (x.dim() - dim) if x.dim() - dim > 2 else None
    if function in STACKED or function in CELLS:
        states = args[2 if is_packed(function, args) else 1]
        states = states if isinstance(states, (list, tuple)) else (states,)
        return (1 if function in STACKED else 0) if any(t is state for state in states) else None
    if function is _torch.einsum:
        terms, operands = equation_of(args).inputs, operands_of(args)
        letter = next(c[dim] for c, o in zip(terms, operands, strict=True) if o is x)
        return next((c.find(letter) for c, o in zip(terms, operands, strict=True) if o is t), None)
    if function is F.bilinear:
        return dim if any(t is u for u in args[:2]) and dim < x.dim() - 1 else None
    return None


def _pairs_rows(trace: Trace, call: Call, t: Tensor) -> bool:
    """Return whether an unknown function uses row i of `t` for sample i alone. If the sizes allow
    that, a trial decides.
    """
    x, at = call.carriers[0]
    if isinstance(at, Single) or len(call.parameters) != 1:
        return False
    if call.function in RULES or trace.lets_samples_meet:
        return False
    if t.dim() != x.dim() or t.shape[at.dim] != at.size or at.size <= 1:
        return False

    def trial() -> bool:
        both = call.with_carriers([*call.carriers, (t, at)])
        with torch.no_grad():
            out = results(call.run())[0]
        destination = follow(both, out, 0)
        places = destination.places if isinstance(destination, Guess) else (destination,)
        return any(
            isinstance(p, Place) and trace.verdicts.of_values(both, p, 0) is Verdict.APART
            for p in places
        )

    return trace.verdicts.of_pairs(call, trial)


# ---- backward ------------------------------------------------------------------------------------


class SpreadNode(Node):
    """Expands a tensor along the batch; its gradient then arrives sample by sample."""

    @staticmethod
    def forward(
        ctx: Any,
        t: Tensor,
        recipient: Recipient,
        shape: list[int],
        at: Place,
        is_aligned: bool,
        partition: Partition,
    ) -> Tensor:
        ctx.recipients, ctx.shape = [recipient], t.shape
        ctx.at, ctx.is_aligned, ctx.partition = at, is_aligned, partition
        if is_aligned:
            return t.detach()
        return t.reshape((1,) * (len(shape) - t.dim()) + tuple(t.shape)).expand(shape).detach()

    @staticmethod
    @measuring
    def backward(ctx: Any, grad: Any) -> Any:
        at: Place = ctx.at
        contribution: Contribution
        if isinstance(at, Single):
            contribution = Dense(ctx.partition, samples(grad, at))
        elif not ctx.is_aligned:
            contribution = Dense(ctx.partition, per_sample(grad, at).reshape(at.batch, *ctx.shape))
        elif at.batch == 1:
            contribution = Dense(ctx.partition, grad.unsqueeze(0))
        else:  # row i of the tensor is used by its owner alone
            contribution = _Rows(ctx.partition, grad, owners_of(at), at.dim)
        (total,) = take(ctx.recipients, [contribution], [ctx.next_functions[0][0]])
        return total, None, None, None, None, None

    @staticmethod
    def places(ctx: Any) -> Sequence[Place | None]:
        """Return where the result carries the batch."""
        return [ctx.at]


class _Rows(Contribution):
    """Contributions to a tensor of which each sample uses its own rows only. A sample's
    contribution is zero in all other rows.
    """

    chunk = 1  # one group at a time: each is as large as the whole tensor

    def __init__(self, partition: Partition, grad: Tensor, owners: Tensor, dim: int):
        super().__init__(partition, grad.shape)
        self.grad, self.owners, self.dim = grad, owners, dim

    def groups(self, first: int, last: int, start: int, n: int) -> Tensor:
        """Return the contribution of each group: its own rows, and zeros elsewhere."""
        out = self.grad.new_zeros(last - first, *self.shape)
        for u in range(last - first):
            a, b = start + u * n, start + (u + 1) * n
            rows = ((self.owners >= a) & (self.owners < b)).nonzero().flatten().to(out.device)
            out[u].index_copy_(self.dim, rows, self.grad.index_select(self.dim, rows))
        return out
