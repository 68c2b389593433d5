"""Measure how the relative cost changes as a model grows: in batch, width, sequence and depth, each
from small to large; and memory over the batch.

    .venv/bin/python -m benchmarks.growth            # about twelve minutes
    .venv/bin/python -m benchmarks.growth --draw     # the figures alone, from what was saved

Figures go to `docs/results/speed/`.

The figures are the time of a step with VRSGD (momentum 0.9), and of a step with the second moments
of another tool, over that of a step with torch.optim.SGD: medians of paired ratios, interleaved in
one run for each point. At the first point of each line, a tool is compared with a loop over
samples; if it raises or is wrong, it is left out of the line. It is also left out from the point on
at which its step takes too long or needs too much memory. The file names the tools that were left
out, with the reasons.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import peers
from benchmarks.growth_figures import OURS, PEERS, draw
from varreg.lab.bench import timing
from varreg.lab.bench.bench_plan import PLAIN
from varreg.lab.bench.single_samples import check_moments
from varreg.lab.bench.training import Training
from varreg.lab.bench.workloads import Workload, images, part, text
from varreg.lab.environment import machine
from varreg.lab.models import GPT, lenet, mlp, paper_cnn
from varreg.lab.store import read_json, write_json
from varreg.lab.tasks.preparation import per_token

SPEC = "VRSGD:momentum=0.9"
RESULTS, PICTURES = Path("benchmarks/results/growth.json"), Path("docs/results/speed")
TOKENS, WIDTH = 128, 48


class Line(NamedTuple):
    """A model that grows in one respect."""

    model: str
    grows: str
    make: Callable[[int], Workload]
    values: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the line."""
        return f"{self.model}: {self.grows}"

    def at(self, i: int) -> Workload:
        """Return the workload at a point."""
        return self.make(self.values[i])


def _vision(make: Callable[[], Any], *shape: int) -> Callable[[int], Workload]:
    """Return what makes a workload of images, by the size of the batch."""
    return lambda batch: Workload(f"batch {batch}", make, images(batch, *shape))


def _wide_cnn(width: int) -> Workload:
    """Return the paper's CNN, so many times as wide."""
    return Workload(f"width {width}", functools.partial(paper_cnn, width), images(32, 1, 28, 28))


def _wide_gpt(width: int) -> Workload:
    """Return a GPT, so many times as wide."""
    return Workload(
        f"width {width}", functools.partial(GPT, width=WIDTH * width), text(8, TOKENS), per_token
    )


def _long_gpt(tokens: int) -> Workload:
    """Return a GPT on sequences of so many tokens."""
    return Workload(f"{tokens} tokens", GPT, text(8, tokens), per_token)


def _deep_gpt(layers: int) -> Workload:
    """Return a GPT of so many layers."""
    return Workload(
        f"{layers} layers", functools.partial(GPT, layers, 2 * WIDTH), text(8, TOKENS), per_token
    )


BATCHES, WIDTHS, LENGTHS = (16, 64, 256, 1024), (1, 2, 4, 8), (32, 128, 512, 1024)
DEPTHS = (2, 6, 16, 48)
LINES = {
    line.name: line
    for line in (
        Line("paper's CNN", "batch", _vision(paper_cnn, 1, 28, 28), BATCHES),
        Line("LeNet", "batch", _vision(lenet, 3, 32, 32), BATCHES),
        Line("MLP 784-512-512-10", "batch", _vision(mlp, 1, 28, 28), BATCHES),
        Line("paper's CNN, batch 32", "times as wide", _wide_cnn, WIDTHS),
        Line(f"GPT of 4 × {WIDTH}, batch 8", "times as wide", _wide_gpt, WIDTHS),
        Line("GPT of 4 × 192, batch 8", "tokens", _long_gpt, LENGTHS),
        Line(f"GPT of width {2 * WIDTH}, batch 8", "layers", _deep_gpt, DEPTHS),
    )
}
REMEMBERED = ("paper's CNN: batch", "MLP 784-512-512-10: batch")
"""Whose memory is measured."""


class Limits(NamedTuple):
    """Beyond which a tool is left out."""

    seconds: float
    gigabytes: float


@contextlib.contextmanager
def limited(gigabytes: float) -> Iterator[None]:
    """Let what needs more memory raise, so that the system ends no other process for it (Linux)."""
    if not timing.PEAK_IS_KNOWN:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + int(gigabytes * 2**30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def reason(error: BaseException, limits: Limits) -> str:
    """Return why a tool is left out, in a few words."""
    if isinstance(error, MemoryError) or "memory" in str(error) or "bad_alloc" in str(error):
        return f"needs more than {limits.gigabytes:g} GB"
    return peers.said(error) if isinstance(error, Exception) else type(error).__name__


def step_of(arm: str, w: Workload) -> Callable[[], object]:
    """Return a training step of an arm."""
    return Training(w, SPEC, arm).timed() if arm in (PLAIN, *OURS) else peers.ARMS[arm](w)[0]


def wrong(w: Workload, limits: Limits) -> dict[str, str]:
    """Return the tools that cannot be used here, and why. Ours must be right: else this raises."""
    check_moments(w, tuple(OURS))
    truth, faults = peers.first_moments(peers.LOOP, w), {}
    for tool in PEERS:
        try:
            peers.check(peers.first_moments(tool, w), truth)
        except Exception as error:  # noqa: PERF203
            faults[tool] = reason(error, limits)
    return faults


def point(w: Workload, tools: list[str], seconds: float, limits: Limits) -> dict[str, Any]:
    """Return the ratios at one point."""
    steps: dict[str, Callable[[], timing.Parts]] = {}
    rows: dict[str, Any] = {}
    for arm in (PLAIN, *OURS, *tools):
        try:
            with limited(limits.gigabytes):
                step = step_of(arm, w)
                step()  # the first one is slower
                start = time.perf_counter()
                step()
                took = time.perf_counter() - start
        except (MemoryError, RuntimeError) as error:
            rows[arm] = {"error": reason(error, limits)}
            continue
        if arm in PEERS and took > limits.seconds:
            rows[arm] = {"error": f"takes {took:.1f} s"}
            continue
        steps[arm] = timing.timed(step)
    times = {
        arm: timing.totals(each)
        for arm, each in timing.rounds(steps, seconds, least=4, warm_up=0).items()
    }
    for arm, each in times.items():
        rows[arm] = {
            "ratio": timing.ratio(each, times[PLAIN]),
            "milliseconds": 1e3 * timing.quantile(each, 0.5),
        }
    return rows


def grow(line: Line, points: int, seconds: float, limits: Limits) -> dict[str, Any]:
    """Return every point of a line."""
    left_out = wrong(line.at(0), limits)
    grown = []
    for i in range(points):
        tools = [tool for tool in PEERS if tool not in left_out]
        here = point(line.at(i), tools, seconds, limits)
        left_out |= {arm: row["error"] for arm, row in here.items() if "error" in row}
        grown.append({**here, **{tool: {"error": left_out[tool]} for tool in left_out}})
        print(
            f"{line.name} {line.values[i]}: "
            + ", ".join(f"{arm} {_short(row)}" for arm, row in grown[-1].items()),
            flush=True,
        )
    return {
        "model": line.model,
        "grows": line.grows,
        "values": line.values[:points],
        "points": grown,
    }


def _short(row: dict[str, Any]) -> str:
    """Return a ratio or an error, for a line of output."""
    return str(row["error"]) if "error" in row else str(timing.Ratio(*row["ratio"]))


def remember(line: Line, points: int, limits: Limits) -> dict[str, Any]:
    """Return peak memory over the batch, each in a fresh process."""
    peaks = []
    for i in range(points):
        here: dict[str, Any] = {}
        for arm in (PLAIN, *OURS, *PEERS):
            try:
                here[arm] = timing.in_a_fresh_process(
                    _peak, line.name, i, arm, limits, torch.get_num_threads()
                )
            except (MemoryError, RuntimeError) as error:  # noqa: PERF203
                here[arm] = {"error": reason(error, limits)}
        peaks.append(here)
        shown = (
            f"{arm} {row['error'] if isinstance(row, dict) else f'{row / 2**20:.0f} MiB'}"
            for arm, row in here.items()
        )
        print(f"{line.name} {line.values[i]}: {', '.join(shown)}", flush=True)
    parameters = sum(p.numel() for p in line.at(0).make().parameters())
    return {
        "model": line.model,
        "values": line.values[:points],
        "points": peaks,
        "parameters": parameters,
    }


def _peak(name: str, i: int, arm: str, limits: Limits, threads: int) -> int:
    """Return the peak memory of this process, which is a fresh one."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    w = LINES[name].at(i)
    few = w._replace(batch=lambda: part(w.batch(), slice(0, 2)))
    with limited(limits.gigabytes):
        return timing.peak(lambda: step_of(PLAIN, few)(), lambda: step_of(arm, w), steps=3).training


def main(arguments: list[str] | None = None) -> None:
    """Measure, unless figures alone are asked for; draw what was saved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="the lines whose name contains this")
    parser.add_argument("--points", type=int, default=4, help="of each line, the first ones")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each point")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--patience", type=float, default=2.0, help="seconds that a step of another tool may take"
    )
    parser.add_argument("--gigabytes", type=float, default=6.0, help="that a tool may need")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurement")
    parser.add_argument("--draw", action="store_true", help="only draw what was saved")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--figures", type=Path, default=PICTURES)
    options = parser.parse_args(arguments)
    if not options.draw:
        lines = [line for line in LINES.values() if options.only in line.name]
        if not lines:
            parser.error(f"no line contains {options.only!r}; there are: {'; '.join(LINES)}")
        torch.set_num_threads(options.threads)
        limits = Limits(options.patience, options.gigabytes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            grown = {
                line.name: grow(line, options.points, options.seconds, limits) for line in lines
            }
        kept = [line for line in lines if line.name in REMEMBERED and not options.no_memory]
        memory = {line.name: remember(line, options.points, limits) for line in kept}
        head = f"{datetime.date.today()}, {machine()}"
        write_json(
            options.out,
            {"measured": head, "seconds": options.seconds, "lines": grown, "memory": memory},
        )
    saved = read_json(options.out)
    draw(saved, options.figures)
    print(f"Measured {saved['measured']}. {options.figures}/growth.svg")


if __name__ == "__main__":
    main()
