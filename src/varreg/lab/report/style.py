"""The style of figures, and their shared parts."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    Locator,
    LogFormatterMathtext,
    LogLocator,
    MaxNLocator,
    NullFormatter,
)

from varreg.lab.report.format import WORDS

COLORS = ("#3b4252", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#8c564b")
"""Colours that colour-blind readers can distinguish; the first is the base's."""
DASHES: Any = (
    *("-", "--", "-.", ":"),
    *((0, (6, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 3))),
)
"""Dashes of lines, in the order of their colours: a line that covers another leaves parts of it
visible.
"""
FAR = 1000.0
"""The largest value on an axis, as a multiple of the median."""
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8ec",
    "grid.linewidth": 0.8,
    "axes.edgecolor": "#9aa1ad",
    "xtick.color": "#4c566a",
    "ytick.color": "#4c566a",
    "axes.labelcolor": "#2e3440",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "varreg",
    "text.usetex": False,
    "text.parse_math": False,  # labels come from files, and a $ in them must not start mathematics
}
UNITS = {"step": "steps", "seconds": "seconds of training"}
TITLES = {**WORDS, "train_accuracy": "training accuracy", "valid_accuracy": "validation accuracy"}


def new_figure(panels: int, height: float = 3.4, width: float = 4.9) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels side by side."""
    figure = Figure(figsize=(width * panels, height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    return figure, list(axes)


def look(place: int) -> dict[str, Any]:
    """Return colour, dashes and width of a line. Lines of different places can be distinguished
    where they coincide: an earlier one is wider, and a later one has gaps.
    """
    return {
        "color": COLORS[place % len(COLORS)],
        "linestyle": DASHES[place % len(DASHES)],
        "linewidth": max(1.4, 2.8 - 0.4 * place),
    }


def save(figure: Figure, file: Any, **options: Any) -> None:
    """Write a figure in our style. Its axes say whether they are logarithmic or linear."""
    with mpl.rc_context(STYLE):
        say_scales(figure)
        figure.savefig(file, **options)


def wrapped(label: str) -> str:
    r"""Break a long name into lines, after commas and spaces.

    >>> wrapped("VRSGD:per=model,scale_free=False, s = 2")
    'VRSGD:per=model,scale_free=False,\ns = 2'
    """
    lines, words = [""], re.findall(r"[^, ]+,? ?|, ?| ", label)
    for word in words:
        if len((lines[-1] + word).rstrip()) > 34 and lines[-1]:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def legend(figure: Figure, axes: Axes) -> None:
    """Add a legend below the panels, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        labels = [wrapped(label) for label in labels]
        longest = max(len(line) for label in labels for line in label.splitlines())
        columns = int(figure.get_figwidth() // (0.7 + 0.085 * longest))
        figure.legend(
            handles, labels, loc="outside lower center", ncols=max(1, min(len(labels), columns))
        )


def scale(axes: Axes, values: Sequence[float]) -> float:
    """Make the axis logarithmic if that shows more; return its upper end.

    It ends at FAR times the median, so that one run that diverged does not compress all others.
    """
    seen = [v for v in values if math.isfinite(v) and v > 0]
    if seen and max(seen) > 20 * min(seen):
        axes.set_yscale("log")
    end = FAR * statistics.median(seen) if seen else math.inf
    if not seen or max(seen) <= end:
        return math.inf
    axes.set_ylim(top=end)
    return end


def say_scales(figure: Figure) -> None:
    """Write at each axis of numbers whether it is logarithmic or linear, once, and give
    logarithmic axes readable numbers.
    """
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            kind = axis.get_scale()
            has_names = kind == "linear" and isinstance(axis.get_major_locator(), FixedLocator)
            if has_names or axes.images or not axes.axison:
                continue
            if kind == "log" and isinstance(axis.get_major_formatter(), LogFormatterMathtext):
                axis.set_major_locator(_log_ticks(*sorted(axis.get_view_interval())))
                axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
                axis.set_minor_formatter(NullFormatter())
            said = axis.get_label_text()
            if not said.endswith(f"({kind})"):
                axis.set_label_text(f"{said}  ({kind})".strip())


def _log_ticks(low: float, high: float) -> Locator:
    """Return where a logarithmic axis has numbers: few, but some."""
    if high < 2 * low:
        return MaxNLocator(5)
    near: tuple[float, ...] = (1.0, 2.0, 5.0) if high > 10 * low else tuple(range(1, 10))
    return LogLocator(subs=near if high < 100 * low else (1.0,))


def tick(value: float) -> str:
    """Return the number at a tick of a logarithmic axis.

    >>> tick(0.02), tick(1000), tick(1e-7), tick(2e12)
    ('0.02', '1,000', '10⁻⁷', '2·10¹²')
    """
    if value <= 0 or 1e-4 <= value < 1e5:
        return f"{value:,.10g}"
    power = math.floor(math.log10(value) + 1e-9)
    factor = f"{value / 10**power:.3g}"
    raised = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{'' if factor == '1' else factor + '·'}10{raised}"


MARKS = {"×": ("x", "broke"), "▲": ("^", "far above")}
"""Marks of what an axis does not show: what matplotlib calls them, and what they mean."""


def at_top(axes: Axes, x: float, mark: str, color: str) -> None:
    """Draw a mark at the upper end of an axis, for a value that is not on it."""
    axes.plot(x, 0.98, MARKS[mark][0], color=color, ms=7, mew=2, clip_on=False,
              transform=axes.get_xaxis_transform())  # fmt: skip


def said_of(beyond: Mapping[str, int]) -> str:
    """Return how many values an axis does not show, for its label.

    >>> said_of({"×": 0, "▲": 2}), said_of({"×": 0})
    (', ▲ far above: 2', '')
    """
    return "".join(f", {mark} {MARKS[mark][1]}: {n}" for mark, n in beyond.items() if n)


def lines_above(rows: Iterable[Sequence[float]], end: float) -> str:
    """Return how many lines go above the end of an axis, for its label."""
    finite = ([v for v in row if math.isfinite(v)] for row in rows)
    return said_of({"▲": sum(max(row, default=0.0) > end for row in finite)})


def within(sizes: Sequence[float]) -> float:
    """Return the end of a linear axis that shows these sizes, without those that are more than FAR
    times the (lower) median; infinity if all can be shown.

    >>> within([0.02, 0.5, 1e22]), within([0.02, 0.5])
    (0.5, inf)
    """
    seen = [v for v in sizes if math.isfinite(v) and v > 0]
    end = FAR * statistics.median_low(seen) if seen else math.inf
    return math.inf if not seen or max(seen) <= end else max(v for v in seen if v <= end)


def padded(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Return rows of equal length, filled with nan for runs that ended before the others."""
    length = max(map(len, rows))
    return np.array([[*row, *[math.nan] * (length - len(row))] for row in rows], dtype=float)


def band(
    axes: Axes,
    x: np.ndarray,
    rows: Sequence[Sequence[float]],
    place: int,
    label: str,
    complete: bool = False,
) -> list[float]:
    """Draw the mean over seeds and their range; return the values drawn.

    Lines of different `place` have different colours, dashes and widths, so that lines that
    coincide can be distinguished.

    With `complete`, draw only as far as all seeds have values, and a cross where a seed ended
    early.
    """
    shown = look(place)
    color = shown["color"]
    y = padded(rows)
    y[~np.isfinite(y)] = math.nan
    seen = ~np.isnan(y).any(axis=0) if complete else ~np.isnan(y).all(axis=0)
    if not seen.any():
        axes.plot([], [], label=label, **shown)
        return []
    ends = np.flatnonzero(seen)[-1]
    if complete and not np.isnan(y[:, ends + 1 :]).all():
        axes.plot(x[ends], y[:, ends].mean(), "x", color=color, ms=9, mew=2.5)
    x, y = x[: y.shape[1]][seen], y[:, seen]
    axes.plot(x, np.nanmean(y, axis=0), label=label, **shown)
    if len(rows) > 1:
        axes.fill_between(
            x, np.nanmin(y, axis=0), np.nanmax(y, axis=0), color=color, alpha=0.15, linewidth=0
        )
    return [float(v) for v in y.ravel() if not math.isnan(v)]
