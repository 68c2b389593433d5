"""Insert our operations into a captured graph where parameters meet the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varreg.engine.compiled.measured import Arrived, MeasuringNode, SiteNode
from varreg.engine.compiled.sites import ForwardInGraph, RuleSite, Site, function_of
from varreg.engine.rules import Rule
from varreg.thresholds import SITES_TOGETHER


def rewrite(module: GraphModule, found: ForwardInGraph) -> None:
    """Insert our operations into a graph, and remove the markers."""
    graph, token = module.graph, found.token
    for together in _groups(found):
        sites = [found.sites[number] for number in together]
        met = tuple((n, len(site.parameters)) for n, site in zip(together, sites, strict=True))
        parameters = [found.parameters[i] for site in sites for i in site.parameters]
        with graph.inserting_before(sites[0].node):
            slot = graph.call_function(_slot_call(met), (token, *parameters))
        for number, site in zip(together, sites, strict=True):
            _insert(graph, number, site, slot)
    graph.erase_node(found.enter)
    graph.erase_node(found.leave)
    graph.lint()
    module.recompile()


def _groups(found: ForwardInGraph) -> list[list[int]]:
    """Return the numbers of the sites that are measured together. The gradients of all of them are
    in memory at once, so large ones are measured alone.
    """
    groups: list[list[int]] = []
    room = 0
    for number, site in enumerate(found.sites):
        size = _elements(site.node) + sum(_elements(found.parameters[i]) for i in site.parameters)
        if size > room:
            groups.append([])
            room = SITES_TOGETHER
        groups[-1].append(number)
        room -= size
    return groups


def _elements(node: Node) -> int:
    """Return the number of elements of a node's value in the captured run."""
    return math.prod(map(_known_size, node.meta["example_value"].shape))


def _known_size(size: Any) -> int:
    """Return a size in the captured run, without a guard on it: a size may be symbolic."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def _insert(graph: Graph, number: int, site: Site, slot: Node) -> None:
    """Replace the call at a site by one whose backward measures it."""
    with graph.inserting_before(site.node):
        if isinstance(site, RuleSite):
            call, args = _rule_call(number, site), (slot, *site.node.args)
            new = graph.call_function(call, args, dict(site.node.kwargs))
        else:
            ids = (site.operand.args[0],) if site.is_lookup else ()
            both = [site.carrier, site.carrier]
            args = (slot, site.carrier, site.operand, *ids)
            both[site.position] = graph.call_function(_spread_call(number), args)
            new = graph.create_node(site.node.op, site.node.target, tuple(both))
    new.meta = dict(site.node.meta)
    site.node.replace_all_uses_with(new)
    graph.erase_node(site.node)


_ARRIVED = "_varreg_arrived"
"""The attribute of a slot that has the gradients which have arrived at its sites."""


def _slot_call(met: tuple[tuple[int, int], ...]) -> Callable[..., Tensor]:
    """Return a function that returns the slot of the sites that are measured together."""

    def slot(token: Tensor, *parameters: Tensor) -> Tensor:
        arrived: Arrived = {}
        made: Tensor = MeasuringNode.apply(met, arrived, token, *parameters)
        made.__dict__[_ARRIVED] = arrived
        return made

    return _named(slot, f"varreg_slot_{met[0][0]}")


def _rule_call(number: int, site: RuleSite) -> Callable[..., Tensor]:
    """Return the function of a site, with its parameters detached and a node behind its result."""
    function, rule, wanted, saved = function_of(site.node), site.rule, site.wanted, site.saved

    def measured(slot: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bound = _bound(rule, args, kwargs)
        kept = [bound[name] for name in saved]
        for name in wanted:
            bound[name] = bound[name].detach()
        args = tuple(bound[name] for name in rule.names[: len(args)])
        kwargs = {name: bound[name] for name in kwargs}
        return _site(number, slot, function(*args, **kwargs), *kept)

    return _named(measured, f"varreg_{rule.name}_{number}")


def _site(number: int, slot: Tensor, out: Tensor, *saved: Tensor) -> Tensor:
    """Return `out`, with a node behind it."""
    used: Tensor = SiteNode.apply(number, slot.__dict__[_ARRIVED], slot, out, *saved)
    return used


def _bound(rule: Rule, args: Any, kwargs: Any) -> dict[str, Any]:
    return rule.bind(args, kwargs) or {}


def _spread_call(number: int) -> Callable[..., Tensor]:
    """Return a function that expands a parameter, or rows of it, along the batch."""

    def spread(slot: Tensor, x: Tensor, t: Tensor, *ids: Tensor) -> Tensor:
        t = t.detach()
        t = t.reshape((1,) * (x.dim() - t.dim()) + tuple(t.shape))
        return _site(number, slot, t.expand(x.shape[0], *t.shape[1:]), *ids)

    return _named(spread, f"varreg_spread_{number}")


def _named(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """Give a function a valid name, since graphs are turned into Python code."""
    function.__name__ = function.__qualname__ = name
    return function
