"""Trials of any function, to see whether it keeps samples apart.

What is not known is tried. The samples are split in two in so many ways that every two of them are
once on different sides. Each time, one side gets other values, and on the other side nothing may
move: not the output, and not the gradients that a vector-Jacobian product sends back. This is done
with the values at hand and with random ones. A trial in which some sample's output never moves says
nothing about that sample; it is repeated with random values, and if they say nothing either, the
answer is `UNDECIDED`, which no caller takes for a yes.
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
"""Makes values of the inputs, and others that take their place."""


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
    """Return whether a function takes each sample to its place in the outputs, and to no other.

    With `needs_proof`, every sample's output has to move with it, in one of the trials; else an
    output that never moves is taken for a constant, as it may be in a model. Whole numbers may
    be any `below` a limit. Outputs may be `padded` to the longest sample's size: what is beyond is
    the same for all. Of the splits, `few` pairs will do where each run is dear.
    """
    moved = [torch.zeros(places[0].batch, dtype=torch.bool, device="cpu") for _ in output_places]
    tried = exchanges = 0
    draws = _draws(inputs, places, below) if needs_proof else iter([_at_hand(inputs, places)])
    for draw in draws:
        try:
            new, others = draw()
            number = _try_values(run, new, others, places, output_places, moved, padded, few)
        except FAILURES:  # it does not take such values
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
    """Yield values to try, each with others to put in their place.

    The values at hand come with those of other samples, and with random ones: two samples that
    happen to be in order stay so if they have each other's values alone. Random values follow, of
    several sizes, in several rounds: few samples have few ways to be exchanged.
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
    """Return how many exchanges kept samples apart, None where one did not; note the samples whose
    outputs moved with them.
    """
    before, number = run(inputs), 0
    for i, place in enumerate(output_places):  # a sample that has no rows has nothing to move
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
    """Return whether a sample's outputs stay when all others are made its copies.

    This shows what a swap cannot: a branch that is taken only where samples differ.
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
    """Return whether samples in another order give the same outputs in that order, to some times of
    the usual `rounding`.

    `run_otherwise` draws other random numbers. Where they matter, samples need not follow: numbers
    are drawn for rows as they stand.
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
    """Return where two outputs are the same; None where rows of samples moved that must be still.

    Where they may be `padded`, sizes may differ, and the part that both have is compared.
    """
    if before.shape != after.shape:
        if not (padded and _is_padding(before, after, at, still)):
            return None
        part = tuple(slice(min(n, m)) for n, m in zip(before.shape, after.shape, strict=True))
        before, after = before[part], after[part]
    same = is_close(before, after)
    return None if bool((rows_of(before, at, still) & ~same).any()) else same


def _is_padding(a: Tensor, b: Tensor, at: Place, still: Tensor) -> bool:
    """Return whether two tensors differ by padding alone, in the rows of samples that are still.

    They differ in the size of one dimension, and what only one of them has is the same at every
    place along it, for every such sample.
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
