"""Pull-back: turn contributions to a tensor that is made of parameters into contributions to the
parameters, through the graph that made the tensor.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.engine.combined import Grouped, Scattered
from varreg.engine.contribution import Contribution, length

if TYPE_CHECKING:
    from varreg.engine.ledger import Ledger


class PullBack:
    """The way from a tensor back to the parameters that it is made of."""

    __slots__ = ("edge", "ends", "leaves", "rounding", "rows", "value")

    def __init__(self, t: Tensor, leaves: list[tuple[Tensor, Ledger]], rows: Tensor | None):
        gradient_edge = torch.autograd.graph.get_gradient_edge
        self.leaves = leaves
        self.rows = rows  # the rows, if the tensor is a lookup in one parameter
        self.edge = gradient_edge(t)
        self.ends = [gradient_edge(p).node for p, _ in leaves]
        # the pull-back runs in the precision of the graph that made the tensor
        self.rounding = max(_graph_rounding(t), autocast_rounding(t))
        is_check_due = any(ledger.is_check_due for _, ledger in leaves)
        self.value = t.detach() if is_check_due else None

    def take(self, contribution: Contribution, dtype: torch.dtype) -> Tensor | None:
        """Send contributions back through the graph, some groups at a time, and add the results to
        the ledgers. Return the sum of the contributions to the tensor, of type `dtype`.
        """
        parameters = [p for p, _ in self.leaves]
        for _, ledger in self.leaves:
            ledger.precision = max(ledger.precision, self.rounding)
        if self.rows is not None:
            p, ledger = self.leaves[0]
            ledger.add(Scattered(contribution, self.rows, p.shape), p.dtype)
            total = contribution.total()
            return None if total is None else total.to(dtype)
        total, rows = None, []
        size: Tensor | float = 0.0
        for _, chunk in contribution.chunks():
            c = chunk.to(dtype)
            total = c.sum(0) if total is None else total.add_(c.sum(0))
            if self.value is not None:
                size = size + length(c)
            # a copy: a pull-back may return its argument, and the workspace is written again
            rows.append(_vector_jacobian_products(self.edge, parameters, c.clone()))
        for i, (p, ledger) in enumerate(self.leaves if rows else ()):
            values = torch.cat([row[i] for row in rows])
            ledger.add(Grouped(contribution.partition, values), p.dtype)
            if self.value is not None:
                ledger.added_size = ledger.added_size + size * self._slope(p)
        return total

    def _slope(self, p: Tensor) -> Tensor:
        """Return the factor by which a gradient grows on its way back to `p`, before terms cancel:
        |t|/|p|, if t is a power of p.
        """
        assert self.value is not None
        slope: Tensor = self.value.norm() / p.detach().norm()
        return slope.nan_to_num(1.0, 1.0).clamp(min=1.0)


def _graph_rounding(t: Tensor) -> float:
    """Return the unit of rounding of the coarsest type on the way back to parameters:
    `weight.float().double()` goes through float32.
    """
    types = {m.dtype for node in graph_of(t) for m in node._input_metadata}
    return max([eps_of(t.dtype), *(eps_of(dtype) for dtype in types if dtype.is_floating_point)])


def _vector_jacobian_products(edge: Any, parameters: list[Tensor], grads: Tensor) -> list[Tensor]:
    """Return the gradients of parameters for each of several gradients `[n, …]` at an edge of the
    graph: `[n, *parameter.shape]`.
    """
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    with torch.enable_grad(), warnings.catch_warnings():
        # torch warns of slow batching rules, which are still faster than one call for each
        warnings.simplefilter("ignore")
        try:
            products = torch.autograd.grad(
                [edge], parameters, [grads], is_grads_batched=True, **options
            )
        except RuntimeError:  # a function in the graph has no batched gradient
            each = [
                torch.autograd.grad([edge], parameters, [g], materialize_grads=True, **options)
                for g in grads
            ]
            products = tuple(torch.stack(rows) for rows in zip(*each, strict=True))
    return [
        p.new_zeros(len(grads), *p.shape) if g is None else g
        for g, p in zip(products, parameters, strict=True)
    ]


def graph_of(t: Tensor) -> Iterator[Any]:
    """Yield the nodes of the graph that made a tensor."""
    seen: set[Any] = set()
    stack = [t.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack += [n for n, _ in node.next_functions]


@functools.cache
def eps_of(dtype: torch.dtype) -> float:
    """Return the unit of rounding of a floating-point type."""
    return torch.finfo(dtype).eps


def autocast_rounding(t: Tensor) -> float:
    """Return the unit of rounding of computations under the current autocast; 0 without autocast.
    The types of inputs and outputs do not show it: a GRU has float32 for both.
    """
    if not (_torch.is_any_autocast_enabled() and torch.is_autocast_enabled(t.device.type)):
        return 0.0
    return eps_of(torch.get_autocast_dtype(t.device.type))
