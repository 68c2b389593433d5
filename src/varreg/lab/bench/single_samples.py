"""Check moments against a loop over single samples, before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import varreg
from varreg.devices import in_double
from varreg.errors import MeasurementError, VarregError
from varreg.lab.bench.bench_plan import groups_of, observed_by
from varreg.lab.bench.workloads import Workload, built, call, part, samples
from varreg.lab.tasks.randomness import seeded
from varreg.thresholds import NOISE


def check_moments(w: Workload, arms: Sequence[str]) -> None:
    """Raise unless mean and variance of every parameter are those of a loop over single samples."""
    m = samples(built(w)[1])
    for arm in arms:
        if (groups_of(arm) or 0) > m:
            raise VarregError(
                f"varreg: {arm} needs a batch of at least {groups_of(arm)} samples; {w.name} has "
                f"{m}. Use --groups exact, "
                "or a larger batch."
            )
    model, x, y = built(w)
    # in training mode, as it will be timed: if varreg refuses the model, it does so here
    with varreg.observe(model.train()):
        w.loss(call(model, x), y).backward()
    doubt = _doubt(w)
    training = not _is_random(w, True)
    if not training and _is_random(w, False):
        raise VarregError(
            f"varreg: {w.name} is random also in eval mode, so that its moments cannot be checked; "
            "nothing is timed."
        )
    truth = by_single_samples(w, [groups_of(arm) or m for arm in arms], training)
    plain = _plain_gradients(w, training)
    for arm, expected in zip(arms, truth, strict=True):
        model, x, y = built(w)
        with varreg.observe(model.train(training), **observed_by(arm)):
            w.loss(call(model, x), y).backward()
            _compare(model, expected, plain, f"{w.name}, {arm}", doubt)
    if doubt:  # verify also compares p.grad and outputs
        raise MeasurementError(
            f"varreg: {w.name} is not measured, since its numbers would mean nothing.{doubt}"
        )


def _doubt(w: Workload) -> str:
    """Return the objection of `varreg.verify` to a model and its loss, or an empty text."""
    model, x, y = built(w)
    report = varreg.verify(model.train(), w.loss, (x, y))
    return f"\n{report}" if report.status in ("different", "refused") else ""


def _is_random(w: Workload, training: bool) -> bool:
    """Return whether the loss is random. Dropout draws other numbers for the batch than for its
    single samples, so such a model is checked in eval mode.
    """
    model, x, y = built(w)
    model.train(training)
    losses = []
    for seed in (1, 2):
        with seeded(seed), torch.no_grad():
            losses.append(float(w.loss(call(model, x), y)))
    return abs(losses[0] - losses[1]) > 1e-6 * abs(losses[0])


def by_single_samples(
    w: Workload, groups: Sequence[int], training: bool = True
) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Return, for each number K of groups, ḡ and v² of every parameter by their definitions, in
    float64. v² = (m−1)/m · 1/(K−1) · Σ_u n_u (ḡ_u − ḡ)², where ḡ_u is the mean of group u.
    """
    model, x, y = built(w)
    model.train(training)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    m = samples(x)
    total = {n: in_double(torch.zeros_like(p)) for n, p in params.items()}
    group = [{n: torch.zeros_like(t) for n, t in total.items()} for _ in groups]
    squares = [{n: torch.zeros_like(t) for n, t in total.items()} for _ in groups]
    ends = [
        {sum(m // k + (u < m % k) for u in range(v + 1)): m // k + (v < m % k) for v in range(k)}
        for k in groups
    ]
    for i in range(m):
        model.zero_grad()
        w.loss(call(model, part(x, slice(i, i + 1))), part(y, slice(i, i + 1))).backward()
        for n, p in params.items():
            if p.grad is not None:
                grad = in_double(p.grad)
                total[n] += grad
                for sums in group:
                    sums[n] += grad
        for sums, square, sizes in zip(group, squares, ends, strict=True):
            if (size := sizes.get(i + 1)) is not None:
                for n, t in sums.items():
                    square[n].addcmul_(t, t, value=1 / size)
                    t.zero_()
    return [
        {
            n: (t / m, (square[n] - t.square() / m).clamp_(min=0) * ((m - 1) / m / (k - 1)))
            for n, t in total.items()
        }
        for square, k in zip(squares, groups, strict=True)
    ]


def _plain_gradients(w: Workload, training: bool) -> dict[str, Tensor]:
    """Return the gradients of the batch without varreg."""
    model, x, y = built(w)
    w.loss(call(model.train(training), x), y).backward()
    return {n: in_double(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def _compare(
    model: nn.Module,
    expected: dict[str, tuple[Tensor, Tensor]],
    plain: dict[str, Tensor],
    case: str,
    doubt: str,
) -> None:
    """Raise a MeasurementError unless moments are as expected, up to a hundredth of each tensor's
    size, since float32 may round differently. A tensor that is only rounding errors is compared
    with the size of the model's gradients.

    If torch's own gradient of the batch (`plain`) differs by a share from that of single samples,
    moments may differ by `NOISE` such shares: in the batch, rounding may open a ReLU that is closed
    for the sample alone.
    """
    for i, (word, floor) in enumerate((("mean", 1e-5), ("variance", 1e-10))):
        largest = max(_size(pair[i]) for pair in expected.values())
        for name, p in model.named_parameters():
            if name not in expected:
                continue
            truth, moments = expected[name][i], varreg.moments(p)
            got = torch.zeros_like(truth)
            if isinstance(moments, varreg.Totals):  # of the same size: a mean over elements
                square = (moments.total_mean_square, moments.total_variance)[i] / truth.numel()
                got = (square if i else square.sqrt()).to(truth).expand_as(truth)
                truth = (truth.mean() if i else truth.square().mean().sqrt()).expand_as(truth)
            elif moments is not None:
                got = (moments.mean, moments.variance)[i].to(truth.device).to(truth.dtype)
            off, mean = _size(got - truth), expected[name][0]
            own = _size(plain.get(name, mean) - mean) / (_size(mean) or 1.0)  # torch's own gap
            if not off <= (0.01 + NOISE * own) * _size(truth) + floor * largest:
                share = f"{off / _size(truth):.1%}" if _size(truth) else "all of it"
                raise MeasurementError(
                    f"varreg: {case}: the {word} of the gradients of '{name}' is off by {share} "
                    "from a loop over single samples, so "
                    "that its speed means nothing, and is not measured. If the model treats each "
                    "sample by itself, this is an error "
                    f"in varreg: please report it.{doubt}"
                )


def _size(t: Tensor) -> float:
    """Return the root of the mean square."""
    return float(t.square().mean().sqrt())
