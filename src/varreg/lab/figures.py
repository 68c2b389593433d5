"""Pictures of saved results. Every function returns a figure, and touches nothing else."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from varreg.lab.verdict import WORDS

Runs = list[dict[str, Any]]
COLORS = ("#3b4252", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#8c564b")
"""Told apart by everyone; the first is the base's."""
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
    "text.parse_math": False,  # labels come from files, and a $ in them is a $
}
UNITS = {"step": "steps", "seconds": "seconds of training"}
TITLES = {**WORDS, "train_accuracy": "training accuracy", "valid_accuracy": "validation accuracy"}


def _figure(panels: int, height: float = 3.4, width: float = 4.9) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * panels, height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    return figure, list(axes)


def _wrapped(label: str) -> str:
    r"""A long name in several lines, broken after commas and spaces.

    >>> _wrapped("VRSGD:per=model,scale_free=False, s = 2")
    'VRSGD:per=model,scale_free=False,\ns = 2'
    """
    lines, words = [""], re.findall(r"[^, ]+,? ?|, ?| ", label)
    for word in words:
        if len((lines[-1] + word).rstrip()) > 34 and lines[-1]:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def _legend(figure: Figure, axes: Axes) -> None:
    """Below, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        labels = [_wrapped(label) for label in labels]
        longest = max(len(line) for label in labels for line in label.splitlines())
        columns = int(figure.get_figwidth() // (0.7 + 0.085 * longest))
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(len(labels), columns)))


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic where that shows more."""
    seen = [v for v in values if math.isfinite(v) and v > 0]
    if seen and max(seen) > 20 * min(seen):
        axes.set_yscale("log")


def _padded(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Runs that ended before the others, with nan for what they lack."""
    length = max(map(len, rows))
    return np.array([[*row, *[math.nan] * (length - len(row))] for row in rows], dtype=float)


def _band(
    axes: Axes, x: np.ndarray, rows: Sequence[Sequence[float]], color: str, label: str, dashed: bool = False, whole: bool = False
) -> list[float]:
    """The mean over seeds, and their range; with `whole`, no further than all seeds go, and a cross where one was lost."""
    y = _padded(rows)
    y[~np.isfinite(y)] = math.nan
    seen = ~np.isnan(y).any(axis=0) if whole else ~np.isnan(y).all(axis=0)
    if not seen.any():
        axes.plot([], [], color=color, label=label)
        return []
    ends = np.flatnonzero(seen)[-1]
    if whole and not np.isnan(y[:, ends + 1 :]).all():
        axes.plot(x[ends], y[:, ends].mean(), "x", color=color, ms=9, mew=2.5)
    x, y = x[: y.shape[1]][seen], y[:, seen]
    axes.plot(x, np.nanmean(y, axis=0), color=color, label=label, linestyle="--" if dashed else "-")
    if len(rows) > 1:
        axes.fill_between(x, np.nanmin(y, axis=0), np.nanmax(y, axis=0), color=color, alpha=0.15, linewidth=0)
    return [float(v) for v in y.ravel() if not math.isnan(v)]


def _longest(runs: Runs, table: str, key: str) -> np.ndarray:
    rows = [run[table][key] for run in runs]
    length = max(map(len, rows))
    return np.asarray(np.mean([row for row in rows if len(row) == length], axis=0))


def curves(arms: dict[str, Runs], metrics: Sequence[str], unit: str = "step", target: float = math.nan) -> Figure:
    """Evaluations over steps or seconds, one panel for each metric; bands are the range over seeds."""
    with mpl.rc_context(STYLE):
        figure, panels = _figure(len(metrics))
        for axes, metric in zip(panels, metrics, strict=True):
            values: list[float] = []
            for i, (name, runs) in enumerate(arms.items()):
                x = _longest(runs, "evaluations", unit)
                dashed = i > 0 and name.startswith("SGD, lr")
                values += _band(
                    axes, x, [run["evaluations"][metric] for run in runs], COLORS[i % len(COLORS)], name, dashed, whole=True
                )
            if metric == "valid_loss" and math.isfinite(target):
                axes.axhline(target, color="#9aa1ad", linestyle=":", linewidth=1.2)
                axes.annotate(
                    "target", (0.01, target), xycoords=("axes fraction", "data"), ha="left", va="bottom", color="#4c566a", size=9
                )
            if metric.endswith("loss"):
                _scale(axes, values)
            axes.set_title(TITLES[metric])
            axes.set_xlabel(UNITS[unit])
            axes.margins(x=0.01)
        _legend(figure, panels[0])
        return figure


STATISTICS = {"lambda": "effective λ", "rho": "ρ = Σv²/|ḡ|²", "noise_scale": "gradient noise scale"}


def over_time(arms: dict[str, Runs]) -> Figure:
    """λ, ρ and the noise scale of the whole model."""
    with mpl.rc_context(STYLE):
        figure, panels = _figure(3, 3.2, 3.7)
        for axes, (key, title) in zip(panels, STATISTICS.items(), strict=True):
            values: list[float] = []
            for i, (name, runs) in enumerate(arms.items()):
                rows = [run["statistics"].get(key, [math.nan] * len(run["statistics"]["step"])) for run in runs]
                x = _longest(runs, "statistics", "step")
                values += _band(axes, x, rows, COLORS[(i + 1) % len(COLORS)], name)
            if key != "lambda":
                _scale(axes, values)
            axes.set_title(title)
            axes.set_xlabel("steps")
        _legend(figure, panels[0])
        return figure


def per_layer(runs: Runs) -> Figure:
    """The same, layer by layer, for one arm: medians over seeds, smoothed."""
    with mpl.rc_context(STYLE):
        figure, panels = _figure(3, 3.6, 3.7)
        layers: list[str] = []
        for axes, (key, title) in zip(panels, STATISTICS.items(), strict=True):
            found = sorted({k for run in runs for k in run["statistics"] if k.startswith(f"{key}/") and k != "lambda/mean"})
            found = [k for k in found if not k.endswith(".bias")] or found
            shown = (
                found
                if len(found) <= len(COLORS)
                else [found[i] for i in np.linspace(0, len(found) - 1, len(COLORS)).astype(int)]
            )
            values: list[float] = []
            for column in shown:
                layer = column.partition("/")[2].removesuffix(".weight")
                layer = f"\u200b{layer}" if layer.startswith("_") else layer  # such a label would not be shown
                layers += [layer] if layer not in layers else []
                y = _smooth(_padded([run["statistics"][column] for run in runs if column in run["statistics"]]))
                x = _longest(runs, "statistics", "step")[: len(y)]
                axes.plot(x, y, color=COLORS[layers.index(layer) % len(COLORS)], label=layer, linewidth=1.4)
                values += [float(v) for v in y if math.isfinite(v)]
            if key != "lambda":
                _scale(axes, values)
            axes.set_title(title)
            axes.set_xlabel("steps")
        _legend(figure, max(panels, key=lambda a: len(a.get_legend_handles_labels()[0])))
        return figure


def _smooth(rows: np.ndarray, points: int = 60) -> np.ndarray:
    """The median over seeds and over neighbours in time: infinite values, where a signal drowns in noise, do not tear it."""
    n = rows.shape[1]
    half = max(0, n // points // 2)
    with np.errstate(invalid="ignore"):
        return np.array(
            [
                np.nanmedian(part) if not np.isnan(part := rows[:, max(0, i - half) : i + half + 1]).all() else math.nan
                for i in range(n)
            ]
        )


def sensitivity(trials: list[dict[str, Any]]) -> Figure:
    """The validation loss at the end over the learning rate; a cross at the top is a trial that diverged."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(1, 3.8, 7.2)
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in trials:
            several = len({other["s"] for other in trials if other["optimizer"] == row["optimizer"]}) > 1
            lines.setdefault(row["optimizer"] + (f", s = {row['s']:g}" if several else ""), []).append(row)
        finite = [row["valid_loss"] for row in trials if math.isfinite(row["valid_loss"])]
        optimizers = list(dict.fromkeys(row["optimizer"] for row in trials))
        for name, rows in lines.items():
            color = COLORS[optimizers.index(rows[0]["optimizer"]) % len(COLORS)]
            style = ("-", "--", ":", "-.")[[n for n in lines if lines[n][0]["optimizer"] == rows[0]["optimizer"]].index(name) % 4]
            good = [row for row in rows if math.isfinite(row["valid_loss"])]
            axes.plot([r["lr"] for r in good], [r["valid_loss"] for r in good], style, marker="o", ms=4, color=color, label=name)
            for row in rows:
                if not math.isfinite(row["valid_loss"]) and finite:
                    axes.plot(row["lr"], 0.98, "x", color=color, ms=7, mew=2, transform=axes.get_xaxis_transform(), clip_on=False)
                elif row["best"]:
                    axes.plot(row["lr"], row["valid_loss"], "*", color=color, ms=14, mec="white", mew=0.8, zorder=5)
        axes.set_xscale("log")
        _scale(axes, finite)
        axes.set_title("validation loss at the end, over the learning rate")
        axes.set_xlabel("learning rate   (★ chosen, × diverged)")
        _legend(figure, axes)
        return figure


def differences(contrasts: list[dict[str, Any]], metric: str = "test_loss") -> Figure:
    """Paired differences and their intervals: left of zero, the first is better."""
    with mpl.rc_context(STYLE):
        rows = [c for c in contrasts if metric in c["differences"] and math.isfinite(c["differences"][metric]["value"])]
        figure, (axes,) = _figure(1, 1.0 + 0.5 * max(1, len(rows)), 8.4)
        for i, c in enumerate(reversed(rows)):
            d = c["differences"][metric]
            sure = d["high"] < 0 or d["low"] > 0
            color = COLORS[3] if d["high"] < 0 else COLORS[2] if d["low"] > 0 else "#8a93a3"
            if not math.isnan(d["low"]):
                axes.plot([d["low"], d["high"]], [i, i], color=color, linewidth=3, solid_capstyle="round")
            axes.plot(d["value"], i, "o", color=color, ms=7, mfc=color if sure else "white", mew=2)
        axes.axvline(0, color="#2e3440", linewidth=1)
        labels = [f"{c['arm']} − {c['against'].replace(c['arm'] + ', ', 'with ')}" for c in reversed(rows)]
        axes.set_yticks(range(len(rows)), [_wrapped(label) for label in labels], fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.set_ylim(-0.6, max(1, len(rows)) - 0.4)
        axes.grid(axis="y", visible=False)
        axes.set_title(f"difference in {TITLES[metric]}" if len(rows) else "no difference can be computed")
        return figure


def start_terms(points: dict[str, list[float]]) -> Figure:
    """What the start costs in each version of Lemma 1, over T."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(1, 3.6, 7.0)
        for color, (name, values) in zip(COLORS, ((k, v) for k, v in points.items() if k != "T"), strict=False):
            axes.loglog(points["T"], values, marker="o", ms=4, color=color, label=name)
        axes.set_title("what the start costs")
        axes.set_xlabel("T")
        _legend(figure, axes)
        return figure


def rates(points: dict[str, list[float]]) -> Figure:
    """How the distance and its variance fall."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(1, 3.6, 7.0)
        t = np.arange(1, len(next(iter(points.values()))) + 1)
        for color, (name, values) in zip(COLORS, points.items(), strict=False):
            axes.loglog(t[1:], values[1:], color=color, label=name)
            for power in (1, 2, 3):
                if abs(math.log(values[-1] / values[49]) / math.log(t[-1] / 50) + power) < 0.3:
                    axes.loglog(t[9:], values[-1] * (t[9:] / t[-1]) ** -power, ":", color=color, lw=1, label=f"t^−{power}")
        axes.set_title("distance from the minimum, R = |x − x*|²")
        axes.set_xlabel("t")
        _legend(figure, axes)
        return figure


def trade_off(points: dict[str, Any]) -> Figure:
    """Both terms and their sum, for several α."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(1, 3.8, 7.0)
        for color, (alpha, (times, start, noise)) in zip(COLORS, points.items(), strict=False):
            axes.loglog(times, start, "--", color=color, lw=1)
            axes.loglog(times, noise, ":", color=color, lw=1.4)
            axes.loglog(times, np.add(start, noise), color=color, label=f"α = {alpha}")
        axes.set_title("E[S_T]")
        axes.set_xlabel("T")
        _legend(figure, axes)
        return figure


def forms(points: dict[str, list[float]], errors: list[list[float]]) -> Figure:
    """λ of the three forms; and how far Theorem 3 is from its own constraint."""
    with mpl.rc_context(STYLE):
        figure, (left, right) = _figure(2, 3.6)
        for color, (name, values) in zip(COLORS, ((k, v) for k, v in points.items() if k != "r"), strict=False):
            left.semilogx(points["r"], values, color=color, label=name)
        left.set_ylim(-1.6, 4)
        left.axhline(0, color="#2e3440", linewidth=0.8)
        left.set_title("λ")
        left.set_xlabel("σ²/σ̄²")
        left.legend()
        spread, mean, excess = zip(*errors, strict=True)
        right.loglog(spread, mean, marker="o", ms=4, color=COLORS[0], label="mean λ − 1")
        right.loglog(spread, excess, marker="o", ms=4, color=COLORS[1], label="Q over the optimum's − 1")
        right.set_ylim(bottom=1e-9)
        right.legend()
        right.set_title("Theorem 3's error")
        right.set_xlabel("spread of σ")
        return figure


def share_and_mean(share: float, mean_lambda: float) -> str:
    """What is caught, and the mean λ beside it.

    >>> share_and_mean(-0.001, 2.95), share_and_mean(-0.81, 1.16)
    ('0.00 (2.95)', '−0.81 (1.16)')
    """
    return f"{round(share, 2) + 0.0:.2f} ({mean_lambda:.2f})".replace("-", "−")


def hindsight(rows: list[dict[str, Any]]) -> Figure:
    """Shares caught, as colours and numbers, with mean λ beside each."""
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        arms = list(rows[0]["arms"])
        arms = [a for a in arms if any(not math.isnan(row["arms"][a]["share"]) for row in rows)]
        figure = Figure(figsize=(2.2 + 0.98 * len(rows), 1.7 + 0.3 * len(arms)), layout="constrained")
        axes = figure.subplots()
        shares = np.array([[row["arms"][a]["share"] for row in rows] for a in arms])
        axes.imshow(shares, cmap="RdYlGn", vmin=-1, vmax=1, aspect="auto", alpha=0.75)
        for i, a in enumerate(arms):
            for j, row in enumerate(rows):
                share, mean = row["arms"][a]["share"], row["arms"][a]["mean_lambda"]
                if not math.isnan(share):
                    axes.text(j, i, share_and_mean(share, mean), ha="center", va="center", size=8)
        titles = [f"{_wrapped_at(row['series'], 13)}\nspread {row['spread']:.2f}\ngain {row['gain']:.0%}" for row in rows]
        axes.set_xticks(range(len(rows)), titles, size=8)
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(arms)), arms, size=9)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        return figure


def _wrapped_at(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, break_long_words=False))


def series(points: dict[str, list[float]]) -> Figure:
    """σ over time, with its trend."""
    with mpl.rc_context(STYLE):
        figure, panels = _figure(len(points))
        for axes, (name, values) in zip(panels, points.items(), strict=True):
            y = np.sqrt(values)
            trend = np.exp([np.log(y[max(0, i - 25) : i + 26]).mean() for i in range(len(y))])
            axes.semilogy(y, color=COLORS[6], lw=0.6, label="√Σv²")
            axes.semilogy(trend, color=COLORS[1], label="trend over 51 records")
            axes.set_title(name)
            axes.set_xlabel("records")
        _legend(figure, panels[0])
        return figure
