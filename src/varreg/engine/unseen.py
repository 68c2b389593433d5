"""Tensors that come from where the tracer cannot look: scripted functions, C++ extensions, a
`torch.autograd.Function`. Their graph tells where they carry the batch.

Every gradient on its way to a parameter passes one of our nodes, which knows where its outputs carry
the batch. So a place for the tensor is tried by its gradient: what is sent back from one half of
the samples may reach rows of these samples only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from varreg.engine.layout import Layout, Lost, Place, only_sample
from varreg.engine.marks import DERIVED, Derived, mark_of
from varreg.engine.nodes import places_of
from varreg.engine.trial import FAILURES, Verdict, is_close, rows_of, samples_in, splits

Edge = tuple[Any, int, Place]  # a node, which of its outputs, and where that carries the batch


def place_unseen(
    t: Tensor, batch: int, candidates: Sequence[Place], name_of: Callable[[Tensor], str | None]
) -> Place | Lost | Derived:
    """Return where a tensor of unknown origin carries the batch, or that it is made of parameters.

    `name_of` tells the names of observed parameters. One that was used on the way has no moments,
    and a warning will say so.
    """
    edges, parameters = _origins(t, name_of)
    if not edges:
        return DERIVED if parameters else Lost(_what(t))
    if batch == 1:
        return only_sample(t)
    if direct := [place for node, nr, place in edges if node is t.grad_fn and nr == t.output_nr]:
        return direct[0]
    fits = [place for place in candidates if _sends_back(t, place, edges) is Verdict.APART]
    return fits[0] if len(fits) == 1 else Lost(_what(t))


def sends_back(t: Tensor, place: Place, name_of: Callable[[Tensor], str | None], grad: Tensor) -> bool:
    """Try whether the gradient that arrives at a tensor goes on as its parts would."""
    edges, _ = _origins(t, name_of)
    ends = [torch.autograd.graph.GradientEdge(node, number) for node, number, _ in edges]
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    try:
        whole: Sequence[Tensor | None] = torch.autograd.grad([t], ends, [grad], **options)
        for chosen in itertools.islice(splits(place.batch), 2):
            part = torch.where(rows_of(t, place, chosen), grad, 0)
            parts: Sequence[Tensor | None] = torch.autograd.grad([t], ends, [part], **options)
            for a, b, (_, _, at) in zip(whole, parts, edges, strict=True):
                if a is not None and b is not None and bool((rows_of(a, at, chosen) & ~is_close(a, b)).any()):
                    return False
    except FAILURES:  # it cannot be run a second time
        return True
    return True


def _what(t: Tensor) -> str:
    return f"a tensor of shape {tuple(t.shape)} was made by an operation that is not a torch function"


def candidates_for(t: Tensor, batch: int) -> list[Place]:
    """Return the places that the sizes allow."""
    return [Layout(batch, dim) for dim, size in enumerate(t.shape) if size == batch]


def _origins(t: Tensor, name_of: Callable[[Tensor], str | None]) -> tuple[list[Edge], list[str]]:
    """Return the edges at which the graph leads to our nodes or to inputs, and the names of
    parameters that it reaches without them.
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
        elif leaf is not None:
            where, name = mark_of(leaf), name_of(leaf)
            if isinstance(where, Place):
                edges.append((node, number, where))
            elif name is not None:
                parameters.append(name)
        else:
            stack += [(n, k) for n, k in node.next_functions]
    return edges, parameters


def are_mixed(t: Tensor, place: Place, name_of: Callable[[Tensor], str | None]) -> bool:
    """Try whether the samples of an input met on their way from an earlier forward."""
    edges, _ = _origins(t, name_of)
    edges = [edge for edge in edges if edge[2].batch == place.batch]
    return bool(edges) and _sends_back(t, place, edges) is Verdict.MIXED


def _sends_back(t: Tensor, place: Place, edges: list[Edge]) -> Verdict:
    """Try whether the gradient of each sample's rows reaches rows of that sample only."""
    ends = [torch.autograd.graph.GradientEdge(node, number) for node, number, _ in edges]
    moved = torch.zeros(place.batch, dtype=torch.bool)
    for chosen in splits(place.batch):
        cotangent = torch.where(rows_of(t, place, chosen), torch.randn_like(t), 0)
        try:
            options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
            grads: Sequence[Tensor | None] = torch.autograd.grad([t], ends, [cotangent], **options)
        except FAILURES:
            return Verdict.UNDECIDED
        for grad, (_, _, at) in zip(grads, edges, strict=True):
            if grad is None:
                continue
            hit = grad != 0
            if bool((hit & rows_of(grad, at, ~chosen)).any()):
                return Verdict.MIXED
            moved |= samples_in(hit, at)
    return Verdict.APART if bool(moved.all()) else Verdict.UNDECIDED
