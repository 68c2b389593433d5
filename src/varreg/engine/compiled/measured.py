"""Our operations in a compiled graph: nodes in the forward half, whose backward is the operator
`varreg::contribute`.

A site is where parameters meet the batch. Consecutive sites are measured together, by one call of
the operator for all of them: each call takes as long as several small layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.engine.compiled.passes import pass_of
from varreg.engine.mechanisms.node import BackwardRuns, refuse_compiled_autograd

Arrived = dict[int, tuple[int, Tensor, Sequence[Tensor]]]
"""For each site whose gradient has arrived: the number of the backward, the gradient, and the
tensors that were saved to measure the site.
"""


class SiteNode(torch.autograd.Function):
    """Returns a tensor unchanged. Its backward notes the arriving gradient for the `MeasuringNode`
    that has made `slot`.
    """

    @staticmethod
    def forward(
        ctx: Any, number: int, arrived: Arrived, slot: Tensor, out: Tensor, *saved: Tensor
    ) -> Tensor:
        """Return `out`. The tensors in `saved` are needed to measure site `number`."""
        ctx.number, ctx.arrived = number, arrived
        ctx.save_for_backward(*saved)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient of `out`. `slot` gets none: it only orders the nodes."""
        saved = ctx.saved_tensors
        ctx.arrived[ctx.number] = _torch.current_graph_task(), grads[0], saved
        return (None, None, None, grads[0], *(None,) * len(saved))


class MeasuringNode(torch.autograd.Function):
    """Returns a slot: an input of all sites that are measured together. So its backward runs after
    theirs. It measures the parameters of the sites, and returns their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, met: Sequence[tuple[int, int]], arrived: Arrived, token: Tensor, *tensors: Tensor
    ) -> Tensor:
        """Return a slot. `met` has the number of each site, and how many of the parameters in
        `tensors` it has.
        """
        ctx.met, ctx.arrived = met, arrived
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token, *tensors)
        return token.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Return the gradients of the parameters; None for sites that the backward has not
        reached.
        """
        token, *parameters = ctx.saved_tensors
        task, rest = _torch.current_graph_task(), iter(parameters)
        numbers, grads, saved = [], [], []
        wanted: list[Tensor] = []
        is_reached: list[bool] = []
        for number, count in ctx.met:
            at, grad, kept = ctx.arrived.pop(number, (None, None, ()))
            own = [next(rest) for _ in range(count)]
            is_reached += [at == task] * count
            if at == task:
                numbers.append(number)
                grads.append(grad)
                saved += kept
                wanted += own
        totals = iter(torch.ops.varreg.contribute(token, numbers, grads, saved, wanted))
        return (None, None, None, *(next(totals) if yes else None for yes in is_reached))


def _contribute(
    token: Tensor,
    numbers: list[int],
    grads: list[Tensor],
    saved: list[Tensor],
    parameters: list[Tensor],
) -> list[Tensor]:
    """Measure the uses at some sites; return the gradients of their parameters."""
    BackwardRuns.backwards += len(numbers)
    refuse_compiled_autograd()
    run = pass_of(token)
    if not _torch.is_any_autocast_enabled():
        return run.take(numbers, grads, saved)
    with torch.autocast(grads[0].device.type, enabled=False):
        return run.take(numbers, grads, saved)


def _shapes(
    token: Tensor,
    numbers: list[int],
    grads: list[Tensor],
    saved: list[Tensor],
    parameters: list[Tensor],
) -> list[Tensor]:
    """Return tensors of the shapes that `_contribute` returns."""
    return [torch.empty_like(p, memory_format=torch.contiguous_format) for p in parameters]


def _nothing(*_: Any) -> None:
    """Do nothing: this operator is a marker in a graph, removed before the graph is compiled."""


_library = torch.library.Library("varreg", "DEF")
_library.define("enter(Tensor[] inputs, Tensor token) -> ()")
_library.define("leave(Tensor[] outputs) -> ()")
_library.define(
    "contribute(Tensor token, int[] numbers, Tensor[] grads, Tensor[] saved, Tensor[] parameters)"
    " -> Tensor[]"
)
for _name, _run, _fake in (
    ("enter", _nothing, _nothing),
    ("leave", _nothing, _nothing),
    ("contribute", _contribute, _shapes),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"varreg::{_name}", _fake, lib=_library)

ENTER, LEAVE = torch.ops.varreg.enter, torch.ops.varreg.leave
"""The operators that mark the beginning and the end of an observed forward in a graph."""
