"""Measure the time of the first observed step, which includes trials and plans.

    .venv/bin/python -m benchmarks.first_step        # about a minute

Each workload runs in a process of its own, forward and backward: a few plain steps to warm torch
up, the first observed step, and then more of them. Native code is built before, so that its
compilation (a few seconds, once per machine) is not in it. Results go to
`benchmarks/results/first_step.json`.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tools.tables import speed

import varreg
from varreg import native
from varreg.lab.bench.workloads import WORKLOADS, built, call
from varreg.lab.environment import machine

RESULTS = Path(__file__).parent / "results" / "first_step.json"


def measure(name: str) -> dict[str, Any]:
    """Return seconds of plain steps, of the first observed one, and of those after it."""
    torch.set_num_threads(2)
    native.status()
    workload = WORKLOADS[name]
    model, x, y = built(workload)

    def step() -> float:
        model.zero_grad()
        start = time.perf_counter()
        workload.loss(call(model, x), y).backward()
        return time.perf_counter() - start

    plain = [step() for _ in range(6)][1:]
    varreg.observe(model)
    first, *warm = [step() for _ in range(8)]
    return {
        "name": name,
        "plain": statistics.median(plain),
        "first": first,
        "warm": statistics.median(warm[2:]),
    }


def main() -> None:
    """Measure all workloads, print the table and save it."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = [pool.apply(measure, (name,)) for name in WORKLOADS]
    saved = {"date": datetime.date.today().isoformat(), "machine": machine(), "rows": rows}
    print(speed.first_step(saved))
    RESULTS.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
