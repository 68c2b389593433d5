"""The page of a reproduction: the paper's figures, with the control that it lacks."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from varreg.lab.experiments.reproduce.analysis import METRICS
from varreg.lab.experiments.reproduce.paper import BATCH, LR, S
from varreg.lab.report import charts
from varreg.lab.report.document import Findings, Page
from varreg.lab.report.format import count, number, spread
from varreg.lab.report.sections import BANDS, statistics_section
from varreg.lab.runs.config import Results
from varreg.tables import table

if TYPE_CHECKING:
    from varreg.lab.experiments.reproduce.plan import Reproduction


class Original(NamedTuple):
    """One of the paper's experiments, and its figures."""

    data: str
    model: str
    figures: str
    metrics: dict[str, tuple[str, str]]
    """Two panels for each figure, by its name."""


ORIGINALS = {
    "fashion-mnist": Original(
        "Fashion-MNIST",
        "a CNN of two conv-pool-activation blocks and two dense layers",
        "figure 1: training loss and accuracy",
        {"training": ("train_loss", "train_accuracy"), "test": ("test_loss", "test_accuracy")},
    ),
    "cifar10": Original(
        "CIFAR-10",
        "LeNet",
        "figures 2 and 3",
        {"loss": ("train_loss", "test_loss"), "accuracy": ("train_accuracy", "test_accuracy")},
    ),
}
HEAD = (
    *("", "learning rate", "λ", "training loss"),
    *("training accuracy, %", "test loss", "test accuracy, %"),
)


def page_of(reproduction: Reproduction, results: Results, findings: Findings) -> Page:
    """Return the page of a reproduction."""
    original = ORIGINALS[reproduction.name]
    settings = f"images of unit norm, learning rate {LR:g}, batch {BATCH}, s = {S:g}"
    epochs = count(reproduction.epochs, "epoch")
    budget = f"{epochs}, {count(reproduction.seeds, 'seed')}"
    page = reproduction.new_page(
        results,
        f"The paper's experiment on {original.data}, and what explains it",
        f"{original.data}, {original.model}; {settings}; {budget}.",
    )
    arms = reproduction.runs_by_arm(results)
    if findings["arms"]:
        page.section(
            "The numbers",
            f"After {epochs}: mean over seeds (range). Training loss and "
            "accuracy are those of the same 10,000 samples.",
        )
        page.table(list(HEAD), [("", _row(arm)) for arm in findings["arms"]])
    if arms:
        text = f"Its {original.figures}, with the control that it lacks."
        page.section("The paper's figures", text)
        for tab, metrics in original.metrics.items():
            page.figure(tab, charts.curves(arms, metrics), BANDS, tab)
    statistics_section(page, arms)
    return page


def _row(arm: dict[str, Any]) -> list[str]:
    """Return the cells of an arm."""
    metrics = (spread(arm[m], 100 if "accuracy" in m else 1) for m in METRICS)
    return [arm["name"], f"{arm['lr']:g}", f"{arm['lambda']:.3f}", *metrics]


def terminal_table(findings: Findings) -> str:
    """Return the table of arms for the terminal, within 100 columns."""
    if not findings["arms"]:
        return ""
    head = ("", "lr", "λ", "training loss", "median", "range", "test accuracy", "diverged")
    rows = []
    for arm in findings["arms"]:
        losses = arm["train_loss"]
        rows.append(
            (
                arm["name"],
                f"{arm['lr']:g}",
                f"{arm['lambda']:.2f}",
                number(statistics.fmean(losses)),
                number(statistics.median(losses)),
                f"{number(min(losses))}–{number(max(losses))}",
                f"{100 * statistics.fmean(arm['test_accuracy']):.2f} %",
                f"{arm['diverged']} of {len(losses)}",
            )
        )
    return table(head, rows, total=False)
