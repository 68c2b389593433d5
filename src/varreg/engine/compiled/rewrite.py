"""Insert our operations into a captured graph where parameters meet the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from varreg.engine.compiled.measured import SiteNode
from varreg.engine.compiled.sites import ForwardInGraph, RuleSite, function_of
from varreg.engine.rules import Rule


def rewrite(module: GraphModule, found: ForwardInGraph) -> None:
    """Insert our operations into a graph, and remove the markers."""
    graph, token = module.graph, found.token
    for number, site in enumerate(found.sites):
        with graph.inserting_before(site.node):
            if isinstance(site, RuleSite):
                call, args = _rule_call(number, site), (token, *site.node.args)
                new = graph.call_function(call, args, dict(site.node.kwargs))
            else:
                p = found.parameters[site.parameters[0]]
                ids = (site.operand.args[0],) if site.is_lookup else ()
                args = (token, site.carrier, site.operand, p, *ids)
                both = [site.carrier, site.carrier]
                both[site.position] = graph.call_function(_spread_call(number), args)
                new = graph.create_node(site.node.op, site.node.target, tuple(both))
        new.meta = dict(site.node.meta)
        site.node.replace_all_uses_with(new)
        graph.erase_node(site.node)
    graph.erase_node(found.enter)
    graph.erase_node(found.leave)
    graph.lint()
    module.recompile()


def _rule_call(number: int, site: RuleSite) -> Callable[..., Tensor]:
    """Return the function of a site, with its parameters detached and a node behind its result."""
    function, rule, wanted, saved = function_of(site.node), site.rule, site.wanted, site.saved

    def measured(token: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bound = _bound(rule, args, kwargs)
        parameters = [bound[name] for name in wanted]
        kept = [bound[name] for name in saved]
        for name in wanted:
            bound[name] = bound[name].detach()
        args = tuple(bound[name] for name in rule.names[: len(args)])
        kwargs = {name: bound[name] for name in kwargs}
        out = function(*args, **kwargs)
        used: Tensor = SiteNode.apply(number, len(parameters), token, out, *parameters, *kept)
        return used

    return _named(measured, f"varreg_{rule.name}_{number}")


def _bound(rule: Rule, args: Any, kwargs: Any) -> dict[str, Any]:
    return rule.bind(args, kwargs) or {}


def _spread_call(number: int) -> Callable[..., Tensor]:
    """Return a function that expands a parameter, or rows of it, along the batch."""

    def spread(token: Tensor, x: Tensor, t: Tensor, p: Tensor, *ids: Tensor) -> Tensor:
        t = t.detach()
        t = t.reshape((1,) * (x.dim() - t.dim()) + tuple(t.shape))
        t = t.expand(x.shape[0], *t.shape[1:])
        used: Tensor = SiteNode.apply(number, 1, token, t, p, *ids)
        return used

    return _named(spread, f"varreg_spread_{number}")


def _named(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """Give a function a valid name, since graphs are turned into Python code."""
    function.__name__ = function.__qualname__ = name
    return function
