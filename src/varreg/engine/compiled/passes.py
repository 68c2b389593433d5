"""One call of a compiled graph: what its backward half needs to measure the sites."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from varreg import _torch
from varreg.engine.compiled.together import plan
from varreg.engine.ledger import Ledger
from varreg.engine.mechanisms.node import rounding_of, take
from varreg.errors import MeasurementError

if TYPE_CHECKING:
    from varreg.engine.compiled.uses import Certificate
    from varreg.engine.observer import Observer


class Direct(NamedTuple):
    """A `Recipient` of contributions to a parameter itself, whose use its pass has registered."""

    observer: Observer
    leaves: list[tuple[Tensor, Ledger]]
    dtype: torch.dtype
    forward: int
    pull_back: None = None


class Pass:
    """One forward through a compiled graph. It receives the contributions when the backward runs.

    It lives as long as its token, an input that the graph saves for its backward half: as long as
    contributions can arrive.
    """

    def __init__(self, observer: Observer, certificate: Certificate, parameters: Sequence[Tensor]):
        self.observer, self.certificate, self.parameters = observer, certificate, parameters
        self.forward, self.number = observer.forward.number, next(_numbers)
        self.ledgers = [*map(observer.parameters.ledger, parameters)]
        # negative, since the ids of other uses are not
        self._uses = [
            (i, -(next(_numbers) if is_again else self.number)) for i, is_again in certificate.uses
        ]
        self._nodes: dict[int, Any] = {}  # in a backward, that accumulate gradients
        for i, use in self._uses:
            if (ledger := self.ledgers[i]) is not None:
                ledger.uses.add(use)

    def __del__(self) -> None:
        """Remove the uses from the ledgers: their graph is gone, and no contribution will
        arrive.
        """
        for i, use in self._uses:
            if (ledger := self.ledgers[i]) is not None:
                ledger.uses.discard(use)

    def token(self) -> Tensor:
        """Return a tensor that identifies this pass in the graph, and keeps the pass alive."""
        token = torch.tensor(self.number, device="cpu")  # read in the backward: a device would wait
        token.__dict__[_PASS] = self
        _passes[self.number] = self
        return token

    def take(
        self, numbers: Sequence[int], grads: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> list[Tensor]:
        """Add the contributions at some sites to the ledgers; return the gradients of their
        parameters.
        """
        sites, rest = self.certificate.sites, iter(saved)
        given = [
            (grad, *itertools.islice(rest, sites[number].saves))
            for number, grad in zip(numbers, grads, strict=True)
        ]
        self._nodes = self._accumulators(numbers)
        together: dict[int, Any] | None = None
        if (found := plan(self, numbers, given)) is not None:
            try:
                together = found[0].take(self, found[1])
            except Exception:
                self.observer.window.abort()
                raise
        totals: list[Tensor] = []
        for number, (grad, *kept) in zip(numbers, given, strict=True):
            done = together and together.get(number)
            totals += done or self._take_one(number, grad, kept)
        return totals

    def is_ordinary(self, i: int) -> bool:
        """Return whether the ledger of a parameter takes S and W of a use as it arrives, in the
        precision of the gradient; and whether the running backward reaches the parameter.
        """
        ledger = self.ledgers[i]
        if type(ledger) is not Ledger or ledger.recorder is not None:
            return False
        if ledger.is_float64 or ledger.must_wait:
            return False
        try:
            return _torch.will_engine_execute(self._nodes[i])
        except RuntimeError:  # torch.autograd.grad for these very parameters
            return False

    def _take_one(self, number: int, grad: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        """Add the contributions at one site to the ledgers; return the gradients."""
        site = self.certificate.sites[number]
        contributions = site.contributions(grad, saved)
        recipients: Any = [self._recipient(i) for i in site.parameters]
        rounding = rounding_of([grad], self.certificate.rounding)
        nodes = [self._nodes[i] for i in site.parameters]
        totals = take(recipients, contributions, nodes, rounding)
        return [
            grad.new_zeros(c.shape) if total is None else total.contiguous()
            for c, total in zip(contributions, totals, strict=True)
        ]

    def _recipient(self, i: int) -> Direct:
        p, ledger = self.parameters[i], self.ledgers[i]
        leaves = [] if ledger is None else [(p, ledger)]
        return Direct(self.observer, leaves, p.dtype, self.forward)

    def _accumulators(self, numbers: Sequence[int]) -> dict[int, Any]:
        """Return the nodes that accumulate the gradients of the parameters at some sites. They are
        next to the node whose backward runs.
        """
        known: dict[int, Any] = {}
        for node, _ in _torch.current_autograd_node().next_functions:
            if (p := getattr(node, "variable", None)) is not None:
                known[id(p)] = node
        nodes = {}
        for number in numbers:
            for i in self.certificate.sites[number].parameters:
                p = self.parameters[i]
                nodes[i] = known.get(id(p)) or _accumulator(p)
        return nodes


_PASS = "_varreg_pass"
_numbers = itertools.count(1)
_passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()


def pass_of(token: Tensor) -> Pass:
    """Return the pass that a token identifies."""
    run = _passes.get(int(token))
    if run is None:
        raise MeasurementError(
            "varreg: the backward of a compiled graph does not find its forward: the tensors that "
            "the graph saved were copied. Call backward() without hooks on saved tensors, or do "
            "not compile the observed model."
        )
    return run


def _accumulator(p: Tensor) -> Any:
    """Return the node that accumulates a parameter's gradient."""
    with torch.enable_grad():
        return p.view_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
