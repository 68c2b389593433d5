"""What the report of each kind of experiment shows: sections of figures and tables."""

from __future__ import annotations

import hashlib
import io
import math
import re
import statistics as st
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from varreg.lab import compare, figures, reproduce, theory, verdict
from varreg.lab.verdict import number
from varreg.theory.checks import LAMBDA0

BANDS = "Lines are means over seeds, bands their range."
Arms = dict[str, list[dict[str, Any]]]
"""The runs of each arm, by its name."""


class Page:
    """What the template shows, collected piece by piece."""

    def __init__(self) -> None:
        self.sections: list[dict[str, Any]] = []
        self.figures: dict[str, tuple[str, bytes]] = {}
        """SVG and PNG, by name."""

    def section(self, title: str, text: str = "") -> None:
        self.sections.append({"title": title, "text": text, "figures": [], "tables": []})

    def figure(self, name: str, made: Figure, caption: str, tab: str = "") -> None:
        self.figures[name] = svg(made, name), png(made)
        width = round(made.get_figwidth() * 104)
        self.sections[-1]["figures"].append(
            {"svg": self.figures[name][0], "caption": caption, "tab": tab or name, "width": width}
        )

    def table(self, head: list[str], rows: list[tuple[str, list[str]]], title: str = "", prose: bool = False) -> None:
        """One with a title is folded away, below the figures; one of `prose` has sentences in its second and third column."""
        cells = [{"kind": kind, "cells": row} for kind, row in rows]
        self.sections[-1]["tables"].append({"head": head, "rows": cells, "title": title, "prose": prose})


def png(made: Figure) -> bytes:
    buffer = io.BytesIO()
    with mpl.rc_context(figures.STYLE):
        made.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def svg(made: Figure, name: str) -> str:
    """As a part of a page: no header, and names that no other figure has."""
    buffer = io.StringIO()
    with mpl.rc_context({**figures.STYLE, "svg.hashsalt": name}):
        made.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    mark = "f" + hashlib.sha256(name.encode()).hexdigest()[:6]
    text = re.sub(r'\bid="', f'id="{mark}-', text)
    text = re.sub(r'((?:xlink:)?href)="#', rf'\1="#{mark}-', text)
    return text.replace("url(#", f"url(#{mark}-")


def _statistics(page: Page, arms: Arms) -> None:
    """λ, ρ and noise, where there are any."""
    measured = {name: runs for name, runs in arms.items() if all(run["statistics"]["step"] for run in runs)}
    if not measured:
        return
    page.section(
        "What λ and the noise did",
        "Effective λ is its mean over coordinates, weighted by squared gradients: the factor by which the step was longer. "
        "ρ is the variance over the squared mean. The noise scale is the batch size at which noise and signal are equal.",
    )
    page.figure("over-time", figures.over_time(measured), f"Of the whole model, over steps. {BANDS}", "whole model")
    for i, (name, runs) in enumerate(measured.items()):
        if i < 7:
            page.figure(
                f"per-layer-{i + 1}",
                figures.per_layer(runs),
                f"{name}, layer by layer: medians over seeds, smoothed.",
                f"{name}, per layer",
            )


def _mean(values: list[float]) -> str:
    return number(st.fmean(values))


def _spread(values: list[float], factor: float = 1.0) -> str:
    scaled = [factor * v for v in values]
    return f"{_mean(scaled)} ({number(min(scaled))}–{number(max(scaled))})"


def compare_page(page: Page, made: compare.Comparison, about: str, found: dict[str, Any], arms: Arms) -> tuple[str, str]:
    """Fill the page; its title and what stands below."""
    base, *others = made.optimizers
    counts = {spec: len(made.grid(spec)) for spec in made.optimizers}
    each = (
        ", ".join(f"{spec} {n}" for spec, n in counts.items())
        if len(set(counts.values())) > 1
        else f"each optimizer {made.trials}"
    )
    budget = (
        f"Trials: {each}, × {made.tuning_seeds} tuning seeds; the best by validation loss was run with {made.seeds} fresh seeds, the same for all. "
        "The test split was read once, at the end."
    )
    main = {name: runs for name, runs in arms.items() if name in made.optimizers}
    if found["arms"]:
        _numbers(page, found)
    if main:
        _curves(page, found, main, arms)
    if found["trials"]:
        page.section("Learning-rate sensitivity", "What tuning saw, on the validation split with the tuning seeds.")
        page.figure("sensitivity", figures.sensitivity(found["trials"]), "A wide valley is easy to tune.")
        rows = [("best" if t["best"] else "", _trial(t)) for t in found["trials"]]
        page.table(["optimizer", "learning rate", "s", "validation loss", "diverged", "chosen"], rows, "All trials")
    _statistics(page, main)
    return f"{', '.join(others)} against {base} on {made.task}", f"{about}. {budget}"


def _numbers(page: Page, found: dict[str, Any]) -> None:
    page.section(
        "The numbers", "At the end: mean over seeds (range). To the target: medians over seeds, a miss counting as infinite."
    )
    accuracy = ["test accuracy, %"] if any("test_accuracy" in arm for arm in found["arms"]) else []
    head = ["optimizer", "learning rate", "test loss", *accuracy, "training loss", "steps to target", "seconds to target", "λ"]
    page.table(head, [(arm["role"], _row(arm, bool(accuracy))) for arm in found["arms"]])
    if found["contrasts"]:
        level = verdict.percent(found["level"])
        caption = f"{level} bootstrap intervals. Left of zero, the first of the two is better; a hollow point is no detectable difference."
        page.figure("differences", figures.differences(found["contrasts"]), caption, "against the base")
        if found["ablations"]:
            page.figure("ablations", figures.differences(found["ablations"]), caption, "against the ablations")


def _curves(page: Page, found: dict[str, Any], main: Arms, arms: Arms) -> None:
    page.section("Curves", "Measured after every epoch, on the training and validation splits: the test split is read only once.")
    losses = ["train_loss", "valid_loss"]
    page.figure("curves-steps", figures.curves(main, losses, "step", found["target"]), BANDS, "over steps")
    seconds = f"{BANDS} Seconds of training alone, on one thread."
    page.figure("curves-seconds", figures.curves(main, losses, "seconds", found["target"]), seconds, "over seconds")
    if any("test_accuracy" in arm for arm in found["arms"]):
        page.figure("accuracy-steps", figures.curves(main, ["train_accuracy", "valid_accuracy"]), BANDS, "accuracy")
    if len(arms) > len(main):
        page.figure("ablations-steps", figures.curves(arms, losses), f"With the ablations. {BANDS}", "ablations")


def _row(arm: dict[str, Any], has_accuracy: bool) -> list[str]:
    reached = sum(map(math.isfinite, arm["steps_to_target"]))
    missed = f" ({reached} of {len(arm['seeds'])} reached it)" if reached < len(arm["seeds"]) else ""
    accuracy = [_spread(arm["test_accuracy"], 100)] if has_accuracy else []
    s = f", s = {arm['options']['s']:g}" if "s" in arm["options"] and "s = " not in arm["name"] else ""
    times = [number(st.median(arm[key])) for key in ("steps_to_target", "seconds_to_target")]
    lam = number(arm["lambda"])
    return [
        arm["name"] + s,
        f"{arm['lr']:g}",
        _spread(arm["test_loss"]),
        *accuracy,
        _mean(arm["train_loss"]),
        times[0] + missed,
        times[1],
        lam,
    ]


def _trial(t: dict[str, Any]) -> list[str]:
    s = "" if t["s"] is None else f"{t['s']:g}"
    return [t["optimizer"], f"{t['lr']:g}", s, number(t["valid_loss"]), str(t["diverged"] or ""), "★" if t["best"] else ""]


def reproduce_page(page: Page, made: reproduce.Reproduction, found: dict[str, Any], arms: Arms) -> tuple[str, str]:
    """Fill the page; its title and what stands below."""
    fashion = made.name == "fashion-mnist"
    if fashion:
        data, model = "Fashion-MNIST", "a CNN of two conv-pool-activation blocks and two dense layers"
        word, shown = (
            "figure 1: training loss and accuracy",
            {"training": ("train_loss", "train_accuracy"), "test": ("test_loss", "test_accuracy")},
        )
    else:
        data, model = "CIFAR-10", "LeNet"
        word, shown = "figures 2 and 3", {"loss": ("train_loss", "test_loss"), "accuracy": ("train_accuracy", "test_accuracy")}
    if found["arms"]:
        text = f"After {made.epochs} epochs: mean over seeds (range). Training loss and accuracy are those of the same 10,000 samples."
        page.section("The numbers", text)
        head = ["", "learning rate", "λ", "training loss", "training accuracy, %", "test loss", "test accuracy, %"]
        page.table(head, [("", _arm(arm)) for arm in found["arms"]])
    if arms:
        page.section("The paper's figures", f"Its {word}, with the control that it lacks.")
        for tab, metrics in shown.items():
            page.figure(tab, figures.curves(arms, metrics), BANDS, tab)
    _statistics(page, arms)
    settings = f"images of unit norm, learning rate {reproduce.LR:g}, batch {reproduce.BATCH}, s = {reproduce.S:g}"
    about = f"{data}, {model}; {settings}; {made.epochs} epochs, {made.seeds} seeds."
    return f"The paper's experiment on {data}, and what explains it", about


def _arm(a: dict[str, Any]) -> list[str]:
    metrics = (_spread(a[m], 100 if "accuracy" in m else 1) for m in reproduce.METRICS)
    return [a["name"], f"{a['lr']:g}", f"{a['lambda']:.3f}", *metrics]


def theory_page(page: Page, found: dict[str, Any]) -> tuple[str, str]:
    """Fill the page; its title and what stands below."""
    page.section(
        "The claims",
        "Of each, the tightest or the worst case that was looked at. Slack: how many times the measured value the bound is; "
        "for an equation, how far off; for an exponent, its distance. ± is two standard errors.",
    )
    rows = [("" if c["holds"] else "broken", theory.cells(c)) for c in theory.all_checks(found)]
    page.table(theory.HEAD, rows, prose=True)
    points = found["Figures"]
    page.section("In pictures")
    page.figure("lemma-1", figures.start_terms(points["start"]), START, "Lemma 1")
    page.figure("rates", figures.rates(points["rates"]), RATES, "Theorem S0 and its corollary")
    page.figure("trade-off", figures.trade_off(points["trade_off"]), TRADE_OFF, "the trade-off")
    page.figure("forms", figures.forms(points["forms"], points["theorem_3"]), FORMS, "Theorem 3 and the bounded forms")
    page.section("What the best regularizer in hindsight would gain, and who catches it", HINDSIGHT)
    for tab, real in (("synthetic series", False), ("real training", True)):
        chosen = [h for h in found["Hindsight"] if real == (":" in h["series"])]
        name = f"hindsight-{'real' if real else 'synthetic'}"
        page.figure(name, figures.hindsight(chosen), CAUGHT, tab)
    page.figure(
        "series", figures.series(points["series"]), "The noise of plain SGD's gradient, of the whole model.", "σ in real training"
    )
    head = ["series", "spread of σ", "gain in hindsight", *found["Hindsight"][0]["arms"]]
    page.table(head, [("", _caught(h)) for h in found["Hindsight"]], "As a table: share caught (mean λ)")
    page.section("Does v² of a batch say how large the error of that batch is?", STILL)
    head = ["", "λ", "as v² has it", "in truth", "at equal progress"]
    page.table(head, [("", line) for row in found["Real batches"] for line in _told(row)])
    page.section(
        "The variance of an increment (S2.4)",
        "Predicted over observed, by the standard error of the mean gradient over the gradient.",
    )
    rows = found["Increments"]
    page.table(list(rows[0]), [("", [v if isinstance(v, str) else f"{v:.2f}" for v in row.values()]) for row in rows])
    return "What the theory says", "Every claim of the paper as a check that runs, on problems whose constants are known."


START = (
    "What the start costs in Lemma 1's bound, in units of LM²/2. For VR-SGD the mended version stays where it is, and promises no convergence; "
    "the weighted one falls."
)
RATES = (
    "SGD with γ = 1/(tl) on a quadratic. The variance of one step falls as t^−3; that of whole runs as t^−2, no faster than γ²."
)
TRADE_OFF = "E[S_T] for γ ∝ t^−α. Dashed: what the start costs; dotted: what noise costs. The larger rules, and α = ½ is best."
FORMS = (
    "Left: λ over the relative variance, s = 2. At σ² = σ̄² the bounded forms react 3.7 times less than the solution that they stand for. "
    "Right: how far mean λ of Theorem 3's solution is from 1, and its Q from the optimum's at a mean λ of 1."
)
HINDSIGHT = (
    f"Judged by Q = Σ λ(1+λ/λ₀)σ² at a mean λ of 1 and λ ≤ λ₀ = {LAMBDA0:.2f}, that of s = 2, so that a longer step is no gain. 1 is the "
    "optimum that knows the future, 0 a constant λ. Mean λ, before it is scaled to 1, stands in brackets. Real series are shown twice: as they "
    "are, where drift, above all the quiet beginning, makes the optimum's gain; and with the trend over 51 records divided out, which leaves what "
    "changes from batch to batch. Tensors and elements: medians, each with a λ of its own."
)
CAUGHT = "Share of the hindsight optimum's gain (mean λ). Spread: standard deviation of log σ. Gain: what the optimum saves of Q."
STILL = (
    "At the end of the recorded runs, with parameters held: σ² stays, and only the batch changes. One λ for the model. What it saves of Q at a "
    "mean λ of 1, as v² has it; the same in truth, with the error ε of the batch's mean gradient measured against that of all samples; and in "
    "truth where λ is scaled to go as far along the gradient as without it. ± is two standard errors."
)


def _caught(h: dict[str, Any]) -> list[str]:
    found = ((a["share"], a["mean_lambda"]) for a in h["arms"].values())
    arms = ("–" if math.isnan(share) else figures.share_and_mean(share, mean) for share, mean in found)
    return [h["series"], f"{h['spread']:.2f}", f"{h['gain']:.0%}", *arms]


def _told(row: dict[str, Any]) -> list[list[str]]:
    """One line for each regularizer."""

    def share(value: float, error: float = 0.0) -> str:
        return (f"{100 * value:+.1f} %" + (f" ± {200 * error:.1f} %" if error else "")).replace("-", "−")

    slope = f"{row['slope']:.2f} ± {2 * row['slope_error']:.2f}"
    where = f"{row['series']}: spread of v {row['spread']:.3f}, slope of log ε² over log v² {slope}"
    lines = []
    for i, (name, a) in enumerate(row["arms"].items()):
        real, equal = share(a["real"], a["real_error"]), share(a["at_equal_progress"], a["at_equal_progress_error"])
        lines.append([where if i == 0 else "", name, share(a["apparent"]), real, equal])
    return lines
