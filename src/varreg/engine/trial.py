"""Trials: does a function keep samples apart? Found out by running it with other values.

What is not known is tried. The samples are split in two in so many ways that every two of them are
once on different sides. Each time, one side gets other values, and on the other side nothing may
move: not the output, and not the gradients that a vector-Jacobian product sends back. This is done
with the values at hand and with random ones. A trial in which some sample's output never moves says
nothing about that sample; it is repeated with random values, and if they say nothing either, the
answer is `UNDECIDED`, which no caller takes for a yes.

`is_sum` tries something else: is an output without a batch a sum of what each sample gives?
L is such a sum if L(a, b) − L(a′, b) − L(a, b′) + L(a′, b′) = 0 for every split of the samples.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from varreg.engine.arguments import swap, tensors_in
from varreg.engine.layout import Layout, Place, Single, owners_of
from varreg.engine.propagation import Batched, Operation

Run = Callable[[list[Tensor]], list[Tensor]]
FAILURES = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError)


class _Numbers(threading.local):
    """Where random functions start, in a trial."""

    seed = 0


_numbers = _Numbers()


class Verdict(enum.Enum):
    APART = "samples are kept apart"
    MIXED = "samples meet, or change places"
    UNDECIDED = "the trial says nothing"


def splits(batch: int) -> Iterator[Tensor]:
    """Yield masks of samples: for any two there is one that holds the first and not the second."""
    code = torch.randperm(batch)
    for bit in range(max(batch - 1, 1).bit_length()):
        side = (code >> bit) % 2 == 1
        yield side
        yield ~side


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave generators as they were, and let no checkpoint around keep anything of a trial: it will
    not be repeated when the checkpoint runs again.
    """
    with torch.random.fork_rng([]), contextlib.ExitStack() as stack:
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        yield


def _itself(t: Tensor) -> Tensor:
    return t


# ---- other values --------------------------------------------------------------------------------


def rows_of(t: Tensor, at: Place, chosen: Tensor) -> Tensor:
    """Return a mask that broadcasts to `t`: the rows that belong to chosen samples."""
    if isinstance(at, Single):
        return chosen[at.sample].to(t.device)
    mask = chosen[owners_of(at).clamp(min=0)] & (owners_of(at) >= 0)
    return mask.view([-1 if d == at.dim else 1 for d in range(t.dim())]).to(t.device)


def _shuffled(t: Tensor, at: Place, order: Tensor) -> Tensor | None:
    """Return the values of other samples, in `order`; None where samples are not alike in size."""
    if not isinstance(at, Layout):
        return None
    place = torch.arange(at.size).view(at.outer, at.batch, at.inner)[:, order].flatten()
    return t.index_select(at.dim, place.to(t.device))


def _random(t: Tensor, positive: bool, below: int = 0) -> Tensor:
    """Return random values of the kind and size of `t`'s; whole numbers are some of its own, or
    below a limit.
    """
    if t.dtype is torch.bool:
        return torch.rand(t.shape, device=t.device) < 0.5
    if t.is_complex():
        return torch.randn_like(t)
    if not t.is_floating_point():  # any other number might be no valid index
        if below:
            return torch.randint(below, t.shape, device=t.device, dtype=t.dtype)
        return t.flatten()[torch.randint(t.numel(), t.shape, device=t.device)]
    if positive:
        return torch.rand_like(t) * 0.8 + 0.1
    size = float(t.detach().double().std()) if t.numel() > 1 else 0.0
    return torch.randn_like(t) * (size if 1e-3 < size < 1e3 else 1.0)


def _others(inputs: list[Tensor], places: Sequence[Place]) -> list[Tensor]:
    """Return values to put in place of a sample's own: another sample's, or random ones."""
    batch = places[0].batch
    ring = torch.randperm(batch)
    order = torch.empty_like(ring).index_copy_(0, ring, ring.roll(1))  # nobody keeps its own
    found = []
    for t, at in zip(inputs, places, strict=True):
        others = _shuffled(t, at, order)
        found.append(_random(t, positive=False) if others is None else others)
    return found


def _replaced(inputs: list[Tensor], others: list[Tensor], places: Sequence[Place], chosen: Tensor) -> list[Tensor]:
    return [torch.where(rows_of(t, at, chosen), o, t) for t, o, at in zip(inputs, others, places, strict=True)]


# ---- the trial -----------------------------------------------------------------------------------


def keeps_apart(
    run: Run,
    inputs: list[Tensor],
    at: Sequence[Place],
    there: Sequence[Place],
    needs_proof: bool = True,
    below: int = 0,
    padded: bool = False,
    few: int | None = None,
) -> Verdict:
    """Try a function from tensors that carry the batch to tensors that do.

    With `needs_proof`, every sample's output has to move with it, in one of the trials; else an
    output that never moves is taken for a constant, as it may be in a model. Whole numbers may
    be any `below` a limit. Outputs may be `padded` to the longest sample's size: what is beyond is
    the same for all. Of the splits, `few` pairs will do where each run is dear.
    """
    values: list[Callable[[Tensor], Tensor]] = [lambda t: t]
    if needs_proof:
        values += [
            lambda t: _random(t, positive=False) * 1e4 if t.is_floating_point() else t,
            lambda t: _random(t, positive=False),
            lambda t: _random(t, positive=True, below=below),
            lambda t: _random(t, positive=False, below=below),
        ]
    moved = [torch.zeros(at[0].batch, dtype=torch.bool) for _ in there]
    tried = 0
    for make in values:
        try:
            said = _try_values(run, [make(t) for t in inputs], at, there, moved, padded, few)
        except FAILURES:  # it does not take such values
            continue
        if not said:
            return Verdict.MIXED
        tried += 1
        if tried > 2 and all(bool(m.all()) for m in moved):
            break  # with the values at hand, with large ones, and with others
    if not tried or (needs_proof and not all(bool(m.all()) for m in moved)):
        return Verdict.UNDECIDED
    return Verdict.APART


def _try_values(
    run: Run,
    inputs: list[Tensor],
    at: Sequence[Place],
    there: Sequence[Place],
    moved: list[Tensor],
    padded: bool,
    few: int | None,
) -> bool:
    """Return whether samples were kept apart; note the samples whose outputs moved with them."""
    batch = at[0].batch
    before = run(inputs)
    for i, place in enumerate(there):  # a sample that has no rows has nothing to move
        moved[i] |= ~samples_in(torch.ones_like(before[i], dtype=torch.bool), place)
    others = _others(inputs, at)
    for chosen in itertools.islice(splits(batch), None if few is None else 2 * few):
        after = run(_replaced(inputs, others, at, chosen))
        for i, place in enumerate(there):
            first, second = before[i], after[i]
            if first.shape != second.shape:
                if not (padded and _is_padding(first, second, place, ~chosen)):
                    return False
                first, second = _common(first, second)
            same = is_close(first, second)
            if bool((rows_of(first, place, ~chosen) & ~same).any()):
                return False
            moved[i] |= samples_in(~same, place) & chosen
    return True


def all_alike(run: Run, inputs: list[Tensor], at: Sequence[Place], there: Sequence[Place], most: int = 4) -> bool:
    """Try whether a sample's outputs stay when all others are made its copies. It shows what a
    swap cannot: a branch that is taken only where samples differ.
    """
    if not all(isinstance(place, Layout) for place in at):
        return True
    before = run(inputs)
    for number in torch.randperm(at[0].batch)[:most].tolist():
        order = torch.full((at[0].batch,), number)
        copies = [_shuffled(t, place, order) for t, place in zip(inputs, at, strict=True)]
        after = run([t for t in copies if t is not None])
        chosen = torch.arange(at[0].batch) == number
        for i, place in enumerate(there):
            first, second = before[i], after[i]
            if first.shape != second.shape:
                if not _is_padding(first, second, place, chosen):
                    return False
                first, second = _common(first, second)
            same = is_close(first, second)
            if bool((rows_of(first, place, chosen) & ~same).any()):
                return False
    return True


def _common(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part of two tensors that both have."""
    part = tuple(slice(min(n, m)) for n, m in zip(a.shape, b.shape, strict=True))
    return a[part], b[part]


def _is_padding(a: Tensor, b: Tensor, at: Place, kept: Tensor) -> bool:
    """Do two tensors differ in the size of one dimension, and what only one of them has is the same
    at every place along it, for every sample that was kept?
    """
    if isinstance(at, Single) or a.dim() != b.dim():
        return False
    dims = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
    if len(dims) != 1 or at.dim in dims:
        return False
    (dim,), longer = dims, a if a.shape[dims[0]] > b.shape[dims[0]] else b
    ours = rows_of(longer, at, kept).flatten().nonzero().flatten()
    beyond = longer.narrow(dim, min(a.shape[dim], b.shape[dim]), abs(a.shape[dim] - b.shape[dim]))
    rest = beyond.index_select(at.dim, ours).movedim((at.dim, dim), (0, 1)).flatten(0, 1)
    return not len(rest) or bool(is_close(rest[:1].expand_as(rest), rest).all())


def is_close(a: Tensor, b: Tensor) -> Tensor:
    """Return where two tensors are the same, to rounding, relative to the size of the whole."""
    if not (a.is_floating_point() or a.is_complex()):
        return a == b
    eps = min(64 * torch.finfo(a.dtype).eps, 0.05)
    finite = a.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    scale = float(finite.max()) if a.numel() else 0.0
    return torch.isclose(a, b, rtol=eps, atol=eps * 1e-2 * scale, equal_nan=True)


def samples_in(mask: Tensor, at: Place) -> Tensor:
    """Return the samples that have a True in their rows of the mask."""
    if isinstance(at, Single):
        out = torch.zeros(at.batch, dtype=torch.bool)
        out[at.sample] = bool(mask.any())
        return out
    by_row = mask.movedim(at.dim, 0).reshape(mask.shape[at.dim], -1).any(1).cpu()
    owner = owners_of(at)[by_row]
    out = torch.zeros(at.batch, dtype=torch.bool)
    out[owner[owner >= 0]] = True
    return out


# ---- of an operation -----------------------------------------------------------------------------


def try_operation(op: Operation, batched: Batched, there: Place) -> Verdict:
    """Try whether an operation takes each sample to its place in the output, and to no other."""
    at = [place for _, place in batched]
    carriers = {id(x) for x, _ in batched}
    fixed = [t for t in tensors_in(op.args, op.kwargs) if id(t) not in carriers]
    below = min([n for t in fixed for n in t.shape], default=0)
    for dtype in (torch.float64, None):  # in double precision nothing hides behind rounding
        forward, inputs = _runner(op, batched, dtype)
        try:
            out = forward(inputs)[0]
        except FAILURES:
            continue
        both = _with_gradients(forward, inputs, out)
        if both is None:
            return keeps_apart(forward, inputs, at, [there], below=below)
        floats = [i for i, t in enumerate(inputs) if t.is_floating_point()]
        cotangent = torch.randn_like(out)
        places = [there, *(at[i] for i in floats)]
        said = keeps_apart(forward, inputs, at, [there], below=below)
        if said is Verdict.APART:
            for size in (1.0, 1e4):  # a backward may clip what is large
                grads = [*inputs, cotangent * size]
                said = keeps_apart(both, grads, [*at, there], places, needs_proof=False)
                if said is not Verdict.APART:
                    return said
        if said is Verdict.APART and dtype is not None and not _is_the_same(op, batched, at, there):
            return Verdict.MIXED
        if said is Verdict.APART and not _follows_order(forward, inputs, at, there, fixed):
            return Verdict.MIXED
        return said
    return Verdict.UNDECIDED


def _is_the_same(op: Operation, batched: Batched, at: Sequence[Place], there: Place) -> bool:
    """Try it once more in the precision at hand: a function may do something else there."""
    if all(x.dtype is torch.float64 or not x.is_floating_point() for x, _ in batched):
        return True
    forward, inputs = _runner(op, batched, None)
    try:
        return keeps_apart(forward, inputs, at, [there], needs_proof=False) is not Verdict.MIXED
    except FAILURES:
        return True


def _follows_order(forward: Run, inputs: list[Tensor], at: Sequence[Place], there: Place, fixed: list[Tensor]) -> bool:
    """Try whether samples in another order give the same results in that order. Random functions,
    and constants with a row for each sample, are for samples as they stand.
    """
    if not isinstance(there, Layout) or not all(isinstance(place, Layout) for place in at):
        return True
    if any(n in (there.size, there.batch) for t in fixed for n in t.shape):
        return True
    order = torch.randperm(there.batch)
    before = forward(inputs)[0]
    _numbers.seed = 1
    try:
        is_random = not bool(is_close(before, forward(inputs)[0]).all())
    finally:
        _numbers.seed = 0
    if is_random:
        return True
    moved = [_shuffled(t, place, order) for t, place in zip(inputs, at, strict=True)]
    after = forward([t for t in moved if t is not None])[0]
    expected = _shuffled(before, there, order)
    return expected is not None and bool(is_close(expected, after).all())


def _runner(op: Operation, batched: Batched, dtype: torch.dtype | None) -> tuple[Run, list[Tensor]]:
    """Return the operation as a function of the tensors that carry the batch, and those."""
    ids = [id(x) for x, _ in batched]

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if dtype is not None and t.is_floating_point() else t

    fixed = {id(t): cast(t.detach()) for t in tensors_in(op.args, op.kwargs) if id(t) not in ids}

    def run(inputs: list[Tensor]) -> list[Tensor]:
        copies = {**{k: t.clone() for k, t in fixed.items()}, **dict(zip(ids, inputs, strict=True))}
        if not any(t.requires_grad for t in inputs):
            copies |= {k: t.clone() for k, t in zip(ids, inputs, strict=True)}
        args, kwargs = swap(op.args, op.kwargs, copies)
        with same_random_numbers(inputs):
            out = op.function(*args, **kwargs)
        if out is None:  # `t[index] = value`
            return [args[0]]
        return [out if isinstance(out, Tensor) else list(out)[op.output]]

    return _without_gradients(run), [cast(x.detach()).clone() for x, _ in batched]


def _without_gradients(run: Run) -> Run:
    def still(inputs: list[Tensor]) -> list[Tensor]:
        if any(t.requires_grad for t in inputs):
            return run(inputs)
        with torch.no_grad():
            return [t.detach() for t in run(inputs)]

    return still


@contextlib.contextmanager
def same_random_numbers(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Let random functions draw the same numbers each time, and leave generators as they were."""
    with torch.random.fork_rng({t.device for t in inputs if t.device.type == "cuda"}):
        torch.manual_seed(_numbers.seed)
        yield


def _with_gradients(forward: Run, inputs: list[Tensor], out: Tensor) -> Run | None:
    """Return the vector-Jacobian product beside the function; None where it has none."""
    if not (out.is_floating_point() and any(t.is_floating_point() for t in inputs)):
        return None

    def run(given: list[Tensor]) -> list[Tensor]:
        *values, cotangent = given
        with torch.enable_grad():
            leaves = [t.detach().clone() for t in values]
            taken = [t.requires_grad_() for t in leaves if t.is_floating_point()]
            result = forward([t.mul(1) if t.requires_grad else t for t in leaves])[0]
            if not result.requires_grad:
                return [result.detach(), *(torch.zeros_like(t) for t in taken)]
            options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
            grads = torch.autograd.grad([result], taken, [cotangent], **options)
        return [result.detach(), *grads]

    return run


# ---- sums over samples ---------------------------------------------------------------------------


def is_sum(
    run: Run,
    inputs: list[Tensor],
    at: Sequence[Place],
    random: bool = True,
) -> bool:
    """Try whether outputs without a batch are sums of what each sample gives."""
    done = False
    values: list[Callable[[Tensor], Tensor]] = [lambda t: t]
    if random:
        values += [lambda t: _random(t, positive=False), lambda t: _random(t, positive=True)]
    for make in values:
        try:
            done |= _try_sum(run, [make(t) for t in inputs], at)
        except _NotASumError:  # noqa: PERF203 - each kind of values is a trial of its own
            return False
        except FAILURES:
            continue
    return done


class _NotASumError(Exception):
    pass


def _try_sum(run: Run, inputs: list[Tensor], at: Sequence[Place]) -> bool:
    """Return whether the outputs moved at all; raise where they are no sums."""
    others, moved = _others(inputs, at), False
    every = torch.ones(at[0].batch, dtype=torch.bool)
    first, last = run(inputs), run(_replaced(inputs, others, at, every))
    for chosen in splits(at[0].batch):
        a, b = (run(_replaced(inputs, others, at, side)) for side in (chosen, ~chosen))
        for i in range(len(first)):
            if not (first[i].shape == a[i].shape == b[i].shape == last[i].shape):
                raise _NotASumError
            ends = [t[i].double() for t in (first, last, a, b)]
            scale = max(float(t.abs().nan_to_num(0.0, 0.0, 0.0).max()) for t in ends)
            gap = (ends[0] + ends[1] - ends[2] - ends[3]).abs().nan_to_num(0.0, 0.0, 0.0)
            if float(gap.max()) > 256 * torch.finfo(first[i].dtype).eps * scale:
                raise _NotASumError
            moved |= not torch.equal(ends[0], ends[2])
    return moved


def try_sum(op: Operation, batched: Batched) -> bool:
    """Try whether an operation's output is a sum over samples. Indices and labels stay as they are:
    a sum may be weighted by what they say (`is_weighted`).
    """
    return _try_sum_of(op, [(x, at) for x, at in batched if x.is_floating_point()])


def is_weighted(op: Operation, batched: Batched) -> bool:
    """Try whether labels of one sample change the weight of another, as where a mean is over
    those that are not ignored. Samples are exchanged together with their labels.
    """
    if all(x.is_floating_point() for x, _ in batched):
        return False
    return not _try_sum_of(op, list(batched), random=False)


def _try_sum_of(op: Operation, carriers: list[tuple[Tensor, Place]], random: bool = True) -> bool:
    for dtype in (torch.float64, None):
        run, inputs = _runner(op, carriers, dtype)
        try:
            if not run(inputs)[0].is_floating_point():
                return False
        except FAILURES:
            continue
        return is_sum(run, inputs, [at for _, at in carriers], random)
    return False


def try_affine(op: Operation, summed: Sequence[Tensor]) -> bool:
    """Try whether an operation is affine in tensors that are sums over samples."""
    for dtype in (torch.float64, None):
        run, inputs = _runner(op, [(t, Single(1, 0)) for t in summed], dtype)
        try:
            return all(_is_affine(run, inputs, size) for size in (0.01, 0.3, 1.0, 10.0, 1e3) for _ in "ab")
        except FAILURES:
            continue
    return False


def _is_affine(run: Run, inputs: list[Tensor], size: float) -> bool:
    a, b = ([torch.randn_like(t) * size for t in inputs] for _ in range(2))
    zero = [torch.zeros_like(t) for t in inputs]
    both = [s + t for s, t in zip(a, b, strict=True)]
    ends = [run(x)[0].double() for x in (zero, both, a, b)]
    if not all(bool(t.isfinite().all()) for t in ends):
        return False
    scale = max([float(t.abs().max()) for t in ends if t.numel()], default=0.0)
    gap = (ends[0] + ends[1] - ends[2] - ends[3]).abs()
    return not gap.numel() or float(gap.max()) <= 1e-6 * scale
