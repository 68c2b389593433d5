"""Measure the cost of the monitor: training with it over training with the observer alone.

    .venv/bin/python -m benchmarks.monitor_cost        # two minutes; writes results/monitor.json

Both train in turn, a block of steps each, in one process. The monitor sees a clock that runs only
while its own arm does, and records as often as it allows itself. Its first record, which warms up,
is before the first block. The ratio is that of all blocks; the interval, of blocks, is the 10 % and
90 % quantile. Beside it: the time of one record, of a page, and of `varreg.tensorboard.log` for all
layers, in steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tools.tables import cost

import varreg
from benchmarks.keep import compact
from varreg.lab.bench import timing
from varreg.lab.bench.bench_plan import EXACT
from varreg.lab.bench.training import Training
from varreg.lab.bench.workloads import WORKLOADS, YARDSTICK, Workload
from varreg.lab.environment import machine
from varreg.monitor.pace import Pace
from varreg.tensorboard import log

RESULTS = Path(__file__).parent / "results" / "monitor.json"
SPEC = "VRSGD:momentum=0.9"
RECORDS = 5
"""Of which the time is taken."""


class Arm:
    """A training, and the seconds that it has run for."""

    def __init__(self, w: Workload, folder: Path | None):
        self.training, self.seconds = Training(w, SPEC, EXACT), 0.0
        self._since: float | None = None
        self.monitor: varreg.Monitor | None = None
        if folder is not None:
            assert self.training.observer is not None
            self.monitor = varreg.Monitor(self.training.observer, self.training.optimizer, folder)
            self.monitor.recorder.pace = Pace(None, clock=self.clock)

    def clock(self) -> float:
        """Return the seconds that this arm has run for."""
        return self.seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def run(self, steps: int) -> float:
        """Train, and return the seconds that it took."""
        began, self._since = self.seconds, time.perf_counter()
        for _ in range(steps):
            self.training.forward()
            self.training.backward()
            self.training.step()
            if self.monitor is not None:
                self.monitor.step(self.training.loss)
        self.seconds, self._since = self.clock(), None
        return self.seconds - began


class _Nowhere:
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        pass


def seconds_of(action: Any) -> float:
    """Return the median of some calls."""
    times = []
    for _ in range(RECORDS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return timing.quantile(times, 0.5)


def measure(w: Workload, seconds: float, blocks: int) -> dict[str, Any]:
    """Return the ratio, and what single actions take."""
    with tempfile.TemporaryDirectory() as folder:
        alone, watched = Arm(w, None), Arm(w, Path(folder))
        assert watched.monitor is not None
        for arm in (alone, watched):
            arm.run(3)
        step = alone.run(3) / 3
        steps = max(1, round(seconds / blocks / 2 / step))
        alone.seconds = watched.seconds = 0.0
        watched.monitor.recorder.pace = Pace(None, clock=watched.clock)
        watched.run(1)
        pairs = [(watched.run(steps), alone.run(steps)) for _ in range(blocks)]
        a, b = (sum(column) for column in zip(*pairs, strict=True))
        each = timing.ratio(*([p[i] for p in pairs] for i in (0, 1)))
        pace, monitor = watched.monitor.recorder.pace, watched.monitor
        found = {
            "ratio": a / b,
            "low": each.low,
            "high": each.high,
            "share": pace.spent_share,
            "records": pace.records,
            "steps": blocks * steps,
            "step": b / blocks / steps,
        }
        monitor.recorder.pace = Pace(1)
        observer = watched.training.observer
        optimizer: Any = watched.training.optimizer
        publisher: Any = monitor._publisher
        publisher._next = float("inf")  # the page is not a part of a record here
        found["record"] = seconds_of(lambda: monitor.step(1.0)) / found["step"]
        found["page"] = seconds_of(publisher.publish) / found["step"]
        found["all layers"] = (
            seconds_of(lambda: log(_Nowhere(), 0, observer, optimizer, layers=True)) / found["step"]
        )
        monitor.close()
        return found


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="for each workload")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--workloads", nargs="*", default=list(YARDSTICK))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: dict[str, dict[str, Any]] = {}
    for name in options.workloads:
        rows[name] = measure(WORKLOADS[name], options.seconds, options.blocks)
        print(f"{name}: measured", flush=True)
    about = {"date": str(datetime.date.today()), "machine": machine(), "optimizer": SPEC}
    saved = {**about, "seconds": options.seconds, "rows": rows}
    print(f"\n{cost.monitor(saved)}\n\n{about['date']}, {about['machine']}")
    options.out.write_text(compact(json.loads(json.dumps(saved))) + "\n")


if __name__ == "__main__":
    main()
