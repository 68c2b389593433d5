"""Figures of several experiments. Each function returns a new figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from varreg.lab.report.style import (
    COLORS,
    STYLE,
    TITLES,
    UNITS,
    band,
    legend,
    lines_above,
    look,
    new_figure,
    padded,
    scale,
)

Runs = list[dict[str, Any]]
STATISTICS = {"lambda": "effective λ", "rho": "ρ = Σv²/|ḡ|²", "noise_scale": "gradient noise scale"}


def curves(
    arms: dict[str, Runs], metrics: Sequence[str], unit: str = "step", target: float = math.nan
) -> Figure:
    """Draw evaluations over steps or seconds, a panel per metric; bands are ranges over seeds."""
    with mpl.rc_context(STYLE):
        figure, panels = new_figure(len(metrics))
        for axes, metric in zip(panels, metrics, strict=True):
            values: list[float] = []
            for i, (name, runs) in enumerate(arms.items()):
                x = _longest(runs, "evaluations", unit)
                values += band(
                    axes,
                    x,
                    [run["evaluations"][metric] for run in runs],
                    i,
                    name,
                    complete=True,
                )
            if metric == "valid_loss" and math.isfinite(target):
                axes.axhline(target, color="#9aa1ad", linestyle=":", linewidth=1.2)
                axes.annotate(
                    "target",
                    (0.01, target),
                    xycoords=("axes fraction", "data"),
                    ha="left",
                    va="bottom",
                    color="#4c566a",
                    size=9,
                )
            end = scale(axes, values) if metric.endswith("loss") else math.inf
            rows = [run["evaluations"][metric] for runs in arms.values() for run in runs]
            axes.set_title(TITLES[metric])
            axes.set_xlabel(UNITS[unit] + lines_above(rows, end))
            axes.margins(x=0.01)
        legend(figure, panels[0])
        return figure


def over_time(arms: dict[str, Runs]) -> Figure:
    """Draw λ, ρ and the noise scale of the model."""
    with mpl.rc_context(STYLE):
        figure, panels = new_figure(3, 3.2, 3.7)
        for axes, (key, title) in zip(panels, STATISTICS.items(), strict=True):
            values: list[float] = []
            drawn: list[list[float]] = []
            for i, (name, runs) in enumerate(arms.items()):
                rows = [
                    run["statistics"].get(key, [math.nan] * len(run["statistics"]["step"]))
                    for run in runs
                ]
                x = _longest(runs, "statistics", "step")
                values += band(axes, x, rows, i + 1, name)
                drawn += rows
            end = scale(axes, values) if key != "lambda" else math.inf
            axes.set_title(title)
            axes.set_xlabel("steps" + lines_above(drawn, end))
        legend(figure, panels[0])
        return figure


def per_layer(runs: Runs) -> Figure:
    """Draw the same, layer by layer, for one arm: medians over seeds, smoothed."""
    with mpl.rc_context(STYLE):
        figure, panels = new_figure(3, 3.6, 3.7)
        layers: list[str] = []
        for axes, (key, title) in zip(panels, STATISTICS.items(), strict=True):
            columns = sorted(
                {
                    k
                    for run in runs
                    for k in run["statistics"]
                    if k.startswith(f"{key}/") and k != "lambda/mean"
                }
            )
            columns = [k for k in columns if not k.endswith(".bias")] or columns
            shown = (
                columns
                if len(columns) <= len(COLORS)
                else [columns[i] for i in np.linspace(0, len(columns) - 1, len(COLORS)).astype(int)]
            )
            drawn: list[list[float]] = []
            for column in shown:
                layer = column.partition("/")[2].removesuffix(".weight")
                # matplotlib does not show labels that start with an underscore
                layer = f"\u200b{layer}" if layer.startswith("_") else layer
                layers += [layer] if layer not in layers else []
                y = _smooth(
                    padded(
                        [run["statistics"][column] for run in runs if column in run["statistics"]]
                    )
                )
                x = _longest(runs, "statistics", "step")[: len(y)]
                shown_as = {**look(layers.index(layer)), "linewidth": 1.4}
                axes.plot(x, y, label=layer, **shown_as)
                drawn.append(y.tolist())
            end = scale(axes, [v for row in drawn for v in row]) if key != "lambda" else math.inf
            axes.set_title(title)
            axes.set_xlabel("steps" + lines_above(drawn, end))
        legend(figure, max(panels, key=lambda a: len(a.get_legend_handles_labels()[0])))
        return figure


def _longest(runs: Runs, table: str, key: str) -> np.ndarray:
    """Return the mean of a column over the runs that went furthest."""
    rows = [run[table][key] for run in runs]
    length = max(map(len, rows))
    return np.asarray(np.mean([row for row in rows if len(row) == length], axis=0))


def _smooth(rows: np.ndarray, points: int = 60) -> np.ndarray:
    """Return the median over seeds and over neighbouring steps. A median stays finite if a few
    values are infinite.
    """
    n = rows.shape[1]
    half = max(0, n // points // 2)
    with np.errstate(invalid="ignore"):
        return np.array(
            [
                np.nanmedian(part)
                if not np.isnan(part := rows[:, max(0, i - half) : i + half + 1]).all()
                else math.nan
                for i in range(n)
            ]
        )
