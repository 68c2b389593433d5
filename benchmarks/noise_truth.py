"""Check the noise scale while a model trains: compare `NoiseScale` and other estimates with the
truth from 5,000 samples.

    .venv/bin/python -m benchmarks.noise_truth                  # half an hour on two cores
    .venv/bin/python -m benchmarks.noise_truth --report         # the table, from what is saved
    .venv/bin/python -m benchmarks.noise_truth --merge runs/truth/results.json  # run with --out

Every 200 steps training stops, and B_n = tr Σ/|G|² is taken from the moments of 5,000 training
samples: the truth at this step. |G|² changes from step to step, so that there is also the truth
along the 200 steps: averages of both over ten of them, from 500 samples each. Where |G|² changes
much from step to step, ten steps are few: this truth has an interval of its own. Beside them are
four estimates from the batches of the same 200 steps, each the ratio of the averages of its tr Σ
and its |G|²:

- `NoiseScale`: the moments of single samples within a batch;
- two halves, eight groups: gradients of parts of a batch against that of the batch;
- consecutive batches: the gradients of two batches that follow one another, with a step between
  them, against their mean. It is what one device can do without moments.

From a mean gradient g of b samples and the mean of k such, |G|² and tr Σ are those of McCandlish et
al. (2018), appendix A. A run that is saved is not run again: to repeat one, also with other steps,
run it with another `--out`, and merge its file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varreg
from benchmarks.keep import compact, shrink
from varreg.lab.environment import machine
from varreg.lab.report.format import number
from varreg.lab.tasks import lookup
from varreg.lab.tasks.randomness import seed_all
from varreg.noise.interval import ratio_intervals

EVERY = 200
SAMPLES = 5_000
POINTS = 10
"""In each 200 steps, for the truth along them."""
PARTS = 8
CHUNK = 250
ESTIMATORS = ("NoiseScale", "two halves", "eight groups", "consecutive batches")
OUT = Path("docs/results/noise-truth")


@dataclass(frozen=True)
class Case:
    """A model, a batch that eight divides, and a learning rate for each optimizer."""

    task: str
    batch: int
    rates: dict[str, float]
    steps: int = 1000


CASES = {
    "paper's CNN, Fashion-MNIST": Case(
        "fashion-mnist", 64, {"SGD": 0.3, "momentum": 0.05, "Adam": 1e-3}
    ),
    "char-GPT": Case("char-gpt", 32, {"SGD": 0.5, "momentum": 0.1, "Adam": 2e-3}),
    "ResNet-18, GroupNorm, CIFAR-10": Case(
        "cifar10-resnet:width=8", 32, {"SGD": 0.1, "momentum": 0.02, "Adam": 1e-3}, 600
    ),
}


def optimizer_of(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of a run."""
    if name == "Adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    momentum = 0.9 if name == "momentum" else 0.0
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def pair(parts: Tensor, b: int) -> tuple[float, float]:
    """Return tr Σ and |G|² from k mean gradients `[k, n]` of b samples each, and their mean.

    Both are unbiased if all are of the same parameters.
    """
    k = len(parts)
    small = float(parts.square().sum()) / k
    large = float(parts.mean(0).square().sum())
    return (small - large) / (1 / b - 1 / (k * b)), (k * large - small) / (k - 1)


def gradients(model: nn.Module) -> Tensor:
    """Return all gradients as one vector, in double precision."""
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def parts_of_batch(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Leave the gradient of a batch and its moments; return the mean gradients of its eight parts
    and its loss.
    """
    rows, before, total = [], torch.zeros(()), 0.0
    for a, b in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
        part = loss(model(a), b) / PARTS
        part.backward()
        total += part.item()
        now = gradients(model)
        rows.append((now - before) * PARTS)
        before = now
    return torch.stack(rows), total


def truth(model: nn.Module, observer: Any, loss: Any, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return tr Σ and |Ĝ|² of many samples at the parameters as they are."""
    noise = varreg.NoiseScale(observer, window=2)
    model.zero_grad()
    for a, b in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
        (loss(model(a), b) * (len(b) / len(y))).backward()
    noise.update()
    model.zero_grad()
    return {"trace": noise.model.noise, "signal": noise.model.signal}


def run(case: Case, name: str, steps: int, say: Any) -> list[dict[str, Any]]:
    """Train, and return one row for each check."""
    task = lookup.task(case.task)
    train = lookup.load(case.task, None).train
    seed_all(0)
    model = task.model()
    observer = varreg.observe(model)
    optimizer = optimizer_of(name, model, case.rates[name])
    noise = varreg.NoiseScale(observer, window=EVERY)
    order = torch.Generator().manual_seed(1)
    fixed = torch.randperm(len(train), generator=torch.Generator().manual_seed(2))[:SAMPLES]
    sums = {key: [0.0, 0.0] for key in ESTIMATORS[1:]}
    along: list[list[float]] = []
    rows, last, losses = [], None, []
    for step in range(1, steps + 1):
        index = torch.randint(len(train), (case.batch,), generator=order)
        optimizer.zero_grad()
        parts, value = parts_of_batch(model, task.loss, train.x[index], train.y[index])
        noise.update()
        losses.append(value)
        whole, m = parts.mean(0), case.batch
        found = {
            "two halves": pair(parts.view(2, PARTS // 2, -1).mean(1), m // 2),
            "eight groups": pair(parts, m // PARTS),
        }
        if step % (EVERY // POINTS) == 0:
            # The moments of the batch are read already; its gradients come back for the step.
            kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            some = fixed[torch.randperm(SAMPLES, generator=order)[: SAMPLES // POINTS]]
            exact = truth(model, observer, task.loss, train.x[some], train.y[some])
            along.append([exact["trace"], exact["signal"]])
            for p, grad in zip(model.parameters(), kept, strict=True):
                p.grad = grad
        if last is not None:
            found["consecutive batches"] = pair(torch.stack([last, whole]), m)
        last = whole
        for key, both in found.items():
            sums[key] = [a + b for a, b in zip(sums[key], both, strict=True)]
        optimizer.step()
        if step % EVERY == 0:
            exact = truth(model, observer, task.loss, train.x[fixed], train.y[fixed])
            reading = noise.model
            rows.append(
                {
                    "step": step,
                    "loss": statistics.fmean(losses),
                    "truth": [exact["trace"], exact["signal"]],
                    "along": [statistics.fmean(column) for column in zip(*along, strict=True)],
                    "interval along": list(ratio_intervals(torch.tensor([along]))[0]),
                    "NoiseScale": [reading.noise, reading.signal],
                    "interval": list(reading.interval),
                    **{key: [v / EVERY for v in both] for key, both in sums.items()},
                }
            )
            sums, losses, along = {key: [0.0, 0.0] for key in sums}, [], []
            say(f"{case.task} {name} {step}: {rows[-1]}")
    return rows


def scale(both: list[float]) -> float:
    """Return tr Σ/|G|²; infinite where no signal is seen."""
    return both[0] / both[1] if both[1] > 0 else math.inf


def true_scale(row: dict[str, Any]) -> float:
    """Return the truth along the steps of a check; at its step in results that do not have it."""
    return scale(row["along"] if "along" in row else row["truth"])


def ratios(rows: list[dict[str, Any]], key: str) -> list[float]:
    """Return an estimate over the truth, check by check."""
    return [scale(row[key]) / true_scale(row) for row in rows]


def holds(row: dict[str, Any], with_truth: bool = False) -> bool:
    """Return whether the interval of a check holds the truth; with `with_truth`, whether the two
    differ by no more than both of their errors together.

    >>> row = {"NoiseScale": [2.0, 1.0], "interval": [1.6, 2.4], "along": [3.0, 1.0]}
    >>> row["interval along"] = [2.0, 5.0]
    >>> holds(row), holds(row, with_truth=True), holds({**row, "interval along": [2.9, 3.1]}, True)
    (False, True, False)
    """
    (low, high), true, value = row["interval"], true_scale(row), scale(row["NoiseScale"])
    if not with_truth or low <= true <= high:
        return bool(low <= true <= high)
    true_low, true_high = row["interval along"]
    if not (min(low, true_low) > 0 and max(value, true) < math.inf):  # too little is known
        return bool(low <= true_high and true_low <= high)
    errors = (high / value, true / true_low) if value < true else (value / low, true_high / true)
    return abs(math.log(value / true)) <= math.hypot(*map(math.log, errors))


def held(rows: list[dict[str, Any]]) -> str:
    """Return in how many checks the interval holds the truth, and in how many it does with the
    truth's own error, where that is known.
    """
    text = f"{sum(map(holds, rows))} of {len(rows)}"
    known = [row for row in rows if "interval along" in row]
    if not known:
        return text
    among = "" if len(known) == len(rows) else f" of {len(known)}"
    return f"{text}; {sum(holds(row, True) for row in known)}{among} with the truth's error"


def cell(values: list[float]) -> str:
    """Return the median of ratios and their range; "no signal" where all are infinite.

    >>> cell([0.9, 1.0, 1.2]), cell([1.0, math.inf]), cell([math.inf] * 3)
    ('1.00 (0.90–1.20)', '∞ (1.00–∞)', 'no signal')
    """
    if all(map(math.isinf, values)):
        return "no signal"
    shown = (statistics.median(values), min(values), max(values))
    return "{} ({}–{})".format(*("∞" if math.isinf(v) else f"{v:.2f}" for v in shown))


def table(saved: dict[str, Any]) -> str:
    """Return the table in Markdown: ratios to the truth."""
    head = ("truth", "B_n, first to last check", *ESTIMATORS, "interval holds it")
    lines = ["| | " + " | ".join(head) + " |", "| --- |" + " --- |" * len(head)]
    every: dict[str, list[float]] = {key: [] for key in ESTIMATORS}
    for name, rows in saved["runs"].items():
        which = "along the steps" if "along" in rows[0] else "at the step"
        first, last = (number(true_scale(rows[i])) for i in (0, -1))
        cells = [cell(ratios(rows, key)) for key in ESTIMATORS] + [held(rows)]
        lines.append(f"| {name} | {which} | {first} → {last} | " + " | ".join(cells) + " |")
        for key in ESTIMATORS:
            every[key] += ratios(rows, key)
    within = [f"{sum(1 / 1.5 <= v <= 1.5 for v in every[k])} of {len(every[k])}" for k in every]
    total = held([row for rows in saved["runs"].values() for row in rows])
    lines.append(f"| all checks: within a factor 1.5 | | | {' | '.join(within)} | {total} |")
    return "\n".join(lines)


def figure(saved: dict[str, Any], path: Path) -> None:
    """Draw the truth and all estimates over steps, one panel for each run."""
    import matplotlib as mpl

    from varreg.lab.report.style import COLORS, STYLE, save

    with mpl.rc_context(STYLE):
        from matplotlib.figure import Figure

        runs = saved["runs"]
        columns = 3
        lines = -(-len(runs) // columns)
        made = Figure(figsize=(9.6, 2.5 * lines), layout="constrained")
        panels = made.subplots(lines, columns, squeeze=False).flatten()
        for axes, (name, rows) in zip(panels, runs.items(), strict=False):
            steps = [row["step"] for row in rows]
            for key, style in (("along", "k-"), ("truth", "k.--")):
                label = {"along": "truth along the steps", "truth": "truth at the step"}[key]
                if key in rows[0]:
                    axes.plot(steps, [scale(row[key]) for row in rows], style, lw=2, label=label)
            for key, color, mark in zip(ESTIMATORS, COLORS, "os^x", strict=False):
                shown = [(s, v) for s, row in zip(steps, rows, strict=True)
                         if math.isfinite(v := scale(row[key]))]  # fmt: skip
                axes.plot(*zip(*shown, strict=True) if shown else ([], []), mark, ms=4, ls=":",
                          color=color, label=key)  # fmt: skip
            axes.set(yscale="log", title=name.replace(", ", ",\n", 1), xlabel="steps")
            axes.title.set_fontsize(8)
        for axes in panels[len(runs) :]:
            axes.axis("off")
        shown_as: dict[str, Any] = {}
        for axes in panels:  # older runs have no truth along the steps
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                shown_as.setdefault(label, handle)
        made.legend(
            list(shown_as.values()), list(shown_as), loc="outside lower center", ncols=columns
        )
        save(made, path)
    path.write_text(shrink(path.read_text()))


def report(out: Path) -> None:
    """Print the table, and draw the figure, of what is saved."""
    saved = json.loads((out / "results.json").read_text())
    figure(saved, out / "ratios.svg")
    for title, where in saved["machines"].items():
        print(f"{title}: measured {where}.")
    print(f"\n{table(saved)}")


def merged(saved: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return saved results with the runs of other results. A run of the same title is replaced.
    Raise a ValueError if the settings of a run are not those of this file's `CASES`.

    >>> old = {"runs": {"char-GPT, SGD": [1], "char-GPT, Adam": [2]}, "machines": {}}
    >>> new = {"runs": {"char-GPT, SGD": [3]}, "machines": {"char-GPT, SGD": "today"}}
    >>> merged(old, {**new, **settings()})["runs"]
    {'char-GPT, SGD': [3], 'char-GPT, Adam': [2]}
    """
    for about in {title.rpartition(", ")[0] for title in more["runs"]}:
        for key in ("batch", "rates"):
            if more[key].get(about) != settings()[key].get(about):
                raise ValueError(f"{about} was run with another {key}: {more[key].get(about)}")
    if more["samples"] != SAMPLES:
        raise ValueError(f"the truth is of {more['samples']} samples, and not of {SAMPLES}")
    runs = saved["runs"] | more["runs"]
    return {
        "runs": dict(sorted(runs.items(), key=lambda item: _place(item[0]))),
        "machines": saved.get("machines", {}) | more["machines"],
        **settings(),
    }


def settings() -> dict[str, Any]:
    """Return what the results say of how they were measured."""
    batch, rates = ({k: getattr(c, what) for k, c in CASES.items()} for what in ("batch", "rates"))
    return {"batch": batch, "rates": rates, "samples": SAMPLES}


def main() -> None:
    """Run what is not saved yet, or merge what was saved elsewhere, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=0, help="0: 1000, and 600 for the ResNet")
    parser.add_argument("--only", default="", help="runs with this in their name")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--merge", type=Path, help="take the runs of this file; run nothing")
    parser.add_argument("--report", action="store_true", help="of what is saved; run nothing")
    options = parser.parse_args()
    path = options.out / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in () if options.report or options.merge else ("SGD", "momentum", "Adam"):
        for about, case in CASES.items():
            title = f"{about}, {name}"
            kept = json.loads(path.read_text()) if path.exists() else {"runs": {}}
            if title in kept["runs"] or options.only not in title:
                continue
            rows = run(case, name, options.steps or case.steps, lambda t: print(t, flush=True))
            where = {title: f"{datetime.date.today()}, {machine()}"}
            new = {"runs": {title: rows}, "machines": where, **settings()}
            path.write_text(compact(merged(kept, new)) + "\n")
    if options.merge:
        kept = json.loads(path.read_text()) if path.exists() else {"runs": {}}
        path.write_text(compact(merged(kept, json.loads(options.merge.read_text()))) + "\n")
    report(options.out)


def _place(title: str) -> tuple[int, int]:
    """Return where a run stands in the table: by model, then by optimizer."""
    about, _, name = title.rpartition(", ")
    return list(CASES).index(about), ("SGD", "momentum", "Adam").index(name)


if __name__ == "__main__":
    main()
