"""Measure the effect of one change: the time of a training step with varreg before and after it.

    .venv/bin/python -m benchmarks.ideas --before ../before --idea "S shares memory with p.grad"

`--before` is another checkout of this repository. Each of the two runs in a process of its own, and
they take turns: a round is a plain step, one with exact moments and one with eight groups in the
first, then the same in the second, in a new order each time. A ratio is that of a step to the plain
step of the same round and process. So a temporary slowdown of the machine affects all of them.
Memory is the peak of a fresh process over that of plain training. The result is added to
`benchmarks/results/ideas.json`, in place of an earlier one of the same name.

The process of the other checkout runs this file too, so it imports of varreg only what it needs,
and only once it needs it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path("benchmarks/results/ideas.json")
PLAIN = "plain"
ARMS = (PLAIN, "exact", "groups=8")
Times = dict[str, list[tuple[float, ...]]]
"""For each arm, the seconds of forward, backward and step in each round."""


def trainings(workload: str, spec: str) -> dict[str, Any]:
    """Return a training for each arm, from whichever checkout is first on the path."""
    try:
        training = importlib.import_module("varreg.lab.bench.training")
    except ModuleNotFoundError:  # until 17 November 2026, `varreg.lab.bench` was one file
        training = importlib.import_module("varreg.lab.bench")
    workloads = sys.modules[training.built.__module__].WORKLOADS
    if workload not in workloads:
        return {}
    return {arm: training.Training(workloads[workload], spec, arm) for arm in ARMS}


def serve(workload: str, spec: str, threads: int) -> None:
    """Take one round of steps for each line on the standard input; answer with their seconds, or
    with peak memory if the line says so.

    An arm takes two steps and the second is timed: the first finds its data out of the cache, since
    another arm or the other process ran before it.
    """
    torch.set_num_threads(threads)
    steps = {arm: training.timed() for arm, training in trainings(workload, spec).items()}
    for step in list(steps.values()) * 3:
        step()
    for line in sys.stdin:
        if line.strip() == "memory":
            from varreg.lab.bench import costs

            peaks = {arm: costs.memory(workload, spec, arm, threads) for arm in ARMS}
            print(json.dumps({arm: peak and peak.training for arm, peak in peaks.items()}))
        else:
            order = random.sample(list(steps), len(steps))
            print(json.dumps({arm: (steps[arm](), steps[arm]())[1] for arm in order}))
        sys.stdout.flush()


class Side:
    """A checkout, at work in a process of its own."""

    def __init__(self, root: Path, workload: str, spec: str, threads: int):
        path = os.pathsep.join([str(root / "src"), str(Path.cwd())])
        command = [sys.executable, "-m", "benchmarks.ideas", "--serve", workload, spec]
        self.process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def ask(self, question: str) -> Any:
        """Send a line, and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def has_workload(self) -> bool:
        """Return whether this checkout knows the workload."""
        return bool(self.ask("step"))

    def end(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def result(times: Times, peaks: dict[str, Any]) -> dict[str, Any]:
    """Return ratios to the plain step, the milliseconds of phases, and memory."""
    from varreg.lab.bench import timing

    totals = {arm: timing.totals(parts) for arm, parts in times.items()}
    phases = {
        arm: [1e3 * timing.quantile(part, 0.5) for part in zip(*parts, strict=True)]
        for arm, parts in times.items()
    }
    return {
        "ratio": {arm: timing.ratio(totals[arm], totals[PLAIN]) for arm in ARMS[1:]},
        "phases": phases,
        "memory": {arm: peaks[arm] / peaks[PLAIN] for arm in ARMS[1:] if peaks},
    }


def compare(
    before: Path, workload: str, spec: str, options: argparse.Namespace
) -> dict[str, Any] | None:
    """Return what a workload costs before and after; None where one checkout does not have it.

    Where a process happens to have its memory makes it faster or slower for all of its life, so
    several pairs of processes share the time.
    """
    times: dict[str, Times] = {when: {arm: [] for arm in ARMS} for when in ("before", "after")}
    peaks: dict[str, Any] = {}
    rounds = 0
    for pair in range(options.pairs):
        sides = {
            "before": Side(before, workload, spec, options.threads),
            "after": Side(Path.cwd(), workload, spec, options.threads),
        }
        if not all(side.has_workload() for side in sides.values()):
            return None
        last = time.perf_counter() + options.seconds / options.pairs
        least = rounds + 3
        while time.perf_counter() < last or rounds < least:
            for when, side in list(sides.items())[:: 1 if rounds % 2 else -1]:
                for arm, parts in side.ask("step").items():
                    times[when][arm].append(tuple(parts))
            rounds += 1
        if pair == 0 and not options.no_memory:
            peaks = {when: side.ask("memory") for when, side in sides.items()}
        for side in sides.values():
            side.end()
    return {
        **{when: result(times[when], peaks.get(when, {})) for when in times},
        "rounds": rounds,
        "pairs": options.pairs,
    }


def main(arguments: list[str] | None = None) -> None:
    """Compare two checkouts, print and save what comes out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--idea", help="its name in the table")
    parser.add_argument("--dropped", action="store_true", help="it is not in varreg")
    parser.add_argument("--only", default="", help="the workloads whose name contains this")
    parser.add_argument("--optimizers", nargs="+", default=["VRSGD:momentum=0.9", "VRAdam"])
    parser.add_argument("--seconds", type=float, default=24.0, help="for each workload")
    parser.add_argument("--pairs", type=int, default=4, help="of processes, which share the time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.serve:
        workload, spec = options.serve
        serve(workload, spec, options.threads)
        return
    from varreg.lab.bench import timing
    from varreg.lab.bench.workloads import WORKLOADS
    from varreg.lab.environment import machine
    from varreg.lab.store import read_json, write_json

    torch.set_num_threads(options.threads)
    rows: dict[str, Any] = {}
    for name in WORKLOADS:
        for spec in options.optimizers if options.only in name else ():
            row = compare(options.before, name, spec, options)
            if row is None:
                print(f"{name}: one of the checkouts does not have it", flush=True)
                continue
            rows.setdefault(name, {})[spec] = row
            shown = (
                f"{when} {timing.Ratio(*row[when]['ratio']['exact'])}"
                + (f"; {m['exact']:.2f}" if (m := row[when]["memory"]) else "")
                for when in ("before", "after")
            )
            print(f"{name}, {spec}: {', '.join(shown)}", flush=True)
    saved = read_json(options.json) if options.json.exists() else {"ideas": []}
    entry = {
        "idea": options.idea,
        "kept": not options.dropped,
        "measured": f"{datetime.date.today()}, {machine()}",
        "rows": rows,
    }
    others = [one for one in saved["ideas"] if one["idea"] != options.idea]
    write_json(options.json, {"ideas": [*others, entry]})


if __name__ == "__main__":
    main()
