"""The figures of `benchmarks.growth`: time and peak memory as batch, width and sequence grow."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.keep import shrink
from varreg.lab.bench.bench_plan import EXACT, PLAIN
from varreg.lab.report.style import COLORS, DASHES, STYLE, save

GROUPS = "groups=8"
OURS = {EXACT: "varreg, exact", GROUPS: "varreg, 8 groups"}
PEERS = {"BackPACK SumGradSquared": "BackPACK", "vmap(grad)": "vmap(grad)", "Opacus": "Opacus"}
EVERY = "every sample's gradient"
GREYS = {"BackPACK SumGradSquared": "-", "vmap(grad)": "--", "Opacus": ":"}
LOOKS: dict[str, dict[str, Any]] = {
    EXACT: {"color": COLORS[1], "linewidth": 2.4, "zorder": 4},
    GROUPS: {"color": COLORS[2], "linewidth": 2.4, "zorder": 4, "linestyle": DASHES[4]},
    PLAIN: {"color": COLORS[0], "linewidth": 1.4, "zorder": 3},
    EVERY: {
        "color": "#c0c5ce",
        "linewidth": 6,
        "alpha": 0.5,
        "zorder": 1,
        "solid_capstyle": "round",
    },
    **{
        tool: {"color": "#9aa1ad", "linewidth": 1.4, "linestyle": dash}
        for tool, dash in GREYS.items()
    },
}
NAMES = {PLAIN: "plain step", EVERY: "batch × parameters", **OURS, **PEERS}


def _log(axes: Axes, values: list[int], label: str) -> None:
    """Make both axes logarithmic, with the measured numbers below, and room for names at the
    right.
    """
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(values[0] * 0.85, values[-1] * max(2.0, (values[-1] / values[0]) ** 0.55))
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel(label)


def _names(axes: Axes, ends: list[tuple[str, float, float]], apart: float, right: float) -> None:
    """Write each line's name at its end, moved up where two would meet; above it, for a line that
    ends early.
    """
    low, high = (math.log(v) for v in axes.get_ylim())
    last = -1.0
    for arm, x, y in sorted(ends, key=lambda end: end[2]):
        color = LOOKS[arm]["color"] if arm in OURS or arm == PLAIN else "#6b7280"
        if x < right:
            axes.annotate(
                NAMES[arm], (x, y), (2, 5), textcoords="offset points", color=color, size=8.5
            )
            continue
        last = max((math.log(y) - low) / (high - low), last + apart)
        place = math.exp(low + last * (high - low))
        axes.annotate(
            NAMES[arm],
            (x, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=color,
            size=8.5,
        )


def _ratios(axes: Axes, line: dict[str, Any]) -> None:
    """Draw one panel."""
    values, ends, notes, heights = line["values"], [], [], [1.0]
    for arm in (*PEERS, GROUPS, EXACT):
        rows = [
            (x, here[arm]["ratio"])
            for x, here in zip(values, line["points"], strict=True)
            if "ratio" in here[arm]
        ]
        errors = [
            (x, here[arm]["error"])
            for x, here in zip(values, line["points"], strict=True)
            if "error" in here[arm]
        ]
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
        axes.text(
            0.02,
            0.98,
            "\n".join(notes),
            transform=axes.transAxes,
            va="top",
            size=7.5,
            color="#6b7280",
        )


def ratios(saved: dict[str, Any]) -> Figure:
    """Draw the ratios, a panel for each line: ours should not grow."""
    with mpl.rc_context(STYLE):
        lines = list(saved["lines"].values())
        columns = min(2, len(lines))  # more would be too small to read on a page
        figure = Figure(
            figsize=(4.1 * columns, 3.3 * math.ceil(len(lines) / columns) + 0.3),
            layout="constrained",
        )
        panels = figure.subplots(math.ceil(len(lines) / columns), columns, squeeze=False).flat
        for axes, line in zip(panels, lines, strict=False):
            _ratios(axes, line)
        for axes in panels[len(lines) :]:
            axes.remove()
        figure.suptitle(
            "Time of a training step with per-sample moments, over a plain one",
            x=0.01,
            ha="left",
            weight="bold",
            size=12,
        )
        return figure


def memories(saved: dict[str, Any]) -> Figure:
    """Draw peak memory over the batch, with what batch × parameters would be."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4 * len(saved["memory"]), 3.9), layout="constrained")
        panels = figure.subplots(1, len(saved["memory"]), squeeze=False).flat
        for axes, line in zip(panels, saved["memory"].values(), strict=True):
            ends = []
            for arm in (*PEERS, PLAIN, GROUPS, EXACT):
                pairs = zip(line["values"], line["points"], strict=True)
                rows = [
                    (x, here[arm] / 2**20) for x, here in pairs if not isinstance(here[arm], dict)
                ]
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


def draw(saved: dict[str, Any], folder: Path) -> None:
    """Write the figures of saved results, as small files."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"growth": ratios(saved)} | ({"memory": memories(saved)} if saved["memory"] else {})
    for name, figure in pictures.items():
        buffer = io.StringIO()
        save(figure, buffer, format="svg", metadata={"Date": None, "Creator": None})
        (folder / f"{name}.svg").write_text(shrink(buffer.getvalue()))
