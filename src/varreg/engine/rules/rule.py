"""Layer rules: the contribution of each sample to the gradient of a layer's parameters, given
dL/d(output).

A rule serves one torch function. It takes the function's arguments by name and returns a
`Contribution` for each of the arguments in `use.wants`. Only the tensors named in `saves` are saved
for the rule; it gets None for the others. A rule serves every module that calls its function, in
`torch.nn` or elsewhere.

Rules call `use.rows` to bring tensors to one shape: `[batch, rows, features]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varreg.backends import BACKENDS
from varreg.engine.contribution import Contribution, Dense
from varreg.engine.partition import Partition
from varreg.engine.trace.layout import Layout, Place, Single, rows, samples

Contributions = dict[str, Contribution]


class Use(NamedTuple):
    """One call of a torch function that uses parameters on the batch, as its rule needs it.

    It has no tensors, and serves all calls with the same key. It names tensors by their positions
    among the tensors of the call.
    """

    rule: Rule
    wants: dict[str, int]
    """The arguments whose contributions are computed, each with its position."""
    saved: dict[str, int]
    """The arguments that are saved for the backward pass, each with its position."""
    positions: tuple[int | str, ...] | None
    """Positions or names of the `wants` in the call's arguments; None if some are in lists."""
    shapes: dict[str, torch.Size]
    """The shape of every tensor argument."""
    input_places: dict[str, Place]
    """Where the batch is, for every argument that carries it."""
    output_place: Place
    """Where the batch is in the (first) output."""
    partition: Partition
    arguments: dict[str, Any]
    """All arguments, with None for tensors."""
    is_in_lists: bool = False
    """True: some of the saved arguments are in lists."""
    output_places: tuple[Place, ...] = ()
    """Where the batch is in each of the outputs."""

    def rows(self, t: Tensor, name: str | None = None, features: int = 1) -> Tensor:
        """Return `[batch, rows, …features]` of the argument `name`, or of the output."""
        at = self.output_place if name is None else self.input_places[name]
        if features == 1 and t.dim() == 2 and at == (t.shape[0], 0, 1, 1):  # one row for a sample
            return t.unsqueeze(1)
        return rows(t, at, features)

    def where(self, name: str) -> Place | None:
        """Return where an argument carries the batch; None if it does not. A constant with one row
        for each row of the batch has the place of these rows.
        """
        if name in self.input_places:
            return self.input_places[name]
        shape = self.shapes[name][:-1]
        return next(
            (at for n, at in self.input_places.items() if self.shapes[n][:-1] == shape), None
        )


class Rule(NamedTuple):
    """Computes the contributions of samples to the parameters of one torch function."""

    name: str
    names: tuple[str, ...]
    """The served function's arguments, in order."""
    serves: frozenset[str]
    """The arguments whose contributions the rule can compute. If another argument is a parameter,
    the call is measured by repetition.
    """
    saves: frozenset[str]
    """The tensor arguments that are saved for the backward pass."""
    run: Callable[..., Contributions]
    carries: frozenset[str]
    """The arguments that may carry the batch. If another one does, the call is measured by
    repetition.
    """
    when: Callable[[Use], bool]
    """Returns whether the rule serves this call. If not, the call is measured by repetition."""
    forward: Callable[..., Any] | None
    """Called in place of the function, if detached parameters would change its result in the last
    bits.
    """
    takes_over: bool
    """True: the sum of the contributions is the gradient. False: autograd computes the gradient,
    and the rule only measures.
    """
    spares_sum: Callable[[Use], bool]
    """Returns whether ΣW needs no pass that computes S as well. Where only sums over elements are
    kept, autograd then computes the gradient, and the rule does not take over.
    """

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by name; None if some have names that the rule does not know."""
        if kwargs and not kwargs.keys() <= set(self.names):
            return None
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


RULES: dict[Any, Rule] = {}


def rule(
    *functions: Any, **options: Any
) -> Callable[[Callable[..., Contributions]], Callable[..., Contributions]]:
    """Register the decorated function, `rule(use, grads, *the function's own arguments)`, for
    torch functions. The options are those of `make_rule`.
    """

    def add(run: Callable[..., Contributions]) -> Callable[..., Contributions]:
        RULES.update(dict.fromkeys(functions, make_rule(run, **options)))
        return run

    return add


def make_rule(
    run: Callable[..., Contributions],
    serves: str = "weight bias",
    saves: str = "",
    carries: str = "input",
    when: Callable[[Use], bool] = lambda use: True,
    forward: Callable[..., Any] | None = None,
    takes_over: bool = True,
    spares_sum: Callable[[Use], bool] = lambda use: False,
) -> Rule:
    """Return a rule that runs a function `run(use, grads, *the torch function's arguments)`. The
    other arguments become the fields of `Rule`; names of arguments are separated by spaces.
    """
    names = tuple(inspect.signature(run).parameters)[2:]
    served, saved, carrying = (frozenset(x.split()) for x in (serves, saves, carries))
    rest = when, forward, takes_over, spares_sum
    return Rule(run.__name__, names, served, saved, run, carrying, *rest)


def has_rows(use: Use) -> bool:
    """Return whether every carrier has a dimension of rows. `x[i]`, one sample alone, has none."""
    return not any(isinstance(at, Single) for at in (use.output_place, *use.input_places.values()))


def batch_first(use: Use) -> bool:
    """Return whether the batch is in dimension 0 of everything that carries it."""
    every = (use.output_place, *use.input_places.values())
    return all(not isinstance(at, Single) and at.dim == 0 for at in every)


def has_batch_in_rows(use: Use, *names: str, features: int = 1) -> bool:
    """Return whether the batch is in none of the last `features` dimensions of these arguments. A
    product with the identity keeps samples apart there too.
    """
    places = [(at, len(use.shapes[n])) for n in names if (at := use.input_places.get(n))]
    return all(isinstance(at, Single) or at.dim < dims - features for at, dims in places)


def row_sums(use: Use, t: Tensor) -> Dense:
    """Return Σ_r of `[b, r, *shape]`: contributions to a parameter that is added to each row."""
    if t.shape[1] == 1:
        return Dense(use.partition, t[:, 0])
    summed = BACKENDS[t.device.type].rows(t)
    return Dense(use.partition, t.sum(1) if summed is None else summed)


def images(t: Tensor, at: Place) -> Tensor:
    """Return `[batch·images, channels, …]`, with all images of one sample one after the other."""
    if isinstance(at, Layout):
        return t if at.outer == 1 else samples(t, at).flatten(0, 2)
    return samples(t, at).flatten(0, 1)


def channel_sums(use: Use, t: Tensor) -> Dense:
    """Return the sums over pixels and images of `[b·k, c, …]`, as `[b, c]`."""
    summed = BACKENDS[t.device.type].pixels(t) if t.dim() > 2 else t
    if summed is None:
        summed = t.sum(tuple(range(2, t.dim())))
    batch = use.partition.batch
    if len(t) == batch:
        return Dense(use.partition, summed)
    return row_sums(use, summed.reshape(batch, t.shape[0] // max(batch, 1), t.shape[1]))
