"""`varreg bench`: what variance regularization costs on this machine: whole training steps, over those of torch's own optimizers."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import varreg
from varreg import memory as scratch
from varreg.lab import names, optimizers, timing
from varreg.lab.environment import environment, machine
from varreg.lab.tasks import seeded
from varreg.lab.timing import Parts, Peak, Ratio
from varreg.lab.workloads import WORKLOADS, YARDSTICK, Own, Workload, built, call, part, samples
from varreg.tables import table

PLAIN, EXACT = "plain", "exact"
DEFAULTS = ("VRSGD:momentum=0.9", "VRAdam")
PHASES = ("forward", "backward", "step")
LR = 1e-6
"""So small that the model stays where it is: every round has the same work, with numbers of an ordinary size."""
Told = Callable[[str, float], None]
"""Hears what is under way, and what share of it is done."""


class Plan(NamedTuple):
    """All that is to be measured; made by `plan`."""

    cases: tuple[str | Own, ...]
    """Workloads by name, or the user's own."""
    specs: tuple[str, ...]
    """Regularized optimizers, with options."""
    arms: tuple[str, ...]
    """`exact`, `groups=8`."""
    seconds: float
    threads: int
    memory: bool
    profile: bool

    def parts(self) -> int:
        """That are told of."""
        return len(self.cases) * (1 + len(self.specs) * (1 + self.memory + self.profile))


def plan(
    only: str | None,
    own: Own | None,
    specs: Sequence[str],
    groups: str,
    seconds: float,
    threads: int,
    memory: bool,
    profile: bool,
) -> Plan:
    """From what the command line says; anything that cannot be is an error here, before anything runs."""
    if own is not None and only is not None:
        raise ValueError("varreg: --only chooses among varreg's own workloads; with --model there is one. Leave one of them out.")
    cases: tuple[str | Own, ...] = YARDSTICK if own is None else (own,)
    if only is not None:
        cases = tuple(name for name in WORKLOADS if only.lower() in name.lower())
        if not cases:
            raise ValueError(f"varreg: no workload has {only!r} in its name; there are: {'; '.join(WORKLOADS)}.")
    specs = tuple(spec for text in specs or DEFAULTS for spec in text.split())
    for spec in specs:
        base_of(spec)
    if not seconds > 0:
        raise ValueError(f"varreg: --seconds must be more than 0; got {seconds:g}.")
    return Plan(cases, specs, arms_of(groups), seconds, threads or torch.get_num_threads(), memory, profile)


def arms_of(groups: str) -> tuple[str, ...]:
    """What is measured of the samples.

    >>> arms_of("exact,8")
    ('exact', 'groups=8')
    """
    arms = []
    for word in (word.strip() for word in groups.split(",")):
        if word != EXACT and not (word.isdecimal() and int(word) > 1):
            raise ValueError(
                f"varreg: --groups must be exact or numbers of groups (2 or more), with commas, as in exact,8; got {groups!r}."
            )
        arms.append(EXACT if word == EXACT else f"groups={int(word)}")
    return tuple(dict.fromkeys(arms))


def groups_of(arm: str) -> int | None:
    return None if arm == EXACT else int(arm.removeprefix("groups="))


def base_of(spec: str) -> tuple[str, dict[str, Any]]:
    """The optimizer that a regularized one is compared with: its counterpart, with those of its options that that one has.

    >>> base_of("VRSGD:momentum=0.9,history=geometric")
    ('SGD', {'momentum': 0.9})
    """
    name, options = names.parse(spec)
    known = [n for n, entry in optimizers.OPTIMIZERS.items() if entry.regularized]
    if name not in known:
        raise names.unknown("regularized optimizer", name, known)
    optimizers.check(name, options)
    base = name.removeprefix("VR")
    shared = inspect.signature(optimizers.entry(base).cls).parameters
    return base, {k: v for k, v in options.items() if k in shared}


def workload(case: str | Own) -> Workload:
    return case.workload() if isinstance(case, Own) else WORKLOADS[case]


# ---- a training step -----------------------------------------------------------------------------------------------------


class Training:
    """A model with its optimizer: a whole training step, and its three phases."""

    def __init__(self, w: Workload, spec: str, arm: str):
        model, self.x, self.y = built(w)
        self.model, self.loss_of, self.loss = model.train(), w.loss, torch.zeros(())
        if arm != PLAIN:
            varreg.observe(model, groups_of(arm))
        name, options = base_of(spec) if arm == PLAIN else names.parse(spec)
        self.optimizer = optimizers.build(name, model.parameters(), LR, options)
        self.on_cpu = all(p.is_cpu for p in model.parameters())

    def forward(self) -> None:
        self.optimizer.zero_grad()
        self.loss = self.loss_of(call(self.model, self.x), self.y)
        self._wait()

    def backward(self) -> None:
        self.loss.backward()
        self._wait()

    def step(self) -> None:
        self.optimizer.step()
        self._wait()

    def timed(self) -> Callable[[], Parts]:
        return timing.timed(self.forward, self.backward, self.step)

    def _wait(self) -> None:
        """For what a device has been given to do."""
        if not self.on_cpu:
            torch.accelerator.synchronize()


# ---- are the numbers right? ----------------------------------------------------------------------------------------------


def check_moments(w: Workload, arms: Sequence[str]) -> None:
    """Mean and variance of every parameter against a loop over single samples: a speed of wrong numbers is of no use to anyone."""
    m = samples(built(w)[1])
    for arm in arms:
        if (groups_of(arm) or 0) > m:
            raise ValueError(
                f"varreg: {arm} needs a batch of at least {groups_of(arm)} samples; {w.name} has {m}. Use --groups exact, "
                "or a larger batch."
            )
    model, x, y = built(w)
    with varreg.observe(model.train()):  # in training, as it will be timed: what is refused is refused here
        w.loss(call(model, x), y).backward()
    doubt = _doubt(w)
    training = not _is_random(w, True)
    if not training and _is_random(w, False):
        raise ValueError(
            f"varreg: {w.name} is random also in eval mode, so that its moments cannot be checked; nothing is timed."
        )
    truth = by_single_samples(w, [groups_of(arm) or m for arm in arms], training)
    for arm, expected in zip(arms, truth, strict=True):
        model, x, y = built(w)
        with varreg.observe(model.train(training), groups_of(arm)):
            w.loss(call(model, x), y).backward()
            _compare(model, expected, f"{w.name}, {arm}", doubt)
    if doubt:  # of what a mean and a variance do not show: p.grad, outputs
        raise RuntimeError(f"varreg: {w.name} is not measured, since its numbers would mean nothing.{doubt}")


def _doubt(w: Workload) -> str:
    """Return what `varreg.verify` says against a model and its loss; nothing where it does not."""
    model, x, y = built(w)
    found = varreg.verify(model.train(), w.loss, (x, y))
    return f"\n{found}" if found.status in ("different", "refused") else ""


def _is_random(w: Workload, training: bool) -> bool:
    """Dropout draws other numbers for the batch than for its single samples: such a model is checked in eval mode."""
    model, x, y = built(w)
    model.train(training)
    losses = []
    for seed in (1, 2):
        with seeded(seed), torch.no_grad():
            losses.append(float(w.loss(call(model, x), y)))
    return abs(losses[0] - losses[1]) > 1e-6 * abs(losses[0])


def by_single_samples(w: Workload, groups: Sequence[int], training: bool = True) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """For each number K of groups: mean ḡ, and v² = (m−1)/m · 1/(K−1) · Σ_u n_u (ḡ_u − ḡ)², of every parameter. By definition, in float64."""
    model, x, y = built(w)
    model.train(training)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    m = samples(x)
    total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in params.items()}
    group = [{n: torch.zeros_like(t) for n, t in total.items()} for _ in groups]
    squares = [{n: torch.zeros_like(t) for n, t in total.items()} for _ in groups]
    ends = [{sum(m // k + (u < m % k) for u in range(v + 1)): m // k + (v < m % k) for v in range(k)} for k in groups]
    for i in range(m):
        model.zero_grad()
        w.loss(call(model, part(x, slice(i, i + 1))), part(y, slice(i, i + 1))).backward()
        for n, p in params.items():
            if p.grad is not None:
                total[n] += p.grad
                for sums in group:
                    sums[n] += p.grad
        for sums, square, sizes in zip(group, squares, ends, strict=True):
            if (size := sizes.get(i + 1)) is not None:
                for n, t in sums.items():
                    square[n].addcmul_(t, t, value=1 / size)
                    t.zero_()
    return [
        {n: (t / m, (square[n] - t.square() / m).clamp_(min=0) * ((m - 1) / m / (k - 1))) for n, t in total.items()}
        for square, k in zip(squares, groups, strict=True)
    ]


def _compare(model: nn.Module, expected: dict[str, tuple[Tensor, Tensor]], what: str, doubt: str) -> None:
    """To a hundredth of each tensor's size, since float32 may round differently; what is all rounding is judged by the whole model's size."""
    for i, (word, floor) in enumerate((("mean", 1e-5), ("variance", 1e-10))):
        largest = max(_size(pair[i]) for pair in expected.values())
        for name, p in model.named_parameters():
            if name not in expected:
                continue
            truth, found = expected[name][i], varreg.moments(p)
            got = torch.zeros_like(truth) if found is None else (found.mean, found.variance)[i].to(truth.dtype)
            off = _size(got - truth)
            if not off <= 0.01 * _size(truth) + floor * largest:
                share = f"{off / _size(truth):.1%}" if _size(truth) else "all of it"
                raise RuntimeError(
                    f"varreg: {what}: the {word} of the gradients of '{name}' is off by {share} from a loop over single samples, so "
                    "that its speed means nothing, and is not measured. If the model treats each sample by itself, this is an error "
                    f"in varreg: please report it.{doubt}"
                )


def _size(t: Tensor) -> float:
    return float(t.square().mean().sqrt())


# ---- what it costs -------------------------------------------------------------------------------------------------------


def run(made: Plan, told: Told = lambda name, share: None) -> Iterator[dict[str, Any]]:
    """One row for each workload and optimizer, as they come."""
    with _threads(made.threads):
        for case in made.cases:
            w = workload(case)
            name = f"{w.name}: moments against a loop over samples"
            told(name, 0.0)
            check_moments(w, made.arms)
            told(name, 1.0)
            for spec in made.specs:
                yield measure(made, case, w, spec, told)


def measure(made: Plan, case: str | Own, w: Workload, spec: str, told: Told) -> dict[str, Any]:
    arms = (PLAIN, *made.arms)
    name = f"{w.name}: {spec}"
    told(name, 0.0)
    steps = {arm: Training(w, spec, arm).timed() for arm in arms}
    times = timing.rounds(steps, made.seconds, tick=lambda share: told(name, share))
    base, options = base_of(spec)
    row: dict[str, Any] = {
        "workload": w.name,
        "optimizer": spec,
        "base": names.spell(base, options),
        "rounds": len(times[PLAIN]),
        "ratio": {arm: timing.ratio(timing.whole(times[arm]), timing.whole(times[PLAIN])) for arm in made.arms},
        "milliseconds": {arm: 1e3 * timing.quantile(timing.whole(times[arm]), 0.5) for arm in arms},
        "phases": {arm: _medians(times[arm]) for arm in arms},
    }
    if made.profile:
        told(f"{name}, operations", 0.0)
        row["operations"] = {arm: operations(steps[arm]) for arm in arms}
        told(f"{name}, operations", 1.0)
    del steps
    if made.memory:
        name += ", memory"
        told(name, 0.0)
        row["bytes"] = {}
        for i, arm in enumerate(arms):
            row["bytes"][arm] = memory(case, spec, arm, made.threads)
            told(name, (i + 1) / len(arms))
    return row


def _medians(times: list[Parts]) -> dict[str, float]:
    return {phase: 1e3 * timing.quantile([parts[i] for parts in times], 0.5) for i, phase in enumerate(PHASES)}


@contextlib.contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def memory(case: str | Own, spec: str, arm: str, threads: int) -> Peak | None:
    """What training needs at its peak, in a fresh process. None where nobody tells (Linux does)."""
    return timing.in_a_fresh_process(_peak, case, spec, arm, threads) if timing.PEAK_IS_KNOWN else None


def _peak(case: str | Own, spec: str, arm: str, threads: int) -> Peak:
    torch.set_num_threads(threads)
    w = workload(case)
    few = w._replace(batch=lambda: part(w.batch(), slice(0, max(2, groups_of(arm) or 0) if arm != PLAIN else 2)))

    def rehearse() -> None:
        Training(few, spec, arm).timed()()
        scratch.forget()

    return timing.peak(rehearse, lambda: Training(w, spec, arm).timed())


def operations(step: Callable[[], object], steps: int = 5) -> dict[str, float]:
    """Milliseconds of a step in each of torch's operations, what they call left out."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes lines of its own to the terminal
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            step()
    return {e.key: e.self_cpu_time_total / 1e3 / steps for e in profile.key_averages()}


# ---- what is shown -------------------------------------------------------------------------------------------------------


def record(made: Plan, rows: list[dict[str, Any]], command: list[str]) -> dict[str, Any]:
    """All of it, for a file."""
    with _threads(made.threads):
        head = f"{datetime.date.today()}, {machine()}"
    about = {**environment(), "threads": made.threads}
    return {"command": command, "measured": head, "seconds": made.seconds, "environment": about, "rows": rows}


def results(rows: list[dict[str, Any]]) -> str:
    """A whole training step over that of torch's optimizer, and its peak memory over that one's."""
    return table(*_cells(rows), words=(0, 1), total=False)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The same, for a page."""
    head, lines = _cells(rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def _cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    arms = list(rows[0]["ratio"])
    measured = arms if any(row.get("bytes") for row in rows) else []
    head = ["workload", "a step with", "plain, ms", *arms, *(f"memory, {arm}" for arm in measured)]
    lines, last = [], ""
    for row in rows:
        ratios = [str(Ratio(*row["ratio"][arm])) for arm in arms]
        used = [_used(row.get("bytes", {}), arm) for arm in measured]
        name = row["workload"] if row["workload"] != last else ""
        lines.append([name, row["optimizer"], f"{row['milliseconds'][PLAIN]:.1f}", *ratios, *used])
        last = row["workload"]
    return head, lines


def _used(found: dict[str, Peak | None], arm: str) -> str:
    """Over the plain step's, and by how much.

    >>> _used({"plain": Peak(30 << 20, 110 << 20), "exact": Peak(36 << 20, 116 << 20)}, "exact")
    '1.20, +6 MiB'
    """
    plain, ours = found.get(PLAIN), found.get(arm)
    if plain is None or ours is None:
        return "-"
    return f"{ours[0] / plain[0]:.2f}, {(ours[0] - plain[0]) / 2**20:+.0f} MiB".replace("-", "−")


def about(made: Plan) -> str:
    """What the numbers of the table are."""
    memory = "Memory: what training needs at its peak, over the plain one, in fresh processes; without torch's own code.\n"
    return (
        "Whole training steps (zero_grad, forward, backward, step) over the same with torch's optimizer:\n"
        f"median of the ratios of steps in the same round (10 %–90 %).\n{memory * made.memory}"
        "Before, all moments were compared with those of a loop over single samples."
    )


def sentences(rows: list[dict[str, Any]]) -> str:
    """What the table says, in words, a line for each workload."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        costs = [f"{_moments(arm)} cost {_cost(Ratio(*r))}" for arm, r in row["ratio"].items()]
        lines.setdefault(row["workload"], []).append(f"with {row['optimizer']}, {', '.join(costs)}")
    return "\n".join(f"{name}: {'; '.join(said)}." for name, said in lines.items())


def _moments(arm: str) -> str:
    return "exact moments and λ" if arm == EXACT else f"those of {groups_of(arm)} groups"


def _cost(r: Ratio) -> str:
    """How much longer a step takes.

    >>> _cost(Ratio(1.128, 1.1, 1.2)), _cost(Ratio(0.99, 0.9, 1.02))
    ('13 % of a step', 'nothing that could be measured')
    """
    return f"{100 * (r.middle - 1):.0f} % of a step" if r.middle >= 1.005 else "nothing that could be measured"


def profiles(row: dict[str, Any], most: int = 12) -> str:
    """Where the time goes: the phases of a step, and the operations that an observed one has more of."""
    arms = list(row["milliseconds"])
    phases = [[phase, *(f"{row['phases'][arm][phase]:.2f}" for arm in arms)] for phase in PHASES]
    whole = ["whole step", *(f"{row['milliseconds'][arm]:.2f}" for arm in arms)]
    found = row["operations"]
    every = {op for arm in arms for op in found[arm]}
    grown = sorted(every, key=lambda op: (-max(found[arm].get(op, 0.0) - found[PLAIN].get(op, 0.0) for arm in arms[1:]), op))
    shown = [[op, *(f"{found[arm].get(op, 0.0):.2f}" for arm in arms)] for op in grown[:most]]
    others = ["other operations", *(f"{sum(found[arm].get(op, 0.0) for op in grown[most:]):.2f}" for arm in arms)]
    rest = [max(0.0, row["milliseconds"][arm] - sum(found[arm].values())) for arm in arms]
    outside = ["outside of them: Python, varreg's C", *(f"{ms:.2f}" for ms in rest)]
    title = f"{row['workload']}, {row['optimizer']}: milliseconds"
    return f"{title}\n\n{table(['', *arms], [*phases, whole])}\n\n{table(['operation', *arms], [*shown, others, outside], total=False)}"
