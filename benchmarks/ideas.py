"""What one idea brings: a training step with varreg as it was before, and as it is now.

    .venv/bin/python -m benchmarks.ideas --before ../before --idea "S shares memory with p.grad"

`--before` is another checkout of this repository. Each of the two runs in a process of its own, and
they take turns: a round is a plain step, one with exact moments and one with eight groups in the
first, then the same in the second. A ratio is that of a step to the plain one of its own round and
process. So what slows the machine down for a while slows all of them. Memory is the peak of a fresh
process over that of plain training. The result is added to `benchmarks/results/ideas.json`, in
place of an earlier one of the same name.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from varreg.lab.bench import costs, timing
from varreg.lab.bench.plan import PLAIN
from varreg.lab.bench.training import Training
from varreg.lab.bench.workloads import WORKLOADS
from varreg.lab.environment import machine
from varreg.lab.store import read_json, write_json

RESULTS = Path("benchmarks/results/ideas.json")
ARMS = (PLAIN, "exact", "groups=8")


def serve(workload: str, spec: str, threads: int) -> None:
    """Take one round of steps for each line on the standard input; answer with their seconds, or
    with peak memory if the line says so.
    """
    torch.set_num_threads(threads)
    steps = {arm: Training(WORKLOADS[workload], spec, arm).timed() for arm in ARMS}
    for step in list(steps.values()) * 3:
        step()
    for line in sys.stdin:
        if line.strip() == "memory":
            peaks = {arm: costs.memory(workload, spec, arm, threads) for arm in ARMS}
            print(json.dumps({arm: peak and peak.training for arm, peak in peaks.items()}))
        else:
            print(json.dumps({arm: step() for arm, step in steps.items()}))
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
        self.times: dict[str, list[tuple[float, ...]]] = {arm: [] for arm in ARMS}

    def ask(self, question: str) -> Any:
        """Send a line, and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def take_round(self) -> None:
        """Take one step of each arm."""
        for arm, parts in self.ask("step").items():
            self.times[arm].append(tuple(parts))

    def result(self, memory: bool) -> dict[str, Any]:
        """Return ratios to the plain step, the milliseconds of phases, and memory; and end."""
        totals = {arm: timing.totals(times) for arm, times in self.times.items()}
        phases = {
            arm: [1e3 * timing.quantile(part, 0.5) for part in zip(*times, strict=True)]
            for arm, times in self.times.items()
        }
        peaks = self.ask("memory") if memory else {}
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        return {
            "ratio": {arm: timing.ratio(totals[arm], totals[PLAIN]) for arm in ARMS[1:]},
            "phases": phases,
            "memory": {arm: peaks[arm] / peaks[PLAIN] for arm in ARMS[1:] if peaks},
        }


def compare(
    before: Path, workload: str, spec: str, seconds: float, threads: int, memory: bool
) -> dict[str, Any]:
    """Return what a workload costs before and after."""
    sides = {
        "before": Side(before, workload, spec, threads),
        "after": Side(Path.cwd(), workload, spec, threads),
    }
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or rounds < 5:
        for side in sides.values() if rounds % 2 else reversed(sides.values()):
            side.take_round()
        rounds += 1
    return {name: side.result(memory) for name, side in sides.items()} | {"rounds": rounds}


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
    parser.add_argument("--seconds", type=float, default=6.0, help="for each workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.serve:
        workload, spec = options.serve
        serve(workload, spec, options.threads)
        return
    torch.set_num_threads(options.threads)
    rows: dict[str, Any] = {}
    for name in WORKLOADS:
        for spec in options.optimizers if options.only in name else ():
            row = compare(
                options.before,
                name,
                spec,
                options.seconds,
                options.threads,
                not options.no_memory,
            )
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
