"""Sections that the pages of several experiments share."""

from __future__ import annotations

from varreg.lab.report import charts
from varreg.lab.report.document import Page
from varreg.lab.runs.config import Arms

BANDS = "Lines are means over seeds, bands their range."


def statistics_section(page: Page, arms: Arms) -> None:
    """Add the section on λ, ρ and the noise, if they were measured."""
    measured = {
        name: runs for name, runs in arms.items() if all(run["statistics"]["step"] for run in runs)
    }
    if not measured:
        return
    page.section(
        "What λ and the noise did",
        "Effective λ is its mean over coordinates, weighted by squared gradients: the factor by "
        "which the step was longer. "
        "ρ is the variance over the squared mean. The noise scale is the batch size at which noise "
        "and signal are equal.",
    )
    page.figure(
        "over-time",
        charts.over_time(measured),
        f"Of the whole model, over steps. {BANDS}",
        "whole model",
    )
    for i, (name, runs) in enumerate(measured.items()):
        if i < 7:
            page.figure(
                f"per-layer-{i + 1}",
                charts.per_layer(runs),
                f"{name}, layer by layer: medians over seeds, smoothed.",
                f"{name}, per layer",
            )
