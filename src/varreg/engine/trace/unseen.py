"""Tensors whose origin the tracer cannot see: find their place by their autograd graph.

Scripted functions, C++ extensions, a `torch.autograd.Function`, and transforms of `torch.func` such
as vmap make such tensors. Every gradient on its way to a parameter passes one of our nodes, which
knows where its outputs carry the batch. So a trial sends gradients back to test a place: a gradient
at the rows of one half of the samples must arrive only at rows of these samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg.engine.frames import is_called_by
from varreg.engine.marks import DERIVED, Derived, mark, mark_of
from varreg.engine.mechanisms.node import BackwardRuns, places_of
from varreg.engine.rehearsal.pauses import gradients_aside
from varreg.engine.trace.gradient_hooks import check_arriving, watch_module_hooks
from varreg.engine.trace.layout import Layout, Lost, Place, Where, only_sample
from varreg.engine.trace.trial.trial_values import (
    FAILURES,
    Verdict,
    is_close,
    rows_of,
    samples_in,
    splits,
    undisturbed,
)

if TYPE_CHECKING:
    from varreg.engine.trace.trace import Trace

Edge = tuple[Any, int, Place]
"""A node, the number of one of its outputs, and where that output carries the batch."""
NameOf = Callable[[Tensor], str | None]
"""The name of an observed parameter; None for any other tensor."""


def find_place(trace: Trace, t: Tensor, candidates: list[Place]) -> Where | Derived:
    """Find the place of a tensor of unknown origin, mark it, and return its mark."""
    assert t.grad_fn is not None
    trace.unseen += 1  # a part of the key: a model meets such tensors in the same order
    key = ("unseen", trace.unseen, t.grad_fn.name(), t.shape, t.dtype, tuple(candidates))
    where: Where | Derived | None = trace.verdicts.places.get(key)
    if trace.verdicts.is_due(key) or where is None or not torch.is_grad_enabled():
        with undisturbed(), gradients_aside(trace.observer.model):
            where = place_unseen(t, trace.batch, candidates, trace.name_unseen)
        if isinstance(where, Place):
            trace.verdicts.places[key] = at = where
            check_arriving(
                trace,
                t,
                lambda grad: sends_back(t, at, trace.name_unseen, grad),
                "the backward of an operation that is not a torch function",
            )
    if isinstance(where, Place) and places_of(t.grad_fn) is None:
        trace.escape(t.grad_fn.name())
    mark(t, where)
    if isinstance(where, Lost):
        trace.refuse_later(t, where)
    return where


def check_input(trace: Trace, t: Tensor, where: Where) -> Where:
    """Return where an input carries the batch. Check the place if the input comes from an earlier
    forward.

    That forward may have mixed the samples, or changed their order.
    """
    if t.grad_fn is None or trace.batch <= 1 or trace.lets_samples_meet:
        return where
    if not isinstance(where, Place):
        return where
    if trace.verdicts.is_due(("input", t.grad_fn.name(), t.shape)):
        with undisturbed(), gradients_aside(trace.observer.model):
            if are_mixed(t, where, trace.name_unseen):
                why = "an earlier forward mixed the samples of an input, or their order"
                return Lost(why, mixed=True)
    return where


def place_unseen(
    t: Tensor, batch: int, candidates: Sequence[Place], name_of: NameOf
) -> Place | Lost | Derived:
    """Return where a tensor of unknown origin carries the batch, or that it is made of parameters.

    `name_of` returns the name of an observed parameter. A parameter that the unseen operation used
    has no moments, and a warning will say so.
    """
    edges, parameters = _origins(t, name_of)
    if not edges:
        return DERIVED if parameters else Lost(_describe(t))
    if batch == 1:
        return only_sample(t)
    for node, number, at in edges:
        if node is t.grad_fn and number == t.output_nr:  # one of our nodes made it
            return at
    # if two dimensions fit, the place is not known
    fitting = [at for at in candidates if _try_place(t, at, edges) is Verdict.APART]
    return fitting[0] if len(fitting) == 1 else Lost(_describe(t))


_FOR_SEVERAL = torch.autograd.graph.register_multi_grad_hook.__code__


def hand_out(trace: Trace, t: Tensor) -> Any:
    """Return the node of a tensor that carries the batch. The user, who asked for it, may register
    hooks on it or on nodes behind it. A trial tests these hooks when a gradient arrives.
    """
    node, at = t.grad_fn, mark_of(t)
    if node is None or not isinstance(at, Place) or watch_module_hooks(trace):
        return node
    if is_called_by(_FOR_SEVERAL):  # it only asks whether the node will run
        return node
    if trace.verdicts.is_due(("grad_fn", trace.observer.forward.path(), node.name(), t.shape)):
        check_arriving(
            trace,
            t,
            lambda grad: sends_back(t, at, trace.name_unseen, grad, deep=True),
            "a hook on a node of the graph (grad_fn)",
        )
    return node


def sends_back(t: Tensor, place: Place, name_of: NameOf, grad: Tensor, deep: bool = False) -> bool:
    """Return whether the backward from a tensor keeps samples apart: a gradient for some samples
    alone must give these samples the same gradients as before. The test covers the graph up to our
    next nodes or, if `deep`, all nodes behind them.
    """
    edges, _ = _origins(t, name_of, deep)
    try:
        grads, places = _send(t, grad, edges, deep), [at for _, _, at in edges] * (1 + deep)
        for chosen in splits(place.batch):
            part = torch.where(rows_of(t, place, chosen), grad, 0)
            for a, b, at in zip(grads, _send(t, part, edges, deep), places, strict=True):
                if a is None or b is None:
                    continue
                if bool((rows_of(a, at, chosen) & ~is_close(a, b)).any()):
                    return False
    except FAILURES:  # it cannot be run a second time
        return True
    return True


def _send(t: Tensor, grad: Tensor, edges: list[Edge], deep: bool) -> list[Tensor | None]:
    """Send a gradient back. Return the gradient that arrives at each edge; if `deep`, also the
    gradient that its node receives: a hook on the node runs in between.
    """
    ends = [torch.autograd.graph.GradientEdge(node, number) for node, number, _ in edges]
    if deep:  # ends behind our nodes, so that these run
        ends += [torch.autograd.graph.GradientEdge(node, 0) for node in _accumulators(t)]
    received: dict[int, Sequence[Tensor | None]] = {}
    BackwardRuns.received = received
    try:
        arrived = torch.autograd.grad([t], ends, [grad], retain_graph=True, allow_unused=True)
    finally:
        BackwardRuns.received = None
    given = [received.get(id(node), ()) for node, _, _ in edges] if deep else []
    inside = [g[n] if n < len(g) else None for g, (_, n, _) in zip(given, edges, strict=False)]
    return [*arrived[: len(edges)], *inside]


def _accumulators(t: Tensor) -> list[Any]:
    """Return the nodes at which gradients of leaves behind a tensor are accumulated."""
    seen: set[Any] = set()
    stack = [t.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [n for n, _ in node.next_functions]
    return [node for node in seen if getattr(node, "variable", None) is not None]


def _describe(t: Tensor) -> str:
    return (
        f"a tensor of shape {tuple(t.shape)} was made by an operation that is not a torch function"
    )


def candidates_for(t: Tensor, batch: int) -> list[Place]:
    """Return the places that the sizes allow."""
    return [Layout(batch, dim) for dim, size in enumerate(t.shape) if size == batch]


def _origins(t: Tensor, name_of: NameOf, deep: bool = False) -> tuple[list[Edge], list[str]]:
    """Return the edges at which the graph reaches our nodes or inputs, and the names of parameters.

    The names are of the parameters that it reaches without passing such an edge. If `deep`, the
    search continues behind our nodes.
    """
    edges: list[Edge] = []
    parameters: list[str] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, int]] = [(t.grad_fn, t.output_nr)]
    while stack:
        edge = stack.pop()
        node, number = edge
        if node is None or edge in seen:
            continue
        seen.add(edge)
        places = places_of(node)
        leaf = getattr(node, "variable", None)
        if places is not None:
            place = places[number] if number < len(places) else None
            if place is not None:
                edges.append((node, number, place))
            if deep:
                stack += [(n, k) for n, k in node.next_functions]
        elif leaf is not None:
            where, name = mark_of(leaf), name_of(leaf)
            if isinstance(where, Place):
                edges.append((node, number, where))
            elif name is not None:
                parameters.append(name)
        else:
            stack += [(n, k) for n, k in node.next_functions]
    return edges, parameters


def are_mixed(t: Tensor, place: Place, name_of: NameOf) -> bool:
    """Return whether an earlier forward mixed the samples of an input."""
    edges, _ = _origins(t, name_of)
    edges = [edge for edge in edges if edge[2].batch == place.batch]
    return bool(edges) and _try_place(t, place, edges) is Verdict.MIXED


def _try_place(t: Tensor, place: Place, edges: list[Edge]) -> Verdict:
    """Return whether the gradient of each sample's rows reaches rows of that sample only."""
    ends = [torch.autograd.graph.GradientEdge(node, number) for node, number, _ in edges]
    moved = torch.zeros(place.batch, dtype=torch.bool, device="cpu")
    for chosen in splits(place.batch):
        # a random gradient at the rows of some samples must arrive at rows of these alone
        cotangent = torch.where(rows_of(t, place, chosen), torch.randn_like(t), 0)
        try:
            options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
            grads: Sequence[Tensor | None] = torch.autograd.grad([t], ends, [cotangent], **options)
        except FAILURES:
            return Verdict.UNDECIDED
        for grad, (_, _, at) in zip(grads, edges, strict=True):
            if grad is None:
                continue
            reached = grad != 0
            if bool((reached & rows_of(grad, at, ~chosen)).any()):
                return Verdict.MIXED
            moved |= samples_in(reached, at)  # a sample that no gradient reaches is no evidence
    return Verdict.APART if bool(moved.all()) else Verdict.UNDECIDED
