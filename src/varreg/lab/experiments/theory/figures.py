"""The figures of `varreg theory`."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from varreg.lab.report.style import (
    COLORS,
    STYLE,
    legend,
    look,
    new_figure,
)


def start_terms(points: dict[str, list[float]]) -> Figure:
    """Draw the term of the start in each version of Lemma 1, over T."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = new_figure(1, 3.6, 7.0)
        for i, name in enumerate(k for k in points if k != "T"):
            axes.loglog(points["T"], points[name], marker="o", ms=4, label=name, **look(i))
        axes.set_title("what the start costs")
        axes.set_xlabel("T")
        legend(figure, axes)
        return figure


def rates(points: dict[str, list[float]]) -> Figure:
    """Draw how the distance and its variance fall."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = new_figure(1, 3.6, 7.0)
        t = np.arange(1, len(next(iter(points.values()))) + 1)
        for i, (name, values) in enumerate(points.items()):
            axes.loglog(t[1:], values[1:], label=name, **look(i))
            for power in (1, 2, 3):
                if abs(math.log(values[-1] / values[49]) / math.log(t[-1] / 50) + power) < 0.3:
                    axes.loglog(
                        t[9:],
                        values[-1] * (t[9:] / t[-1]) ** -power,
                        ":",
                        color=look(i)["color"],
                        lw=1,
                        label=f"t^−{power}",
                    )
        axes.set_title("distance from the minimum, R = |x − x*|²")
        axes.set_xlabel("t")
        legend(figure, axes)
        return figure


def trade_off(points: dict[str, Any]) -> Figure:
    """Draw both terms and their sum, for several α."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = new_figure(1, 3.8, 7.0)
        for i, (alpha, (times, start, noise)) in enumerate(points.items()):
            color = COLORS[i % len(COLORS)]
            axes.loglog(times, start, "--", color=color, lw=1)
            axes.loglog(times, noise, ":", color=color, lw=1.4)
            # Dashes say which term it is, so markers tell the sums apart.
            every = (i * len(times) // 40, max(1, len(times) // 10))
            axes.loglog(times, np.add(start, noise), color=color, label=f"α = {alpha}",
                        marker="os^Dvx*+"[i % 8], ms=5, markevery=every)  # fmt: skip
        axes.set_title("E[S_T]")
        axes.set_xlabel("T")
        legend(figure, axes)
        return figure


def forms(points: dict[str, list[float]], errors: list[list[float]]) -> Figure:
    """Draw λ of the three forms, and how far Theorem 3 is from its constraint."""
    with mpl.rc_context(STYLE):
        figure, (left, right) = new_figure(2, 3.6)
        for i, name in enumerate(k for k in points if k != "r"):
            left.semilogx(points["r"], points[name], label=name, **look(i))
        left.set_ylim(-1.6, 4)
        left.axhline(0, color="#2e3440", linewidth=0.8)
        left.set_title("λ")
        left.set_xlabel("σ²/σ̄²")
        left.legend()
        spread, mean, excess = zip(*errors, strict=True)
        for i, (name, values) in enumerate(
            {"mean λ − 1": mean, "Q over the optimum's − 1": excess}.items()
        ):
            right.loglog(spread, values, marker="o", ms=4, label=name, **look(i))
        right.set_ylim(bottom=1e-9)
        right.legend()
        right.set_title("Theorem 3's error")
        right.set_xlabel("spread of σ")
        return figure


def share_and_mean(share: float, mean_lambda: float) -> str:
    """Return the caught share, with the mean λ in brackets.

    >>> share_and_mean(-0.001, 2.95), share_and_mean(-0.81, 1.16)
    ('0.00 (2.95)', '−0.81 (1.16)')
    """
    return f"{round(share, 2) + 0.0:.2f} ({mean_lambda:.2f})".replace("-", "−")


def hindsight(rows: list[dict[str, Any]]) -> Figure:
    """Draw shares caught, as colours and numbers, with mean λ beside each."""
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        arms = list(rows[0]["arms"])
        arms = [a for a in arms if any(not math.isnan(row["arms"][a]["share"]) for row in rows)]
        figure = Figure(
            figsize=(2.2 + 0.98 * len(rows), 1.7 + 0.3 * len(arms)), layout="constrained"
        )
        axes = figure.subplots()
        shares = np.array([[row["arms"][a]["share"] for row in rows] for a in arms])
        axes.imshow(shares, cmap="RdYlGn", vmin=-1, vmax=1, aspect="auto", alpha=0.75)
        for i, a in enumerate(arms):
            for j, row in enumerate(rows):
                share, mean = row["arms"][a]["share"], row["arms"][a]["mean_lambda"]
                if not math.isnan(share):
                    axes.text(j, i, share_and_mean(share, mean), ha="center", va="center", size=8)
        titles = [
            f"{_wrapped_at(row['series'], 13)}\nspread {row['spread']:.2f}\ngain {row['gain']:.0%}"
            for row in rows
        ]
        axes.set_xticks(range(len(rows)), titles, size=8)
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(arms)), arms, size=9)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        return figure


def _wrapped_at(text: str, width: int) -> str:
    """Break text into lines of a limited number of characters."""
    return "\n".join(textwrap.wrap(text, width, break_long_words=False))


def series(points: dict[str, list[float]]) -> Figure:
    """Draw σ over time, with its trend."""
    with mpl.rc_context(STYLE):
        figure, panels = new_figure(len(points))
        for axes, (name, values) in zip(panels, points.items(), strict=True):
            y = np.sqrt(values)
            trend = np.exp([np.log(y[max(0, i - 25) : i + 26]).mean() for i in range(len(y))])
            axes.semilogy(y, color=COLORS[6], lw=0.6, label="√Σv²")
            axes.semilogy(trend, "--", color=COLORS[1], label="trend over 51 records")
            axes.set_title(name)
            axes.set_xlabel("records")
        legend(figure, panels[0])
        return figure
