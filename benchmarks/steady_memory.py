"""Check that memory does not grow: the peak of the first step and of later ones, and the memory
after 2,000 steps.

    .venv/bin/python -m benchmarks.steady_memory        # about eight minutes

Each figure is of a fresh process, with VRSGD (momentum 0.9) and exact moments. Peaks are those of a
training on the workload's batch, over what is there before it begins. The 2,000 steps are on two of
its samples: what would be left behind does not depend on how many there are. Memory that was freed
does not count as held. Results go to `benchmarks/results/steady_memory.json` after each workload;
`--only` replaces those of some workloads.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

import torch
from tools.tables import cost

from varreg.lab.bench import timing
from varreg.lab.bench.training import Training
from varreg.lab.bench.workloads import WORKLOADS, part
from varreg.lab.environment import machine
from varreg.lab.store import read_json, write_json

RESULTS = Path("benchmarks/results/steady_memory.json")
SPEC, FEW = "VRSGD:momentum=0.9", 2


def peaks(name: str, arm: str) -> tuple[int, int]:
    """Return the peak of the first step and that of the nine after it, in bytes, in a process that
    has done nothing else.
    """
    torch.set_num_threads(2)
    w = WORKLOADS[name]
    few = w._replace(batch=lambda: part(w.batch(), slice(0, FEW)))
    Training(few, SPEC, "plain").timed()()  # torch's code is in memory then
    before = timing.ready_for_peak()
    step = Training(w, SPEC, arm).timed()
    step()
    first = timing.peak_so_far() - before
    timing.ready_for_peak()
    for _ in range(9):
        step()
    return first, timing.peak_so_far() - before


def steady(name: str, steps: int) -> dict[str, int]:
    """Return the bytes that a process holds, by the number of steps that it has taken."""
    torch.set_num_threads(1)  # beside other work, two would wait for each other
    w = WORKLOADS[name]
    step = Training(w._replace(batch=lambda: part(w.batch(), slice(0, FEW))), SPEC, "exact").timed()
    held: dict[str, int] = {}
    for i in range(1, steps + 1):
        step()
        if i in (steps // 20, steps):
            held[str(i)] = timing.ready_for_peak()
    return held


def main(arguments: list[str] | None = None) -> None:
    """Measure all workloads, print the table and save it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="the workloads whose name contains this")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows: dict[str, dict[str, Any]] = {}
    if options.only and options.json.exists():
        rows = {row["name"]: row for row in read_json(options.json)["rows"]}
    for name in WORKLOADS:
        if options.only in name:
            row: dict[str, Any] = {"name": name}
            for arm in ("plain", "exact"):
                row[arm] = timing.in_a_fresh_process(peaks, name, arm)
            row["steady"] = timing.in_a_fresh_process(steady, name, options.steps)
            rows[name] = row
            known = [rows[name] for name in WORKLOADS if name in rows]
            saved = {"measured": f"{datetime.date.today()}, {machine()}", "rows": known}
            write_json(options.json, saved)
    print(cost.steady_memory(saved))


if __name__ == "__main__":
    main()
