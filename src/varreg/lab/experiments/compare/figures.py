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
    legend,
    new_figure,
    scale,
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
        for name, rows in lines.items():
            color = COLORS[optimizers.index(rows[0]["optimizer"]) % len(COLORS)]
            style = ("-", "--", ":", "-.")[
                [n for n in lines if lines[n][0]["optimizer"] == rows[0]["optimizer"]].index(name)
                % 4
            ]
            good = [row for row in rows if math.isfinite(row["valid_loss"])]
            axes.plot(
                [r["lr"] for r in good],
                [r["valid_loss"] for r in good],
                style,
                marker="o",
                ms=4,
                color=color,
                label=name,
            )
            for row in rows:
                if not (math.isfinite(row["valid_loss"]) and row["valid_loss"] <= end) and finite:
                    axes.plot(
                        row["lr"],
                        0.98,
                        "^" if math.isfinite(row["valid_loss"]) else "x",
                        color=color,
                        ms=7,
                        mew=2,
                        transform=axes.get_xaxis_transform(),
                        clip_on=False,
                    )
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
        axes.set_xlabel(
            "learning rate: ★ chosen, × diverged" + ", ▲ far above" * math.isfinite(end)
        )
        legend(figure, axes)
        return figure


def differences(contrasts: list[dict[str, Any]], metric: str = "test_loss") -> Figure:
    """Draw paired differences and their intervals: left of zero, the first is better."""
    with mpl.rc_context(STYLE):
        rows = [
            c
            for c in contrasts
            if metric in c["differences"] and math.isfinite(c["differences"][metric]["value"])
        ]
        figure, (axes,) = new_figure(1, 1.0 + 0.5 * max(1, len(rows)), 8.4)
        for i, c in enumerate(reversed(rows)):
            d = c["differences"][metric]
            sure = d["high"] < 0 or d["low"] > 0
            color = COLORS[3] if d["high"] < 0 else COLORS[2] if d["low"] > 0 else "#8a93a3"
            if not math.isnan(d["low"]):
                axes.plot(
                    [d["low"], d["high"]], [i, i], color=color, linewidth=3, solid_capstyle="round"
                )
            axes.plot(d["value"], i, "o", color=color, ms=7, mfc=color if sure else "white", mew=2)
        axes.axvline(0, color="#2e3440", linewidth=1)
        labels = [
            f"{c['arm']} − {c['against'].replace(c['arm'] + ', ', 'with ')}" for c in reversed(rows)
        ]
        axes.set_yticks(range(len(rows)), [wrapped(label) for label in labels], fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.set_ylim(-0.6, max(1, len(rows)) - 0.4)
        axes.grid(axis="y", visible=False)
        axes.set_title(
            f"difference in {TITLES[metric]}" if len(rows) else "no difference can be computed"
        )
        return figure
