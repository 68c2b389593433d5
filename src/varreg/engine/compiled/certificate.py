"""Certificates: one eager run of a graph under the tracer proves how it can be measured for inputs
of these shapes.

A certificate is valid for all inputs of the same shapes. It says that the tracer followed the batch
through every call by the key of the call alone (a plan), never by values; and that parameters met
the batch only where the graph has an operation of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from varreg.engine.compiled.sites import ForwardInGraph, RuleSite, SpreadSite
from varreg.engine.compiled.uses import Certificate, RuleUse, SiteUse, SpreadUse
from varreg.engine.marks import mark_of
from varreg.engine.mechanisms.by_rule import RuleNode
from varreg.engine.mechanisms.by_spread import SpreadNode
from varreg.engine.rules import RULES
from varreg.engine.trace.arguments import tensors_in
from varreg.engine.trace.call import Call
from varreg.engine.trace.functions import CREATORS
from varreg.engine.trace.layout import Layout
from varreg.engine.trace.trace import UNKNOWN_CONSTANT
from varreg.engine.trace.tracer import Tracer

if TYPE_CHECKING:
    from varreg.engine.observer import Observer


class Witness(Tracer):
    """A tracer that notes each call which it did not follow by a plan."""

    def __init__(self, observer: Observer):
        super().__init__(observer)
        known = observer.tracer
        self.plans, self.verdicts = known.plans, known.verdicts
        self._split = known._split
        self.unplanned = 0

    def run_new(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], key: Any = None
    ) -> Any:
        """Run a call that has no plan yet. Note it if there is no plan for it afterwards either."""
        depends_on_batch = func not in CREATORS and any(
            mark_of(t) is not None for t in tensors_in(args, kwargs)
        )
        out = super().run_new(func, args, kwargs, key)
        if depends_on_batch and (key is None or key not in self.plans):
            self.unplanned += 1
        return out

    def _mark_again(self, call: Call, out: Any) -> None:
        self.unplanned += 1
        super()._mark_again(call, out)


class Examiner:
    """Examines each call of an eager run, and makes the certificate at the end."""

    def __init__(self, observer: Observer, witness: Witness, found: ForwardInGraph):
        self.observer, self.witness, self.found = observer, witness, found
        self._sites = {site.node: site for site in found.sites}
        self._uses: dict[Any, SiteUse] = {}
        self._rounding = 0.0
        self._is_good = True
        self.result: Certificate | None = None

    def look(self, node: Any, out: Any, parameters: Sequence[Tensor]) -> None:
        """Examine the result of a call inside of the observed forward."""
        unplanned, self.witness.unplanned = self.witness.unplanned, 0
        site = self._sites.get(node)
        if site is None:
            self._is_good &= not unplanned
            return
        use: SiteUse | None = None
        made: Any = out.grad_fn if isinstance(out, Tensor) else None
        if isinstance(site, RuleSite):
            if _is_made_by(made, RuleNode) and not unplanned:
                use = self._rule_use(site, made, [parameters[i] for i in site.parameters])
        elif made is not None and unplanned == 1:
            use = _spread_use(site, mark_of(out), made, parameters[site.parameters[0]])
        if use is None:
            self._is_good = False
        else:
            self._uses[node] = use

    def _rule_use(self, site: RuleSite, made: Any, met: list[Tensor]) -> RuleUse | None:
        """Return the use in which a rule measured the parameters of a site; None if the graph will
        measure them in another way.
        """
        use, recipients = made.use, made.recipients
        if use.rule is not site.rule or not all(r.pull_back is None for r in recipients):
            return None
        if (tuple(use.wants), tuple(use.saved)) != (site.wanted, site.saved):
            return None
        if [id(r.leaves[0][0]) for r in recipients] != [id(p) for p in met]:
            return None
        self._rounding = max(self._rounding, made.rounding)
        return RuleUse(site.parameters, use)

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Make the certificate when the observed forward has returned its outputs. Make none if
        values mattered besides shapes, or if the tracer found other uses than the graph has.
        """
        trace = self.witness.trace
        # constants from outside are inputs of the graph: they existed before the forward
        has_escapes = any(name != UNKNOWN_CONSTANT for name, *_ in trace.escapes)
        if has_escapes or trace.rewritten or trace.unseen or trace.batch <= 1:
            return
        if not self._is_good or not all(self._is_output(t) for t in outputs if t.requires_grad):
            return
        partition = self.observer.grouping.partition(trace.batch)
        sites = [*self._uses.values()]
        self.result = Certificate(partition, sites, self._rounding, _numbered(sites), {}, {})

    def _is_output(self, t: Tensor) -> bool:
        batch, dim = self.witness.trace.batch, self.observer.batch_dim
        return mark_of(t) == Layout(batch, dim)


def _numbered(sites: Sequence[SiteUse]) -> list[tuple[int, bool]]:
    """Return `Certificate.uses`."""
    met = [i for site in sites for i in site.parameters]
    return [(i, i in met[:k]) for k, i in enumerate(met)]


def _spread_use(site: SpreadSite, at: Any, made: Any, p: Tensor) -> SpreadUse | None:
    """Return the use in which a parameter was spread along the batch at a site; None if the graph
    will not spread it in this way.
    """
    spreads = [n for n, _ in made.next_functions if _is_made_by(n, SpreadNode)]
    if len(spreads) != 1 or spreads[0].is_aligned:
        return None
    node, (recipient,) = spreads[0], spreads[0].recipients
    if not (at == node.at == Layout(at.batch)) or [id(t) for t, _ in recipient.leaves] != [id(p)]:
        return None
    if (recipient.pull_back is None) == site.is_lookup:
        return None
    table = RULES[F.embedding].bind(site.operand.args, site.operand.kwargs) or {}
    skip = table.get("padding_idx") if site.is_lookup else None
    return SpreadUse(site.parameters, node.partition, p.shape, skip, int(site.is_lookup))


def _is_made_by(node: Any, function: type) -> bool:
    """Return whether a node of the autograd graph belongs to `function`, one of our classes."""
    return getattr(type(node), "_forward_cls", None) is function
