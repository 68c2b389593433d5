"""All that comes after the base's step, for all parameters in one pass over memory, by native code.

For the usual optimizers with the usual options. Everything else goes part by part through PyTorch (parts.py), which is also the definition:
the same numbers, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varreg import native
from varreg.engine import Moments
from varreg.regularizer import limit

HISTORY = ("vr_history", "vr_count")


class Increment(NamedTuple):
    """An increment δ̄ that native code knows, with the base at x' = x − lr·δ̄ (or at that and decoupled weight decay)."""

    name: str
    state: tuple[str, ...]
    """What of the state it is made of, each of the parameter's shape."""
    numbers: Callable[[Mapping[str, Any], bool], tuple[float, ...]]
    """Its constants, from a state after the base's step, and whether the sums of the variance are new."""
    of_gradient: bool = False
    """Is it made of the gradient itself, too?"""


class Fused(NamedTuple):
    """A parameter whose step is native."""

    owner: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    moments: Moments
    grad: Tensor
    """As the base sees it, if the increment is made of it."""
    kappa2: float
    increment: Increment


def usual(options: Mapping[str, Any]) -> bool:
    """Are these options such that native code could do the whole step?"""
    return options["per"] == "element" and not options["calibrate"] and native.knows(options)


def serves(p: Tensor, grad: Tensor, m: Moments, state: Mapping[str, Any], increment: Increment) -> bool:
    """Can native code do it, as the memory is? The state that is missing yet will be like the parameter and its gradient."""
    there = [t for name in (*increment.state, *HISTORY) if (t := state.get(name)) is not None]
    return native.serves(p, grad, m.total, m.square, *there)


def run(works: list[Fused], kept: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Take the steps. λ of each parameter is written to memory that is kept from before, if there is some."""
    lambdas = {w.owner: _memory(w.owner, kept.get(w.owner)) for w in works}
    native.update(_updates(works, lambdas))
    return lambdas


def _updates(works: list[Fused], lambdas: Mapping[Tensor, Tensor]) -> Iterator[native.Update]:
    known: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[float, ...]]] = {}
    for p, group, state, m, grad, kappa2, increment in works:
        key = id(group), m.count, m.groups, kappa2, m.square.dtype
        if key not in known:
            factor, rounding = m.constants
            numbers = (m.count, factor * kappa2, rounding, *native.numbers(group, limit(m.count, group)), float(group["lr"]))
            known[key] = native.kinds(group, increment.name), numbers
        steps = state["vr_steps"]
        own = [state[name] for name in increment.state]
        tensors = (m.total, m.square, p, state["vr_history"], state["vr_count"], lambdas[p], grad, steps, *own)
        kinds, numbers = known[key]
        yield tensors, kinds, (*numbers, *increment.numbers(state, steps.item() == 0))


def _memory(p: Tensor, kept: Tensor | None) -> Tensor:
    """For λ."""
    alike = kept is not None and kept.shape == p.shape and kept.dtype == p.dtype and kept.is_contiguous()
    return kept if kept is not None and alike else torch.empty_like(p)
