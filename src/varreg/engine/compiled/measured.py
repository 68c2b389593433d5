"""Our operations in a compiled graph: a node in the forward half, whose backward is the operator
`varreg::contribute`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.engine.mechanisms.node import (
    BackwardRuns,
    Recipient,
    refuse_compiled_autograd,
    rounding_of,
    take,
)
from varreg.errors import MeasurementError

if TYPE_CHECKING:
    from varreg.engine.compiled.certificate import Certificate
    from varreg.engine.observer import Observer

# ---- one call of a compiled graph ----------------------------------------------------------------


class Pass:
    """One forward through a compiled graph. It receives the contributions when the backward runs.

    It lives as long as its token, an input that the graph saves for its backward half: as long as
    contributions can arrive.
    """

    def __init__(self, observer: Observer, certificate: Certificate, parameters: Sequence[Tensor]):
        self.certificate = certificate
        self.nodes = [_accumulator(p) for p in parameters]
        ledgers = [observer.parameters.ledger(p) for p in parameters]
        leaves = [[(p, ledger)] for p, ledger in zip(parameters, ledgers, strict=True) if ledger]
        self.recipients = [
            [Recipient(observer, parameters[i], leaves[i]) for i in site.parameters]
            for site in certificate.sites
        ]

    def token(self) -> Tensor:
        """Return a tensor that identifies this pass in the graph, and keeps the pass alive."""
        number = next(_numbers)
        token = torch.tensor(number, device="cpu")  # read in the backward: a device would wait
        token.__dict__[_PASS] = self
        _passes[number] = self
        return token

    def take(self, number: int, grad: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        """Add the contributions at a site to the ledgers; return the gradients."""
        site = self.certificate.sites[number]
        contributions = site.contributions(grad, saved)
        nodes = [self.nodes[i] for i in site.parameters]
        rounding = rounding_of([grad], self.certificate.rounding)
        totals = take(self.recipients[number], contributions, nodes, rounding)
        return [
            grad.new_zeros(c.shape) if total is None else total.contiguous()
            for c, total in zip(contributions, totals, strict=True)
        ]


_PASS = "_varreg_pass"
_numbers = itertools.count(1)
_passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()


def _accumulator(p: Tensor) -> Any:
    """Return the node that accumulates a parameter's gradient."""
    return p.view_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


# ---- in the graph --------------------------------------------------------------------------------


class SiteNode(torch.autograd.Function):
    """Returns a tensor unchanged. Its backward measures the contributions to parameters from the
    arriving gradient, and returns the gradients of the parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, number: int, n_parameters: int, token: Tensor, out: Tensor, *tensors: Tensor
    ) -> Tensor:
        """Return `out`. `tensors` are the parameters, and the tensors that are saved to measure
        them at site `number`.
        """
        ctx.number, ctx.n_parameters = number, n_parameters
        ctx.save_for_backward(token, *tensors)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of `out` and of the parameters."""
        token, *tensors = ctx.saved_tensors
        parameters, saved = tensors[: ctx.n_parameters], tensors[ctx.n_parameters :]
        totals = torch.ops.varreg.contribute(token, ctx.number, grads[0], saved, parameters)
        return (None, None, None, grads[0], *totals, *(None,) * len(saved))


def _contribute(
    token: Tensor, number: int, grad: Tensor, saved: list[Tensor], parameters: list[Tensor]
) -> list[Tensor]:
    """Measure the use at a site; return the gradients of its parameters."""
    BackwardRuns.backwards += 1
    refuse_compiled_autograd()
    run = _passes.get(int(token))
    if run is None:
        raise MeasurementError(
            "varreg: the backward of a compiled graph does not find its forward: the tensors that "
            "the graph saved were copied. Call backward() without hooks on saved tensors, or do "
            "not compile the observed model."
        )
    if not _torch.is_any_autocast_enabled():
        return run.take(number, grad, saved)
    with torch.autocast(grad.device.type, enabled=False):
        return run.take(number, grad, saved)


def _shapes(
    token: Tensor, number: int, grad: Tensor, saved: list[Tensor], parameters: list[Tensor]
) -> list[Tensor]:
    """Return tensors of the shapes that `_contribute` returns."""
    return [torch.empty_like(p, memory_format=torch.contiguous_format) for p in parameters]


def _nothing(*_: Any) -> None:
    """Do nothing: this operator is a marker in a graph, removed before the graph is compiled."""


_library = torch.library.Library("varreg", "DEF")
_library.define("enter(Tensor[] inputs, Tensor token) -> ()")
_library.define("leave(Tensor[] outputs) -> ()")
_library.define(
    "contribute(Tensor token, int number, Tensor grad, Tensor[] saved, Tensor[] parameters)"
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
