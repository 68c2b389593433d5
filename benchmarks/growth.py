"""Does the cost grow with the work? Batch, width and sequence, each from small to large; and memory over the batch.

    .venv/bin/python -m benchmarks.growth            # about ten minutes; figures to docs/results/speed/
    .venv/bin/python -m benchmarks.growth --draw     # the figures alone, from what was saved

A step with VRSGD (momentum 0.9) over one with torch.optim.SGD, and the second moments of other tools over the same: medians of paired
ratios, interleaved in one run for each point. A tool is compared with a loop over samples at the first point of each line, and left out of
it where it raises or is wrong; from where a step of it takes too long or needs too much memory, it is left out too. What was left out is
in the file with its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import math
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks import peers
from varreg.lab import bench, timing
from varreg.lab.bench import EXACT, PLAIN, Training
from varreg.lab.environment import machine
from varreg.lab.figures import COLORS, STYLE
from varreg.lab.models import GPT, lenet, mlp, paper_cnn
from varreg.lab.store import read_json, write_json
from varreg.lab.tasks import per_token
from varreg.lab.workloads import Workload, images, part, text

SPEC, GROUPS = "VRSGD:momentum=0.9", "groups=8"
OURS = {EXACT: "varreg, exact", GROUPS: "varreg, 8 groups"}
PEERS = {"BackPACK SumGradSquared": "BackPACK", "vmap(grad)": "vmap(grad)", "Opacus": "Opacus"}
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
        return f"{self.model}: {self.grows}"

    def at(self, i: int) -> Workload:
        return self.make(self.values[i])


def _vision(make: Callable[[], Any], *shape: int) -> Callable[[int], Workload]:
    return lambda batch: Workload(f"batch {batch}", make, images(batch, *shape))


def _wide_cnn(width: int) -> Workload:
    return Workload(f"width {width}", functools.partial(paper_cnn, width), images(32, 1, 28, 28))


def _wide_gpt(width: int) -> Workload:
    return Workload(f"width {width}", functools.partial(GPT, width=WIDTH * width), text(8, TOKENS), per_token)


def _long_gpt(tokens: int) -> Workload:
    return Workload(f"{tokens} tokens", GPT, text(8, tokens), per_token)


BATCHES, WIDTHS, LENGTHS = (16, 64, 256, 1024), (1, 2, 4, 8), (32, 128, 512, 1024)
LINES = {
    line.name: line
    for line in (
        Line("paper's CNN", "batch", _vision(paper_cnn, 1, 28, 28), BATCHES),
        Line("LeNet", "batch", _vision(lenet, 3, 32, 32), BATCHES),
        Line("MLP 784-512-512-10", "batch", _vision(mlp, 1, 28, 28), BATCHES),
        Line("paper's CNN, batch 32", "times as wide", _wide_cnn, WIDTHS),
        Line(f"GPT of 4 × {WIDTH}, batch 8", "times as wide", _wide_gpt, WIDTHS),
        Line("GPT of 4 × 192, batch 8", "tokens", _long_gpt, LENGTHS),
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
    """What would need more than that raises, and nobody else's process is ended for it (Linux)."""
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
    if isinstance(error, MemoryError) or "memory" in str(error) or "bad_alloc" in str(error):
        return f"needs more than {limits.gigabytes:g} GB"
    return peers.said(error) if isinstance(error, Exception) else type(error).__name__


def made(arm: str, w: Workload) -> Callable[[], object]:
    return Training(w, SPEC, arm).timed() if arm in (PLAIN, *OURS) else peers.ARMS[arm](w)[0]


def wrong(w: Workload, limits: Limits) -> dict[str, str]:
    """The tools that cannot be used here, and why. Ours must be right, or nothing is measured."""
    bench.check_moments(w, tuple(OURS))
    truth, found = peers.first_moments(peers.LOOP, w), {}
    for tool in PEERS:
        try:
            peers.check(peers.first_moments(tool, w), truth)
        except Exception as error:  # noqa: PERF203
            found[tool] = reason(error, limits)
    return found


def point(w: Workload, tools: list[str], seconds: float, limits: Limits) -> dict[str, Any]:
    """Ratios at one point."""
    steps: dict[str, Callable[[], timing.Parts]] = {}
    found: dict[str, Any] = {}
    for arm in (PLAIN, *OURS, *tools):
        try:
            with limited(limits.gigabytes):
                step = made(arm, w)
                step()  # the first one is slower
                start = time.perf_counter()
                step()
                took = time.perf_counter() - start
        except (MemoryError, RuntimeError) as error:
            found[arm] = {"error": reason(error, limits)}
            continue
        if arm in PEERS and took > limits.seconds:
            found[arm] = {"error": f"takes {took:.1f} s"}
            continue
        steps[arm] = timing.timed(step)
    times = {arm: timing.whole(each) for arm, each in timing.rounds(steps, seconds, least=4, warm_up=0).items()}
    for arm, each in times.items():
        found[arm] = {"ratio": timing.ratio(each, times[PLAIN]), "milliseconds": 1e3 * timing.quantile(each, 0.5)}
    return found


def grow(line: Line, points: int, seconds: float, limits: Limits) -> dict[str, Any]:
    """Every point of a line."""
    left_out = wrong(line.at(0), limits)
    found = []
    for i in range(points):
        tools = [tool for tool in PEERS if tool not in left_out]
        here = point(line.at(i), tools, seconds, limits)
        left_out |= {arm: row["error"] for arm, row in here.items() if "error" in row}
        found.append({**here, **{tool: {"error": left_out[tool]} for tool in left_out}})
        print(f"{line.name} {line.values[i]}: " + ", ".join(f"{arm} {_short(row)}" for arm, row in found[-1].items()), flush=True)
    return {"model": line.model, "grows": line.grows, "values": line.values[:points], "points": found}


def _short(row: dict[str, Any]) -> str:
    return str(row["error"]) if "error" in row else str(timing.Ratio(*row["ratio"]))


def remember(line: Line, points: int, limits: Limits) -> dict[str, Any]:
    """Peak memory over the batch, each in a process of its own."""
    found = []
    for i in range(points):
        here: dict[str, Any] = {}
        for arm in (PLAIN, *OURS, *PEERS):
            try:
                here[arm] = timing.in_a_fresh_process(_peak, line.name, i, arm, limits, torch.get_num_threads())
            except (MemoryError, RuntimeError) as error:  # noqa: PERF203
                here[arm] = {"error": reason(error, limits)}
        found.append(here)
        shown = (f"{arm} {row['error'] if isinstance(row, dict) else f'{row / 2**20:.0f} MiB'}" for arm, row in here.items())
        print(f"{line.name} {line.values[i]}: {', '.join(shown)}", flush=True)
    parameters = sum(p.numel() for p in line.at(0).make().parameters())
    return {"model": line.model, "values": line.values[:points], "points": found, "parameters": parameters}


def _peak(name: str, i: int, arm: str, limits: Limits, threads: int) -> int:
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    w = LINES[name].at(i)
    few = w._replace(batch=lambda: part(w.batch(), slice(0, 2)))
    with limited(limits.gigabytes):
        return timing.peak(lambda: made(PLAIN, few)(), lambda: made(arm, w), steps=3).own


# ---- pictures ------------------------------------------------------------------------------------------------------------

EVERY = "every sample's gradient"
GREYS = {"BackPACK SumGradSquared": "-", "vmap(grad)": "--", "Opacus": ":"}
LOOKS: dict[str, dict[str, Any]] = {
    EXACT: {"color": COLORS[1], "linewidth": 2.4, "zorder": 4},
    GROUPS: {"color": COLORS[2], "linewidth": 2.4, "zorder": 4},
    PLAIN: {"color": COLORS[0], "linewidth": 1.4, "zorder": 3},
    EVERY: {"color": "#c0c5ce", "linewidth": 6, "alpha": 0.5, "zorder": 1, "solid_capstyle": "round"},
    **{tool: {"color": "#9aa1ad", "linewidth": 1.4, "linestyle": dash} for tool, dash in GREYS.items()},
}
NAMES = {PLAIN: "plain step", EVERY: "batch × parameters", **OURS, **PEERS}


def _log(axes: Axes, values: list[int], label: str) -> None:
    """Both axes by factors, with the numbers that were measured below, and room for names at the right."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(values[0] * 0.85, values[-1] * max(2.0, (values[-1] / values[0]) ** 0.55))
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel(label)


def _names(axes: Axes, ends: list[tuple[str, float, float]], apart: float, right: float) -> None:
    """Each line's name at its end, moved up where two would meet; above it, for a line that ends early."""
    low, high = (math.log(v) for v in axes.get_ylim())
    last = -1.0
    for arm, x, y in sorted(ends, key=lambda end: end[2]):
        color = LOOKS[arm]["color"] if arm in OURS or arm == PLAIN else "#6b7280"
        if x < right:
            axes.annotate(NAMES[arm], (x, y), (2, 5), textcoords="offset points", color=color, size=8.5)
            continue
        last = max((math.log(y) - low) / (high - low), last + apart)
        place = math.exp(low + last * (high - low))
        axes.annotate(NAMES[arm], (x, place), (6, 0), textcoords="offset points", va="center", color=color, size=8.5)


def _ratios(axes: Axes, line: dict[str, Any]) -> None:
    values, ends, notes, heights = line["values"], [], [], [1.0]
    for arm in (*PEERS, GROUPS, EXACT):
        rows = [(x, here[arm]["ratio"]) for x, here in zip(values, line["points"], strict=True) if "ratio" in here[arm]]
        errors = [(x, here[arm]["error"]) for x, here in zip(values, line["points"], strict=True) if "error" in here[arm]]
        if errors:
            where = f" from {errors[0][0]:,}" if rows else ""
            notes.append(f"{NAMES[arm]}{where}: {errors[0][1]}")
        if not rows:
            continue
        x, ratios = zip(*rows, strict=True)
        middle, low, high = zip(*ratios, strict=True)
        axes.plot(x, middle, marker="o", ms=4 if arm in OURS else 3, **LOOKS[arm])
        if arm in OURS:
            axes.fill_between(x, low, high, color=LOOKS[arm]["color"], alpha=0.15, linewidth=0)
        ends.append((arm, x[-1], middle[-1]))
        heights += [*middle, *(high if arm in OURS else ())]
    axes.plot([values[0] * 0.8, values[-1]], [1, 1], color=COLORS[0], linewidth=1.2, zorder=2)
    _log(axes, values, line["grows"])
    bottom, top = min(0.85, 0.85 * min(heights)), max(2.2, 1.25 * max(heights))
    top *= (top / bottom) ** (0.09 * len(notes))  # room for them
    axes.set_ylim(bottom, top)
    ticks = [
        t
        for t in (0.7, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500)
        if bottom < t < top and (t not in (1.2, 1.5, 3) or top < 12)
    ]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    _names(axes, [*ends, (PLAIN, values[-1], 1.0)], 0.065, values[-1])
    axes.set_title(line["model"])
    if notes:
        axes.text(0.02, 0.98, "\n".join(notes), transform=axes.transAxes, va="top", size=7.5, color="#6b7280")


def ratios(found: dict[str, Any]) -> Figure:
    """One panel for each line: our ratio is to stay where it is."""
    with mpl.rc_context(STYLE):
        lines = list(found["lines"].values())
        columns = min(3, len(lines))
        figure = Figure(figsize=(4.1 * columns, 3.3 * math.ceil(len(lines) / columns) + 0.3), layout="constrained")
        panels = figure.subplots(math.ceil(len(lines) / columns), columns, squeeze=False).flat
        for axes, line in zip(panels, lines, strict=False):
            _ratios(axes, line)
        figure.suptitle(
            "Time of a training step with per-sample moments, over a plain one", x=0.01, ha="left", weight="bold", size=12
        )
        return figure


def memories(found: dict[str, Any]) -> Figure:
    """Peak memory over the batch, with what batch × parameters would be."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4 * len(found["memory"]), 3.9), layout="constrained")
        panels = figure.subplots(1, len(found["memory"]), squeeze=False).flat
        for axes, line in zip(panels, found["memory"].values(), strict=True):
            ends = []
            for arm in (*PEERS, PLAIN, GROUPS, EXACT):
                pairs = zip(line["values"], line["points"], strict=True)
                rows = [(x, here[arm] / 2**20) for x, here in pairs if not isinstance(here[arm], dict)]
                if rows:
                    x, y = zip(*rows, strict=True)
                    axes.plot(x, y, marker="o", ms=4 if arm in OURS else 3, **LOOKS[arm])
                    ends.append((arm, x[-1], y[-1]))
            _log(axes, line["values"], "batch")
            every = [4 * n * line["parameters"] / 2**20 for n in line["values"]]
            low, high = axes.get_ylim()
            axes.plot(line["values"], every, **LOOKS[EVERY])
            ends.append((EVERY, line["values"][-1], every[-1]))
            axes.set_ylim(low, 1.8 * max(high, every[-1]))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
            _names(axes, ends, 0.055, line["values"][-1])
            axes.set_title(f"{line['model']}: peak memory of training, MiB")
        return figure


def draw(found: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"growth": ratios(found)} | ({"memory": memories(found)} if found["memory"] else {})
    for name, figure in pictures.items():
        with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the lines whose name contains this")
    parser.add_argument("--points", type=int, default=4, help="of each line, the first ones")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each point")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--patience", type=float, default=2.0, help="seconds that a step of another tool may take")
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
            grown = {line.name: grow(line, options.points, options.seconds, limits) for line in lines}
        kept = [line for line in lines if line.name in REMEMBERED and not options.no_memory]
        memory = {line.name: remember(line, options.points, limits) for line in kept}
        head = f"{datetime.date.today()}, {machine()}"
        write_json(options.out, {"measured": head, "seconds": options.seconds, "lines": grown, "memory": memory})
    found = read_json(options.out)
    draw(found, options.figures)
    print(f"Measured {found['measured']}. {options.figures}/growth.svg")


if __name__ == "__main__":
    main()
