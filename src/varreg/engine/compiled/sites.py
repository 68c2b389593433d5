"""Find the sites: where parameters meet the batch in a graph that torch.compile has captured.

The sites are found from the graph alone. A certificate, made by a run of the graph, confirms them
(`certificate.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from varreg import _torch
from varreg.engine.compiled.measured import ENTER, LEAVE
from varreg.engine.rules import RULES, Rule
from varreg.engine.trace.functions import ELEMENTWISE, is_in_place


class RuleSite(NamedTuple):
    """A call that a rule measures."""

    node: Node
    wanted: tuple[str, ...]
    """The arguments that are parameters, by name."""
    parameters: tuple[int, ...]
    """Their numbers among the parameters of the graph."""
    saved: tuple[str, ...]
    """The arguments that the rule needs in backward."""

    @property
    def rule(self) -> Rule:
        """Return the rule of the called function."""
        return RULES[function_of(self.node)]

    @property
    def bound(self) -> dict[str, Any]:
        """Return the call's arguments by name."""
        return self.rule.bind(self.node.args, self.node.kwargs) or {}


class SpreadSite(NamedTuple):
    """A call that broadcasts a parameter, or rows of one, along the batch."""

    node: Node
    position: int
    """Which of the two arguments is the parameter, or the lookup of its rows; the other one carries
    the batch."""
    parameters: tuple[int, ...]
    """The number of the parameter among the parameters of the graph."""
    is_lookup: bool

    @property
    def operand(self) -> Node:
        """Return the parameter, or the lookup of its rows."""
        return self.node.args[self.position]  # type: ignore[return-value]

    @property
    def carrier(self) -> Node:
        """Return the argument that carries the batch."""
        return self.node.args[1 - self.position]  # type: ignore[return-value]


Site = RuleSite | SpreadSite


class ForwardInGraph(NamedTuple):
    """The observed forward in a graph, and the sites in it."""

    enter: Node
    leave: Node
    inputs: list[Node]
    token: Node
    inside: list[Node]
    outputs: list[Node]
    parameters: list[Node]
    """The placeholders of observed parameters that the forward uses."""
    sites: list[Site]


def find(graph: Graph, is_parameter: Sequence[bool]) -> ForwardInGraph | None:
    """Return the observed forward in a graph with its sites; None if it cannot be measured in the
    graph.

    `is_parameter` says which of the placeholders are observed parameters.
    """
    nodes = list(graph.nodes)
    enters, leaves = (
        [i for i, n in enumerate(nodes) if n.op == "call_function" and n.target is mark]
        for mark in (ENTER, LEAVE)
    )
    if len(enters) != 1 or len(leaves) != 1:
        return None  # the forward is in several graphs, or several are in this one
    enter, leave, inside = nodes[enters[0]], nodes[leaves[0]], nodes[enters[0] + 1 : leaves[0]]
    placeholders = [n for n in nodes if n.op == "placeholder"]
    observed = [n for n, yes in zip(placeholders, is_parameter, strict=True) if yes]
    inputs, outputs = list(enter.all_input_nodes), list(leave.all_input_nodes)
    token = inputs.pop()
    others = [n for n in placeholders if n not in observed]
    if any(_needs_gradient(n) for n in (*inputs, *others)):
        return None  # its origin would have to be examined in each call
    if not _is_closed(inside, leave, {*nodes[leaves[0] :]}):
        return None
    carriers = _carriers(inputs, inside)
    used = [n for n in observed if any(user in inside for user in n.users)]
    sites = _sites(inside, used, carriers)
    if sites is None:
        return None
    return ForwardInGraph(enter, leave, inputs, token, inside, outputs, used, sites)


def _is_closed(inside: list[Node], leave: Node, after: set[Node]) -> bool:
    """Return whether all calls are of plain functions, and only outputs are used outside."""
    outputs = set(leave.all_input_nodes)
    for node in inside:
        if node.op not in ("call_function", "call_method", "get_attr"):
            return False
        if not _is_plain_call(node.target):
            return False
        if node not in outputs and any(user in after for user in node.users):
            return False
    return True


def _carriers(inputs: Iterable[Node], inside: list[Node]) -> set[Node]:
    """Return the nodes whose values depend on values of the inputs. Sizes do not count."""
    carriers = set(inputs)
    for node in inside:
        if _is_tensor(node) and any(n in carriers for n in node.all_input_nodes):
            carriers.add(node)
    return carriers


def _sites(inside: list[Node], parameters: list[Node], carriers: set[Node]) -> list[Site] | None:
    """Return the sites; None if parameters meet the batch in a call that no rule measures and that
    is no broadcast.
    """
    numbers = {node: i for i, node in enumerate(parameters)}
    lookups: dict[Node, int] = {}
    found: list[Site] = []
    for node in inside:
        used = [n for n in node.all_input_nodes if n in numbers or n in lookups]
        if not used:
            continue
        function = function_of(node)
        site: Site | None = None
        if node not in carriers and _is_lookup(node, function, used):
            lookups[node] = numbers[used[0]]
            continue
        if node in carriers and not is_in_place(function):
            if function in ELEMENTWISE:
                site = _spread_site(node, used, numbers, lookups, carriers)
            elif function in RULES and not any(n in lookups for n in used):
                site = _rule_site(node, RULES[function], numbers)
        if site is None:
            return None
        found.append(site)
    return found


def _rule_site(node: Node, rule: Rule, numbers: dict[Node, int]) -> RuleSite | None:
    bound = rule.bind(node.args, node.kwargs)
    if bound is None or not rule.takes_over or bound.get("max_norm") is not None:
        return None
    wanted = tuple(name for name, a in bound.items() if isinstance(a, Node) and a in numbers)
    met = [bound[name] for name in wanted]
    if not set(wanted) <= rule.serves or len({*met}) < len(met):
        return None
    if {n for n in node.all_input_nodes if n in numbers} != {*met}:
        return None  # one is in a list
    saves = rule.saves if wanted != ("bias",) else frozenset()
    saved = tuple(
        name for name, a in bound.items() if name in saves and isinstance(a, Node) and _is_tensor(a)
    )
    return RuleSite(node, wanted, tuple(numbers[n] for n in met), saved)


def _spread_site(
    node: Node,
    used: list[Node],
    numbers: dict[Node, int],
    lookups: dict[Node, int],
    carriers: set[Node],
) -> SpreadSite | None:
    operand = used[0]
    if len(node.args) != 2 or node.kwargs or len(used) != 1 or operand not in node.args:
        return None
    position = node.args.index(operand)
    carrier = node.args[1 - position]
    if not isinstance(carrier, Node) or carrier not in carriers:
        return None
    x, t = carrier.meta["example_value"], operand.meta["example_value"]
    if t.dim() > x.dim() or (t.dim() == x.dim() and t.shape[0] != 1):
        return None
    is_lookup = operand in lookups
    number = lookups[operand] if is_lookup else numbers[operand]
    return SpreadSite(node, position, (number,), is_lookup)


def function_of(node: Node) -> Any:
    """Return the torch function that a node calls, as the tracer names it."""
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None)
    target: Any = node.target
    name = getattr(target, "__name__", "")
    if getattr(operator, name, None) is target:
        return getattr(Tensor, f"__{name.strip('_')}__", target)
    return target


def _is_lookup(node: Node, function: Any, used: list[Node]) -> bool:
    """Return whether rows of a parameter are looked up, the same for all samples."""
    if function is not F.embedding:
        return False
    bound = RULES[F.embedding].bind(node.args, node.kwargs) or {}
    return used == [bound.get("weight")] and bound.get("max_norm") is None


def _is_tensor(node: Node) -> bool:
    value = node.meta.get("example_value")
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(v, torch.Tensor) for v in values)


def _needs_gradient(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_plain_call(target: Any) -> bool:
    """Return whether a node of a captured graph calls a plain function on tensors. Operations that
    take graphs as arguments, switch gradients or autocast, or hook a gradient are not plain.
    """
    if isinstance(target, _torch.HigherOrderOperator):
        return False
    return getattr(target, "__name__", "") not in _SWITCHES


_SWITCHES = frozenset(
    (
        *("_set_grad_enabled", "_enter_autocast", "_exit_autocast"),
        *("_enter_inference_mode", "_exit_inference_mode"),
        *("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"),
        *("register_hook", "_register_hook_trampoline"),
    )
)
