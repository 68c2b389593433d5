"""Trials of any function: does it keep samples apart?

The samples are split into two sides, in so many ways that any two samples are on different sides at
least once. Each time, one side gets other values, and the other side must not change: neither its
output, nor the gradients that a vector-Jacobian product sends back. This is done with the given
values and with random ones. If some sample's output never changes, the trial shows nothing about
that sample, and is repeated with random values. If these show nothing either, the verdict is
`UNDECIDED`, which callers treat as a no.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from varreg.engine.trace.layout import Layout, Place, Single
from varreg.engine.trace.trial.trial_values import (
    FAILURES,
    Run,
    Verdict,
    exchange,
    is_close,
    other_samples,
    random_like,
    rows_of,
    samples_in,
    shuffle,
    shuffle_all,
    splits,
)
from varreg.thresholds import EXCHANGES, ROUNDS, SIZES_TRIED

Draw = Callable[[], tuple[list[Tensor], list[Tensor]]]
"""Makes values of the inputs, and the values that replace them."""


def keeps_apart(
    run: Run,
    inputs: list[Tensor],
    places: Sequence[Place],
    output_places: Sequence[Place],
    needs_proof: bool = True,
    below: int = 0,
    padded: bool = False,
    few: int | None = None,
) -> Verdict:
    """Return whether each sample affects only its own place in the outputs of a function.

    With `needs_proof`, the output of every sample must change with its values in at least one
    trial. Otherwise, an output that never changes counts as a constant, as it may be in a model.
    Integers may have any value `below` a limit. Outputs may be `padded` to the size of the longest
    sample, with padding that is the same for all. If runs are expensive, `few` limits the number of
    pairs of splits.
    """
    moved = [torch.zeros(places[0].batch, dtype=torch.bool, device="cpu") for _ in output_places]
    tried = exchanges = 0
    draws = _draws(inputs, places, below) if needs_proof else iter([_at_hand(inputs, places)])
    for draw in draws:
        try:
            new, others = draw()
            number = _try_values(run, new, others, places, output_places, moved, padded, few)
        except FAILURES:  # the function does not accept such values
            continue
        if number is None:
            return Verdict.MIXED
        tried, exchanges = tried + 1, exchanges + number
        is_enough = tried >= len(SIZES_TRIED) + 2 and exchanges >= EXCHANGES
        if is_enough and all(bool(m.all()) for m in moved):
            break
    if not tried or (needs_proof and not all(bool(m.all()) for m in moved)):
        return Verdict.UNDECIDED
    return Verdict.APART


def _at_hand(inputs: list[Tensor], places: Sequence[Place]) -> Draw:
    return lambda: (inputs, other_samples(inputs, places))


def _draws(inputs: list[Tensor], places: Sequence[Place], below: int) -> Iterator[Draw]:
    """Yield values to try, each with the values that replace them.

    The values of other samples replace the given values; then random values do, since an exchange
    of two samples does not reveal every dependence on their order. Then random values of several
    sizes follow, in several rounds, since few samples can be exchanged in few ways only.
    """

    def random(size: float, positive: bool = False, below: int = 0) -> list[Tensor]:
        return [
            random_like(t, positive, below) * size
            if t.is_floating_point()
            else random_like(t, positive, below)
            for t in inputs
        ]

    yield _at_hand(inputs, places)
    yield lambda: (inputs, random(1.0))
    for _ in range(ROUNDS):
        for size in SIZES_TRIED:
            yield lambda size=size: (random(size), random(size))  # type: ignore[misc]
        yield lambda: (random(1.0, True, below), random(1.0, True, below))
        yield lambda: (random(1.0, False, below), random(1.0, False, below))


def _try_values(
    run: Run,
    inputs: list[Tensor],
    others: list[Tensor],
    places: Sequence[Place],
    output_places: Sequence[Place],
    moved: list[Tensor],
    padded: bool,
    few: int | None,
) -> int | None:
    """Return the number of exchanges that kept samples apart; None if one did not. Note the samples
    whose outputs changed with their values.
    """
    before, number = run(inputs), 0
    for i, place in enumerate(output_places):  # without rows, a sample has no output
        moved[i] |= ~samples_in(torch.ones_like(before[i], dtype=torch.bool), place)
    for chosen in itertools.islice(splits(places[0].batch), None if few is None else 2 * few):
        after = run(exchange(inputs, others, places, chosen))
        for i, place in enumerate(output_places):
            same = _unmoved(before[i], after[i], place, ~chosen, padded)
            if same is None:
                return None
            moved[i] |= samples_in(~same, place) & chosen
        number += 1
    return number


def stays_among_copies(
    run: Run,
    inputs: list[Tensor],
    places: Sequence[Place],
    output_places: Sequence[Place],
    most: int,
) -> bool:
    """Return whether a sample's outputs stay the same when all other samples become copies of it.

    This finds a branch that is taken only if samples differ, which an exchange does not find.
    """
    if not all(isinstance(place, Layout) for place in places):
        return True
    batch, before = places[0].batch, run(inputs)
    for number in torch.randperm(batch, device="cpu")[:most].tolist():
        after = run(shuffle_all(inputs, places, torch.full((batch,), number, device="cpu")))
        still = torch.arange(batch, device="cpu") == number
        for i, place in enumerate(output_places):
            if _unmoved(before[i], after[i], place, still, padded=True) is None:
                return False
    return True


def follows_order(
    run: Run,
    run_otherwise: Run,
    inputs: list[Tensor],
    places: Sequence[Place],
    output_places: Sequence[Place],
    make_order: Callable[[int], Tensor],
    rounding: float = 1.0,
) -> bool:
    """Return whether reordered samples give the same outputs in the new order, within `rounding`
    times the usual rounding.

    `run_otherwise` draws other random numbers. If they change the outputs, the outputs need not
    follow the order, since numbers are drawn for rows by their position.
    """
    if not all(isinstance(place, Layout) for place in (*places, *output_places)):
        return True
    order = make_order(places[0].batch)
    before = run(inputs)
    again = run_otherwise(inputs)
    if not all(bool(is_close(a, b).all()) for a, b in zip(before, again, strict=True)):
        return True
    after = run(shuffle_all(inputs, places, order))
    for i, place in enumerate(output_places):
        expected = shuffle(before[i], place, order)
        if expected is None or expected.shape != after[i].shape:
            return False
        if not bool(is_close(expected, after[i], rounding).all()):
            return False
    return True


def _unmoved(
    before: Tensor, after: Tensor, at: Place, still: Tensor, padded: bool
) -> Tensor | None:
    """Return where two outputs are equal; None if rows changed that must not change.

    If outputs may be `padded`, their sizes may differ, and the common part is compared.
    """
    if before.shape != after.shape:
        if not (padded and _is_padding(before, after, at, still)):
            return None
        part = tuple(slice(min(n, m)) for n, m in zip(before.shape, after.shape, strict=True))
        before, after = before[part], after[part]
    same = is_close(before, after)
    return None if bool((rows_of(before, at, still) & ~same).any()) else same


def _is_padding(a: Tensor, b: Tensor, at: Place, still: Tensor) -> bool:
    """Return whether two tensors differ only by padding, in the rows that must not change.

    Then they differ in the size of one dimension, and the part that only one of them has is
    constant along this dimension, for every such sample.
    """
    if isinstance(at, Single) or a.dim() != b.dim():
        return False
    dims = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
    if len(dims) != 1 or at.dim in dims:
        return False
    (dim,), longer = dims, a if a.shape[dims[0]] > b.shape[dims[0]] else b
    rows = rows_of(longer, at, still).flatten().nonzero().flatten()
    beyond = longer.narrow(dim, min(a.shape[dim], b.shape[dim]), abs(a.shape[dim] - b.shape[dim]))
    rest = beyond.index_select(at.dim, rows).movedim((at.dim, dim), (0, 1)).flatten(0, 1)
    return not len(rest) or bool(is_close(rest[:1].expand_as(rest), rest).all())
