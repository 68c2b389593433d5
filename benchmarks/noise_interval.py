"""Count how often the interval of `NoiseScale` holds B_n, where B_n of each step is known.

    .venv/bin/python -m benchmarks.noise_interval            # some minutes; saved runs stay
    .venv/bin/python -m benchmarks.noise_interval --report   # the table, from what is saved

A small CNN trains on digits, with batches that are drawn with replacement. Before each step tr Σ
and |G|² are those of all training samples: the truth, without an error of its own. Every 200 steps,
the interval from the last 200 batches is compared with three truths:

- B_n of these 200 steps: the average of tr Σ over the average of |G|². It is what the interval is
  about;
- B_n of the next 200 steps, in the same way: what a plan for more training would need;
- B_n of the last step alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import varreg
from benchmarks.keep import compact
from varreg.lab.environment import machine
from varreg.lab.tasks import lookup
from varreg.lab.tasks.randomness import seed_all
from varreg.noise.interval import ratio_intervals

EVERY = 200
BATCH = 32
STEPS = 800
SEEDS = 8
TRUTHS = {"steps": "its 200 steps", "next": "the next 200 steps", "last": "the last step"}
RATES = {"SGD": 0.3, "momentum": 0.04, "Adam": 2e-3}
OUT = Path("docs/results/noise-truth/interval.json")


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a run."""
    if name == "Adam":
        return torch.optim.Adam(model.parameters(), lr=RATES[name])
    momentum = 0.9 if name == "momentum" else 0.0
    return torch.optim.SGD(model.parameters(), lr=RATES[name], momentum=momentum)


def series(name: str, seed: int) -> Tensor:
    """Train, and return tr Σ and |Ĝ|² of the batch of each step, then tr Σ and |G|² of all samples
    before it: `[steps, 4]`.
    """
    task = lookup.task("digits")
    train = lookup.load("digits", None).train
    seed_all(seed)
    model = task.model()
    noise = varreg.NoiseScale(varreg.observe(model), window=2)
    optimizer = optimizer_of(name, model)
    order, N = torch.Generator().manual_seed(1000 + seed), len(train)
    rows = []
    for _ in range(STEPS):
        row: list[float] = []
        for index in (torch.arange(N), torch.randint(N, (BATCH,), generator=order)):
            optimizer.zero_grad()
            task.loss(model(train.x[index]), train.y[index]).backward()
            noise.update()
            row = noise.latest.sum(0).tolist() + row
        optimizer.step()
        trace, signal = row[2:]  # estimates, as if from a sample of more data: these are all
        rows.append([*row[:2], trace * (N - 1) / N, signal + trace / N])
    return torch.tensor(rows, dtype=torch.float64)


def judged(series: Tensor) -> list[dict[str, Any]]:
    """Return a check for every 200 steps of a series: the averages that NoiseScale has there, its
    interval, and the truths.
    """
    found = []
    for end in range(EVERY, len(series) + 1, EVERY):
        window, later = series[end - EVERY : end], series[end : end + EVERY]
        check = {
            "step": end,
            "NoiseScale": window[:, :2].mean(0).tolist(),
            "interval": list(ratio_intervals(window[None, :, :2])[0]),
            "steps": window[:, 2:].mean(0).tolist(),
            "last": window[-1, 2:].tolist(),
        }
        found.append(check | ({"next": later[:, 2:].mean(0).tolist()} if len(later) else {}))
    return found


def share(rows: list[dict[str, Any]], which: str) -> str:
    """Return in how many checks the interval holds one of the truths.

    >>> check = {"interval": [1.0, 3.0], "steps": [4.0, 2.0]}
    >>> share([check, {**check, "steps": [4.0, 1.0]}, {"interval": [1.0, 3.0]}], "steps")
    '1 of 2'
    """
    known = [row for row in rows if which in row]
    held = sum(low <= row[which][0] / row[which][1] <= high
               for row in known for low, high in [row["interval"]])  # fmt: skip
    return f"{held} of {len(known)}"


def width(rows: list[dict[str, Any]]) -> str:
    """Return the median of the upper bound over the lower one."""
    ends = [row["interval"] for row in rows]
    middle = statistics.median(high / low if low else math.inf for low, high in ends)
    return "∞" if math.isinf(middle) else f"{middle:.2f}"


def checks(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the checks of all runs."""
    return [row for runs in saved["runs"].values() for rows in runs.values() for row in rows]


def table(saved: dict[str, Any]) -> str:
    """Return the table in Markdown: how often the interval holds each truth."""
    head = ("it holds B_n of", *TRUTHS.values(), "upper over lower bound")
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    every = {name: checks({"runs": {name: runs}}) for name, runs in saved["runs"].items()}
    every["all"] = checks(saved)
    for name, rows in every.items():
        cells = [share(rows, which) for which in TRUTHS]
        lines.append(f"| {name} | {' | '.join(cells)} | {width(rows)} |")
    return "\n".join(lines)


def main() -> None:
    """Run, save and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--report", action="store_true", help="of what is saved; run nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.out
    saved = json.loads(path.read_text()) if path.exists() else {"runs": {k: {} for k in RATES}}
    for seed in range(0 if options.report else options.seeds):
        for name, runs in saved["runs"].items():
            if str(seed) not in runs:
                runs[str(seed)] = judged(series(name, seed))
                saved |= {"batch": BATCH, "rates": RATES}
                saved["measured"] = f"{datetime.date.today()}, {machine()}"
                path.write_text(compact(saved, depth=4) + "\n")
    print(table(saved))


if __name__ == "__main__":
    main()
