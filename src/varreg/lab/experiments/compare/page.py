"""The page of a comparison: numbers, curves, results of tuning, λ and the noise."""

from __future__ import annotations

import math
import statistics
import textwrap
from typing import TYPE_CHECKING, Any

from varreg.lab.experiments.compare import learning_rates
from varreg.lab.experiments.compare.figures import differences, sensitivity
from varreg.lab.report import charts
from varreg.lab.report.document import Findings, Page
from varreg.lab.report.format import count, mean, number, percent, spread
from varreg.lab.report.sections import BANDS, statistics_section
from varreg.lab.runs.config import Arms, Results
from varreg.tables import table

if TYPE_CHECKING:
    from varreg.lab.experiments.compare.plan import Comparison


def page_of(comparison: Comparison, results: Results, findings: Findings, about: str) -> Page:
    """Return the page of a comparison."""
    base, *others = comparison.optimizers
    title = f"{', '.join(others)} against {base} on {comparison.task}"
    page = comparison.new_page(results, title, f"{about}. {_budget(comparison)}")
    arms = comparison.runs_by_arm(results)
    main = {name: runs for name, runs in arms.items() if name in comparison.optimizers}
    if findings["arms"]:
        _numbers(page, findings)
    if main:
        _curves(page, findings, main, arms)
    if findings["trials"]:
        _sensitivity(page, findings)
    statistics_section(page, main)
    return page


def _budget(comparison: Comparison) -> str:
    """Return a description of all trials and runs."""
    counts = {spec: len(learning_rates.grid(comparison, spec)) for spec in comparison.optimizers}
    each = (
        ", ".join(f"{spec} {n}" for spec, n in counts.items())
        if len(set(counts.values())) > 1
        else f"{comparison.trials} for each optimizer"
    )
    return (
        f"Trials: {each}, with {count(comparison.tuning_seeds, 'tuning seed')} each; the best by "
        f"validation loss was run with {comparison.seeds} fresh seeds, the same for all. "
        "The test split was read once, at the end."
    )


def _sensitivity(page: Page, findings: Findings) -> None:
    """Add the results of tuning."""
    page.section(
        "Learning-rate sensitivity",
        "What tuning saw, on the validation split with the tuning seeds.",
    )
    caption = "A wide valley is easy to tune."
    page.figure("sensitivity", sensitivity(findings["trials"]), caption)
    rows = [("best" if t["best"] else "", _trial(t)) for t in findings["trials"]]
    head = ["optimizer", "learning rate", "s", "validation loss", "diverged", "chosen"]
    page.table(head, rows, "All trials")


def _numbers(page: Page, findings: Findings) -> None:
    """Add the table of arms, and the differences between them."""
    page.section(
        "The numbers",
        "At the end: mean over seeds (range). To the target: medians over seeds, a miss counting "
        "as infinite.",
    )
    has_accuracy = any("test_accuracy" in arm for arm in findings["arms"])
    accuracy = ["test accuracy, %"] if has_accuracy else []
    head = [
        "optimizer",
        "learning rate",
        "test loss",
        "median",
        *accuracy,
        "training loss",
        "steps to target",
        "seconds to target",
        "λ",
    ]
    page.table(head, [(arm["role"], _row(arm, has_accuracy)) for arm in findings["arms"]])
    if findings["contrasts"]:
        level = percent(findings["level"])
        caption = (
            f"{level} bootstrap intervals. Left of zero, the first of the two is better; a hollow "
            "point is no detectable difference."
        )
        page.figure("differences", differences(findings["contrasts"]), caption, "against the base")
        if findings["ablations"]:
            page.figure(
                "ablations",
                differences(findings["ablations"]),
                caption,
                "against the ablations",
            )


def _curves(page: Page, findings: Findings, main: Arms, arms: Arms) -> None:
    """Add evaluations over steps and seconds."""
    page.section(
        "Curves",
        "Measured after every epoch, on the training and validation splits: the test split is read "
        "only once.",
    )
    losses = ["train_loss", "valid_loss"]
    page.figure(
        "curves-steps",
        charts.curves(main, losses, "step", findings["target"]),
        BANDS,
        "over steps",
    )
    seconds = f"{BANDS} Seconds of training alone, on one thread."
    page.figure(
        "curves-seconds",
        charts.curves(main, losses, "seconds", findings["target"]),
        seconds,
        "over seconds",
    )
    if any("test_accuracy" in arm for arm in findings["arms"]):
        page.figure(
            "accuracy-steps",
            charts.curves(main, ["train_accuracy", "valid_accuracy"]),
            BANDS,
            "accuracy",
        )
    if len(arms) > len(main):
        page.figure(
            "ablations-steps",
            charts.curves(arms, losses),
            f"With the ablations. {BANDS}",
            "ablations",
        )


def _row(arm: dict[str, Any], has_accuracy: bool) -> list[str]:
    """Return the cells of an arm."""
    reached = sum(map(math.isfinite, arm["steps_to_target"]))
    missed = (
        f" ({reached} of {len(arm['seeds'])} reached it)" if reached < len(arm["seeds"]) else ""
    )
    accuracy = [spread(arm["test_accuracy"], 100)] if has_accuracy else []
    s = (
        f", s = {arm['options']['s']:g}"
        if "s" in arm["options"] and "s = " not in arm["name"]
        else ""
    )
    times = [
        number(statistics.median(arm[key])) for key in ("steps_to_target", "seconds_to_target")
    ]
    lam = number(arm["lambda"])
    return [
        arm["name"] + s + _schedule(arm),
        f"{arm['lr']:g}",
        spread(arm["test_loss"]),
        number(statistics.median(arm["test_loss"])) + _broke(arm),
        *accuracy,
        mean(arm["train_loss"]),
        times[0] + missed,
        times[1],
        lam,
    ]


def _broke(arm: dict[str, Any]) -> str:
    """Return how many runs broke, if any did."""
    return f" ({sum(arm['broke'])} of {len(arm['seeds'])} broke)" if any(arm["broke"]) else ""


_WORDS = 32
"""Columns for the name of an arm on a terminal: the table then fits into 100."""


def terminal_table(findings: Findings) -> str:
    """Return the table of arms for the terminal."""
    if not findings["arms"]:
        return ""
    exact = all("test_accuracy" in arm for arm in findings["arms"])
    head = ("optimizer", "lr", "test loss", "median", "range", "broke", "λ")
    rows = []
    for arm in findings["arms"]:
        losses = arm["test_loss"]
        span = f"{number(min(losses))}–{number(max(losses))}"
        values = (number(statistics.fmean(losses)), number(statistics.median(losses)), span)
        broke = f"{sum(arm['broke'])} of {len(losses)}"
        right = [f"{100 * statistics.fmean(arm['test_accuracy']):.2f} %"] if exact else []
        name, *more = textwrap.wrap(arm["name"] + _schedule(arm), _WORDS, break_on_hyphens=False)
        rows.append((name, f"{arm['lr']:g}", *values, broke, number(arm["lambda"]), *right))
        rows.extend((f"  {rest}", *[""] * (len(head) - 1 + exact)) for rest in more)
    return table((*head, *["accuracy"] * exact), rows, total=False)


def _schedule(row: dict[str, Any]) -> str:
    """Return the schedule of an arm or a trial, unless it is named already or constant."""
    name = row["options"].get("schedule", "constant")
    said = row.get("name", row["optimizer"])
    return "" if name == "constant" or "schedule" in said else f", {name}"


def _trial(t: dict[str, Any]) -> list[str]:
    """Return the cells of a trial."""
    s = "" if t["s"] is None else f"{t['s']:g}"
    return [
        t["optimizer"] + _schedule(t),
        f"{t['lr']:g}",
        s,
        number(t["valid_loss"]),
        str(t["diverged"] or ""),
        "★" if t["best"] else "",
    ]
