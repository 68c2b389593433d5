"""The figures of a comparison alone."""

from __future__ import annotations

import math
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from varreg.lab.report.style import (
    COLORS,
    STYLE,
    TITLES,
    at_top,
    legend,
    look,
    new_figure,
    said_of,
    scale,
    within,
    wrapped,
)


def sensitivity(trials: list[dict[str, Any]]) -> Figure:
    """Draw the validation loss at the end over the learning rate; a cross at the top is a trial
    that diverged, a triangle one that ended far above all others.
    """
    with mpl.rc_context(STYLE):
        figure, (axes,) = new_figure(1, 3.8, 7.2)
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(trials, key=lambda row: float(row["lr"])):
            same = [other for other in trials if other["optimizer"] == row["optimizer"]]
            name = row["optimizer"]
            if len({other["schedule"] for other in same}) > 1:
                name += f", {row['schedule']}"
            if len({other["s"] for other in same}) > 1:
                name += f", s = {row['s']:g}"
            lines.setdefault(name, []).append(row)
        finite = [row["valid_loss"] for row in trials if math.isfinite(row["valid_loss"])]
        optimizers = list(dict.fromkeys(row["optimizer"] for row in trials))
        end = scale(axes, finite)
        beyond = {"×": 0, "▲": 0}
        for i, (name, rows) in enumerate(lines.items()):
            color = COLORS[optimizers.index(rows[0]["optimizer"]) % len(COLORS)]
            good = [row for row in rows if math.isfinite(row["valid_loss"])]
            axes.plot(
                [r["lr"] for r in good],
                [r["valid_loss"] for r in good],
                marker="o",
                ms=4,
                label=name,
                **{**look(i), "color": color},
            )
            for row in rows:
                mark = "▲" if math.isfinite(row["valid_loss"]) else "×"
                if mark == "×" or row["valid_loss"] > end:
                    beyond[mark] += 1
                    at_top(axes, row["lr"], mark, color)
                elif row["best"]:
                    axes.plot(
                        row["lr"],
                        row["valid_loss"],
                        "*",
                        color=color,
                        ms=14,
                        mec="white",
                        mew=0.8,
                        zorder=5,
                    )
        axes.set_xscale("log")
        axes.set_title("validation loss at the end, over the learning rate")
        diverged = f": {beyond['×']}" if beyond["×"] else ""
        above = said_of({"▲": beyond["▲"]})
        axes.set_xlabel(f"learning rate: ★ chosen, × diverged{diverged}{above}")
        legend(figure, axes)
        return figure


def differences(contrasts: list[dict[str, Any]], metric: str = "test_loss") -> Figure:
    """Draw paired differences and their intervals: left of zero, the first is better. A triangle at
    an end of the axis is a difference that is far beyond all others.
    """
    with mpl.rc_context(STYLE):
        rows = [
            c
            for c in reversed(contrasts)
            if metric in c["differences"] and math.isfinite(c["differences"][metric]["value"])
        ]
        figure, (axes,) = new_figure(1, 1.0 + 0.5 * max(1, len(rows)), 8.4)
        reaches = [_reach(c["differences"][metric]) for c in rows]
        end = within([max(map(abs, reach)) for reach in reaches])
        beyond = 0
        for i, (c, reach) in enumerate(zip(rows, reaches, strict=True)):
            d = c["differences"][metric]
            sure = d["high"] < 0 or d["low"] > 0
            color = COLORS[3] if d["high"] < 0 else COLORS[2] if d["low"] > 0 else "#8a93a3"
            point: dict[str, Any] = {
                "color": color,
                "ms": 7,
                "mfc": color if sure else "white",
                "mew": 2,
            }
            beyond += max(map(abs, reach)) > end
            if math.isfinite(d["high"] - d["low"]):
                axes.plot(reach[:2], [i, i], color=color, linewidth=3, solid_capstyle="round")
            if abs(d["value"]) <= end:
                axes.plot(d["value"], i, "o", **point)
            else:
                side = d["value"] > 0
                axes.plot(side, i, "<>"[side], transform=axes.get_yaxis_transform(), clip_on=False,
                          **point)  # fmt: skip
        axes.axvline(0, color="#2e3440", linewidth=1)
        if math.isfinite(end):
            shown = [0.0, *(v for reach in reaches for v in reach if abs(v) <= end)]
            room = 0.05 * (max(shown) - min(shown))
            axes.set_xlim(min(shown) - room, max(shown) + room)
        labels = [f"{c['arm']} − {c['against'].replace(c['arm'] + ', ', 'with ')}" for c in rows]
        axes.set_yticks(range(len(rows)), [wrapped(label) for label in labels], fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.set_ylim(-0.6, max(1, len(rows)) - 0.4)
        axes.grid(axis="y", visible=False)
        axes.set_title(
            f"difference in {TITLES[metric]}" if len(rows) else "no difference can be computed"
        )
        missing = len(contrasts) - len(rows)
        axes.set_xlabel(
            ", ".join(
                [f"far beyond this axis: {beyond}"] * (beyond > 0)
                + [f"without a difference, as runs diverged: {missing}"] * (missing > 0)
            )
        )
        return figure


def _reach(d: dict[str, float]) -> list[float]:
    """Return the ends of an interval as far as there are, and the value."""
    ends = [d["low"], d["high"]] if math.isfinite(d["high"] - d["low"]) else []
    return [*ends, d["value"]]
