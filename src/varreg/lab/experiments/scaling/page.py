"""The page of an experiment on scaling: one table, and a figure of losses over samples."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from varreg.lab.experiments.scaling.analysis import words
from varreg.lab.report.document import Findings, Page
from varreg.lab.report.format import number
from varreg.lab.report.style import (
    STYLE,
    at_top,
    legend,
    look,
    new_figure,
    said_of,
    scale,
)
from varreg.lab.runs.config import Results
from varreg.tables import table

if TYPE_CHECKING:
    from varreg.lab.experiments.scaling.plan import Scaling

HEAD = (
    *("batch", "", "learning rate", "steps", "samples", "training loss"),
    *("test loss, median (mean)", "against the base"),
)
ADASCALE = "against AdaScale"


def page_of(experiment: Scaling, results: Results, findings: Findings, about: str) -> Page:
    """Return the page."""
    title = {
        "plan": f"Other batches as the noise scale plans them, on {experiment.task}",
        "adascale": f"AdaScale, simple rules and tuning again, on {experiment.task}",
    }[experiment.question]
    budget = (
        f"{experiment.optimizer}, tuned at a batch of {experiment.batch} for {experiment.epochs} "
        f"epochs; {experiment.trials} learning rates × {experiment.tuning_seeds} tuning seeds for "
        f"each thing that is tuned; {experiment.seeds} fresh seeds, the same for all"
    )
    page = experiment.new_page(results, title, f"{about}. {budget}.")
    if findings["arms"]:
        text = "Steps and samples are relative to the base's. Intervals are 95 %, of paired runs."
        page.section("The numbers", text)
        page.table(head_of(findings), [("", row) for row in rows_of(findings)])
        page.figure("losses", losses(findings), "Medians over seeds.")
    return page


def has_adascale(findings: Findings) -> bool:
    """Return whether AdaScale is among the arms."""
    return any(arm["name"] == "AdaScale" for arm in findings["arms"])


def head_of(findings: Findings) -> list[str]:
    """Return the head of the table."""
    return [*HEAD, *([ADASCALE] if has_adascale(findings) else [])]


def rows_of(findings: Findings) -> list[list[str]]:
    """Return the rows of the table: cells as text."""
    return [_row(arm, has_adascale(findings)) for arm in findings["arms"]]


def terminal_table(findings: Findings) -> str:
    """Return the table for the terminal, within 100 columns."""
    if not findings["arms"]:
        return ""
    head = ("batch", "", "lr", "steps", "samples", "train", "test, median (mean)", "broke")
    rows = [
        (*row[:7], str(arm["broke"] or ""))
        for row, arm in zip(rows_of(findings), findings["arms"], strict=True)
    ]
    return table(head, rows, words=(1,), total=False)


def _row(arm: dict[str, Any], adascale: bool) -> list[str]:
    """Return the cells of an arm."""
    losses = arm["test_loss"]
    mean = "∞" if arm["broke"] else number(statistics.fmean(losses))
    against = [words(arm, arm[key]["test_loss"]) if arm[key] else "" for key in _KEYS]
    return [
        f"{arm['batch']:,}",
        arm["name"],
        f"{arm['lr']:g}",
        _times(arm["steps_of_base"]),
        _times(arm["samples_of_base"]),
        number(statistics.median(arm["train_loss"])),
        f"{number(statistics.median(losses))} ({mean})",
        *(against if adascale else against[:1]),
    ]


_KEYS = ("against_base", "against_adascale")


def _times(x: float) -> str:
    """Return a factor as text."""
    return "–" if math.isnan(x) else f"{x:.3g} ×"


def losses(findings: Findings) -> Figure:
    """Draw the test loss of each arm over its batch: medians over seeds. At the top, a cross is an
    arm whose median run broke, and a triangle one that ended far above the others.
    """
    with mpl.rc_context(STYLE):
        made, (axes,) = new_figure(1, 4.0, 6.4)
        arms = [(arm, statistics.median(arm["test_loss"])) for arm in findings["arms"]]
        axes.set_xscale("log")
        axes.set_yscale("log")
        end = scale(axes, [loss for _, loss in arms])
        base = next((loss for arm, loss in arms if arm["scale"] == 1), math.inf)
        if math.isfinite(base):
            axes.axhline(base, color="#888888", lw=1, label="base")
        beyond = {"×": 0, "▲": 0}
        for i, name in enumerate(dict.fromkeys(a["name"] for a, _ in arms if a["scale"] > 1)):
            points = [(arm["batch"], loss) for arm, loss in arms if arm["name"] == name]
            kept = [(batch, loss) for batch, loss in points if math.isfinite(loss)]
            axes.plot(*zip(*kept or [(math.nan,) * 2], strict=True), marker="o", ms=4, label=name,
                      **look(i + 1))  # fmt: skip
            for batch, loss in points:
                if not loss <= end or math.isinf(loss):
                    mark = "▲" if math.isfinite(loss) else "×"
                    beyond[mark] += 1
                    at_top(axes, batch, mark, look(i + 1)["color"])
        axes.set_title("test loss")
        axes.set_xlabel(f"batch{said_of(beyond)}")
        legend(made, axes)
        return made
