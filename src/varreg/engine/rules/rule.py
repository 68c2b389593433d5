"""Layer rules: what each sample contributes to the gradient of a layer's parameters, given dL/d(output).

A rule serves one torch function. It takes the function's arguments by name and returns a `Contribution` for each of the
arguments that `call.wants`. Only the tensors named in `saves` are kept for it; the others come as None. The layers of
`torch.nn` are served because they call these functions; so is any other module that does.

Shapes are normalized once, at the door, by `call.rows`: `[batch, rows, features]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varreg import native
from varreg.engine.contribution import Bias, Contribution, Dense, Lazy, Outer, Partition
from varreg.engine.layout import Layout, Place, Single, rows, samples

Contributions = dict[str, Contribution]


class Call(NamedTuple):
    """One call of a torch function in which parameters met the batch."""

    wants: frozenset[str]
    """The arguments whose contributions are asked for."""
    shapes: dict[str, torch.Size]
    """The shape of every tensor argument."""
    layouts: dict[str, Place]
    """Where the batch is, for every argument that carries it."""
    out: Place
    """Where the batch is in the (first) output."""
    partition: Partition
    arguments: dict[str, Any]
    """All arguments, with None for tensors."""

    def rows(self, t: Tensor, name: str | None = None, features: int = 1) -> Tensor:
        """`[batch, rows, …features]` of the argument `name`, or of the output."""
        return rows(t, self.out if name is None else self.layouts[name], features)

    def where(self, name: str) -> Place | None:
        """Return where the batch is in an argument; a constant that is paired with the batch row
        by row has it where the others have it.
        """
        if name in self.layouts:
            return self.layouts[name]
        shape = self.shapes[name][:-1]
        return next((at for n, at in self.layouts.items() if self.shapes[n][:-1] == shape), None)


class Rule(NamedTuple):
    name: str
    names: tuple[str, ...]
    """The served function's arguments, in order."""
    serves: frozenset[str]
    """The arguments whose contributions it can give. If a parameter comes as another one, the general rule serves the call."""
    saves: frozenset[str]
    """The tensor arguments that are kept for the backward pass."""
    run: Callable[..., Contributions]
    carries: frozenset[str]
    """The arguments that may carry the batch. If another one does, the general rule serves the call."""
    when: Callable[[Call], bool]
    """Does the rule serve this call? If not, the general one does."""
    forward: Callable[..., Any] | None
    """What to call in place of the function, for the same result to the last bit when its parameters are detached."""
    takes_over: bool
    """Do the contributions replace autograd's own gradient of the parameters? If not, they are measured beside it."""

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments by name; None if some have names that the rule does not know."""
        if kwargs and not kwargs.keys() <= set(self.names):
            return None
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


RULES: dict[Any, Rule] = {}


def rule(
    *functions: Any,
    serves: str = "weight bias",
    saves: str = "",
    carries: str = "input",
    when: Callable[[Call], bool] = lambda call: True,
    forward: Callable[..., Any] | None = None,
    takes_over: bool = True,
) -> Callable[[Callable[..., Contributions]], Callable[..., Contributions]]:
    """Register the decorated function, `rule(call, grads, *the function's own arguments)`, for torch functions."""

    def add(run: Callable[..., Contributions]) -> Callable[..., Contributions]:
        made = make_rule(run, serves, saves, carries, when, forward, takes_over)
        RULES.update(dict.fromkeys(functions, made))
        return run

    return add


def make_rule(
    run: Callable[..., Contributions],
    serves: str = "weight bias",
    saves: str = "",
    carries: str = "input",
    when: Callable[[Call], bool] = lambda call: True,
    forward: Callable[..., Any] | None = None,
    takes_over: bool = True,
) -> Rule:
    """Return a rule that runs a function `run(call, grads, *the served function's own arguments)`."""
    names = tuple(inspect.signature(run).parameters)[2:]
    served, saved, carrying = (frozenset(x.split()) for x in (serves, saves, carries))
    return Rule(
        run.__name__, names, served, saved, run, carrying, when, forward, takes_over
    )


def has_rows(call: Call) -> bool:
    """Has every carrier a dimension of rows? `x[i]`, all of one sample's, has none."""
    return not any(isinstance(at, Single) for at in (call.out, *call.layouts.values()))


def batch_first(call: Call) -> bool:
    """Is the batch in dimension 0 of everything that carries it?"""
    every = (call.out, *call.layouts.values())
    return all(not isinstance(at, Single) and at.dim == 0 for at in every)


def row_sums(call: Call, t: Tensor) -> Dense:
    """`[b, r, *shape]` → Σ_r: the contribution of whatever is added to every row."""
    if t.shape[1] == 1:
        return Dense(call.partition, t[:, 0])
    found = native.reduce.rows(t)
    return Dense(call.partition, t.sum(1) if found is None else found)


def bias_of(weight: Contribution | None, make: Callable[[], Contribution]) -> Contribution:
    """Σ_r δ_br, which may come with what the weight gets."""
    return Bias(weight, make) if isinstance(weight, Outer | Lazy) else make()


def images(t: Tensor, at: Place) -> Tensor:
    """`[batch·images, channels, …]` with the images of a sample side by side; it may have several."""
    if isinstance(at, Layout):
        return t if at.outer == 1 else samples(t, at).flatten(0, 2)
    return samples(t, at).flatten(0, 1)


def channel_sums(call: Call, t: Tensor) -> Dense:
    """`[b·k, c, …]` → `[b, c]`."""
    found = native.reduce.pixels(t) if t.dim() > 2 else t
    summed = t.sum(tuple(range(2, t.dim()))) if found is None else found
    batch = call.partition.batch
    if len(t) == batch:
        return Dense(call.partition, summed)
    return row_sums(call, summed.reshape(batch, t.shape[0] // max(batch, 1), t.shape[1]))
