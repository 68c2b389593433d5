"""Figures of a report: what is drawn can be read."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from varreg.lab.experiments.compare.figures import sensitivity
from varreg.lab.experiments.theory import page as theory
from varreg.lab.report import charts
from varreg.lab.report.document import Page, svg
from varreg.lab.report.style import DASHES, FAR, band, new_figure, say_scales, scale

ROW = {"optimizer": "SGD", "schedule": "constant", "s": None, "best": False}


def trials(*losses: float) -> list[dict[str, object]]:
    return [{**ROW, "lr": 10.0**i, "valid_loss": loss} for i, loss in enumerate(losses, -3)]


def words(figure: Figure) -> list[str]:
    """All text of a figure, as its SVG has it."""
    page = Page("", "", {})
    page.section("x")
    page.figure("x", figure, "")
    return re.findall(r">([^<>\n]+)</text>", page.figures["x"][0])


def test_one_trial_that_broke_does_not_stretch_the_axis():
    figure = sensitivity(trials(0.5, 0.3, 0.4, 1e22, math.inf))
    (axes,) = figure.axes
    assert axes.get_ylim()[1] <= 500 * 1.01 * FAR / 1000
    marks = [line.get_marker() for line in axes.lines if line.get_linestyle() == "None"]
    assert marks.count("^") == 1
    assert marks.count("x") == 1
    assert "▲ far above" in axes.get_xlabel()
    whole = sensitivity(trials(0.5, 0.3, 2.3))
    assert whole.axes[0].get_ylim()[1] < 3
    assert "▲" not in whole.axes[0].get_xlabel()


def test_a_run_that_broke_does_not_stretch_the_curves():
    def run(*losses: float) -> dict[str, object]:
        seen = {"step": list(range(len(losses))), "train_loss": list(losses)}
        return {"evaluations": seen}

    arms = {"SGD": [run(2.3, 1.0, 0.5)], "VRSGD": [run(2.3, 1e15, 1e30)]}
    (axes,) = charts.curves(arms, ["train_loss"]).axes
    assert axes.get_ylim()[1] < 1e5


def test_axes_say_which_they_are_and_have_numbers_that_are_read():
    said = words(sensitivity(trials(0.5, 1e-9, 2.0)))
    assert "learning rate: ★ chosen, × diverged  (log)" in said
    assert "(log)" in said
    assert not [word for word in said if "$" in word]
    assert {"0.001", "0.01", "0.1", "10⁻⁸"} <= set(said)
    assert "(linear)" in words(sensitivity(trials(2.28, 2.3, 2.2)))


@pytest.mark.parametrize(("low", "high"), [(0.25, 0.7), (0.9, 90), (1e-12, 1e12)])
def test_ticks_are_few_and_some(low, high):
    figure, (axes,) = new_figure(1)
    axes.plot([0, 1], [low, high])
    axes.set_yscale("log")
    say_scales(figure)
    figure.draw_without_rendering()
    shown = [t.get_text() for t in axes.yaxis.get_ticklabels(which="both") if t.get_text()]
    assert 1 <= len(shown) <= 30
    assert len(set(shown)) == len(shown)


def test_curves_that_coincide_are_told_apart():
    _, (axes,) = new_figure(1)
    for i in range(len(DASHES)):
        band(axes, np.arange(3), [[1.0, 2.0, 3.0]], i, f"arm {i}")
    dashes = {str(line._unscaled_dash_pattern) for line in axes.lines}
    assert len(dashes) == len(DASHES)
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[2]


def test_names_are_no_numbers():
    figure, (axes,) = new_figure(1)
    axes.set_yticks([0, 1], ["a", "b"])
    axes.plot([1, 2], [0, 1])
    say_scales(figure)
    assert axes.get_ylabel() == ""
    assert axes.get_xlabel() == "(linear)"
    assert "a" in svg(figure, "x")


def test_the_end_of_an_axis():
    _, (axes,) = new_figure(1)
    assert scale(axes, [1.0, 2.0, 3.0]) == math.inf
    assert scale(axes, []) == math.inf
    assert scale(axes, [1.0, 2.0, 1e9]) == 2.0 * FAR


def test_the_page_of_theory_begins_with_pictures(monkeypatch):
    monkeypatch.setattr(theory, "all_checks", lambda _: [])
    monkeypatch.setattr(theory, "hindsight_table", lambda _: [])
    for name in ("start_terms", "rates", "trade_off", "forms"):
        monkeypatch.setattr(theory.figures, name, lambda *_: new_figure(1)[0])
    monkeypatch.setattr(theory, "_hindsight", lambda page, _: None)
    points = dict.fromkeys(("start", "rates", "trade_off", "forms", "theorem_3"))
    page = theory.page_of({"Figures": points, "Real batches": [], "Increments": [{"a": "b"}]})
    first = page.sections[0]
    assert len(first["figures"]) == 4
    assert [section["title"] for section in page.sections[:2]] == ["In pictures", "The claims"]
