"""The state of one traced forward. (Tensors themselves hold their marks: `engine/marks.py`.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.engine.marks import Derived, mark
from varreg.engine.mechanisms.node import BackwardRuns, Recipient
from varreg.engine.mechanisms.pull_back import graph_of
from varreg.engine.refusals import refuse_gradient
from varreg.engine.trace.arguments import results
from varreg.engine.trace.call import Call
from varreg.engine.trace.functions import name_of
from varreg.engine.trace.layout import Lost, Where
from varreg.engine.trace.trial import Escape, Range, Verdicts
from varreg.errors import VarregError

if TYPE_CHECKING:
    from varreg.engine.ledger import Ledger
    from varreg.engine.observer import Observer


UNKNOWN, UNKNOWN_CONSTANT = "a tensor of unknown origin", "a constant of unknown origin"
UNKNOWNS = (UNKNOWN, UNKNOWN_CONSTANT)
"""Names of escapes for which nothing shows that they depend on the batch."""
WRITTEN = "a tensor was changed by a write to another tensor that shares its memory"
"""The reason why a tensor is lost after such a write."""


def memory_of(t: Tensor) -> int:
    """Return the address of the memory that a tensor shares with its views, also in a vmap."""
    while _torch.is_wrapped(t):
        t = _torch.unwrap(t)
    if t.is_nested:
        return -id(t)  # its memory belongs to the tensors inside of it, and it has no address
    return t.untyped_storage().data_ptr()


class Trace:
    """The state of one traced forward, with the methods that all parts of the tracer use: mark
    tensors, note escapes, find the parameters behind a tensor, refuse.
    """

    def __init__(self, observer: Observer, verdicts: Verdicts, batch: int = 0):
        self.observer, self.verdicts = observer, verdicts
        self.batch = batch
        self.lookups: dict[int, tuple[Tensor, Any, Tensor]] = {}
        """Lookups of rows of a parameter, the same for all samples: by id of the result, the
        result, its node, and the rows.
        """
        self.aliases: dict[int, list[Tensor]] = {}
        """Tensors of which a detached copy shares the memory, by the address of that memory."""
        self.escapes: dict[Escape, Range | None] = {}
        """The functions through which values of the batch left torch, each with the range of its
        numbers.
        """
        self.rewritten: dict[int, Tensor] = {}
        """Memory whose rows changed owners, by its address; each with a tensor that keeps it alive.
        """
        self.fresh: dict[int, Tensor] = {}
        """Tensors that were marked after memory was rewritten, by id. They are kept, so that no
        other tensor gets their id.
        """
        self.backwards = BackwardRuns.backwards
        """The number of backward runs of varreg's nodes before this forward began."""
        self.has_row_per_sample = False
        """True: a tensor made of parameters has one row for each position in the batch."""
        self.is_counted = False
        """True: a call used a number that may have been made from the number of samples."""
        self.unseen = 0
        """The number of tensors of unknown origin so far."""

    def resumed(self, batch: int) -> Trace:
        """Return the state for a part of a forward that a checkpoint runs again."""
        trace = Trace(self.observer, self.verdicts, batch)
        trace.backwards, trace.unseen = self.backwards, self.unseen
        return trace

    @property
    def lets_samples_meet(self) -> bool:
        """Return whether contributions are measured, so that samples may depend on each other."""
        return self.observer.batch_norm == "contribution"

    # ---- marks -----------------------------------------------------------------------------------

    def mark(self, t: Tensor, where: Where | Derived) -> None:
        """Mark a tensor. The mark is newer than all writes to its memory so far."""
        mark(t, where)
        if self.rewritten:
            self.fresh[id(t)] = t

    def mark_or_refuse(self, t: Tensor, where: Where | Derived) -> None:
        """Mark a tensor. If it is lost, refuse a gradient that arrives at it."""
        self.mark(t, where)
        if isinstance(where, Lost):
            self.refuse_later(t, where)

    def mark_each(self, out: Any, where: Callable[[Tensor, int], Where | Derived | None]) -> None:
        """Mark each result of a call with `where(result, its number)`; None leaves it unmarked."""
        for i, t in enumerate(results(out)):
            if isinstance(t, Tensor) and not self.observer.parameters.ledger(t):
                known = where(t, i)
                if known is not None:
                    self.mark_or_refuse(t, known)

    def escape(self, function: Any, value: Any = None) -> None:
        """Note that values of the batch leave torch, or choose where others go. When the forward
        ends, a trial finds out whether they came back and made samples depend on each other. A
        `value` of True is tried separately from False, since the code may take another branch.
        """
        if self.batch > 1 and not self.lets_samples_meet:
            name = function if isinstance(function, str) else name_of(function)
            answer = value if isinstance(value, bool) else None
            key = name, self.observer.forward.path(), answer
            known = self.escapes.setdefault(key, None)
            if type(value) in (int, float):
                low, high = known or (value, value)
                self.escapes[key] = min(low, value), max(high, value)

    # ---- parameters ------------------------------------------------------------------------------

    def leaves(self, t: Tensor) -> list[tuple[Tensor, Ledger]]:
        """Return the observed parameters that a tensor is made of."""
        if ledger := self.observer.parameters.ledger(t):
            return [(t, ledger)]
        variables = (getattr(node, "variable", None) for node in graph_of(t))
        leaves = {
            id(p): (p, ledger)
            for p in variables
            if p is not None and (ledger := self.observer.parameters.ledger(p))
        }
        return list(leaves.values())

    def recipient(self, t: Tensor, rule: str) -> Recipient:
        """Return the object that receives the contributions to a tensor of parameters, measured by
        `rule`.
        """
        leaves = self.leaves(t)
        for _, ledger in leaves:
            ledger.rules[rule] = None
        lookup = self.lookups.get(id(t)) if self.lookups else None
        is_lookup = lookup is not None and lookup[1] is t.grad_fn
        return Recipient(self.observer, t, leaves, lookup[2] if lookup and is_lookup else None)

    def expect(self, parameters: list[Tensor]) -> None:
        """Note a use in a block without gradients, inside of a forward with gradients: a re-entrant
        checkpoint will run it again in the backward pass.
        """
        for t in parameters:
            for _, ledger in self.leaves(t):
                ledger.awaited += 1

    def names(self, parameters: list[Tensor]) -> str:
        """Return the names of the parameters that tensors are made of, for messages."""
        names = [ledger.name for t in parameters for _, ledger in self.leaves(t)]
        return ", ".join(f"'{n}'" for n in dict.fromkeys(names)) or "a tensor made of parameters"

    def name_unseen(self, t: Tensor) -> str | None:
        """Return the name of a parameter that is used where the tracer does not see it; None for
        any other tensor. The other uses of such a parameter do not give its whole gradient.
        """
        ledger = self.observer.parameters.ledger(t)
        if ledger is None:
            return None
        ledger.is_used_unseen = ledger.is_check_due = True
        return ledger.name

    # ---- refusals --------------------------------------------------------------------------------

    def refuse(self, call: Call, why: str, parameters: list[Tensor] | None = None) -> None:
        """Raise: a call uses parameters in a way that cannot be measured."""
        names = self.names(call.parameters if parameters is None else parameters)
        raise VarregError(
            f"varreg: in {self.observer.forward.path()}, {call.name} uses {names} but {why}. Keep "
            f"the batch in dimension {self.observer.batch_dim} there (recurrent layers and "
            "attention: batch_first=True; a model whose inputs have it elsewhere: observe(..., "
            "batch_dim=)), freeze the parameter, or register a rule for the module with "
            "varreg.register_rule."
        )

    def refuse_later(self, t: Tensor, lost: Lost) -> None:
        """Raise an error when a gradient arrives at a tensor without a place, since it belongs to
        no known sample. If samples were mixed, raise at once.
        """
        if not (t.requires_grad and t.grad_fn is not None and torch.is_grad_enabled()):
            return
        if self.lets_samples_meet or self.batch <= 1:
            return
        if lost.mixed:
            raise VarregError(self._why_no_gradient(lost))
        t.register_hook(refuse_gradient(self._why_no_gradient(lost)))

    def _why_no_gradient(self, lost: Lost) -> str:
        path, batch_dim = self.observer.forward.path(), self.observer.batch_dim
        if not lost.mixed:
            return (
                f"varreg: in {path}, the batch cannot be followed: {lost.why}. A gradient arrives "
                "there, and varreg does not know which sample it belongs to. Write the operation "
                "in another way, or detach its result if it is no part of the loss."
            )
        return (
            f"varreg: in {path}, {lost.why}: a sample has no gradient of its own, and its variance "
            f"does not exist. Is the batch in dimension {batch_dim} of every layer's input "
            "(MultiheadAttention and recurrent layers: batch_first=True; or observe(..., "
            "batch_dim=1))? If samples are meant to meet, observe(..., batch_norm='contribution') "
            "measures each sample's contribution to the gradient instead."
        )
