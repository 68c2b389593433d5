"""Figures of a report: what is drawn can be read."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks import growth_figures, noise_truth
from matplotlib.figure import Figure

from varreg.lab.experiments.compare.figures import differences, sensitivity
from varreg.lab.experiments.scaling.page import losses
from varreg.lab.experiments.theory import figures as theory_figures
from varreg.lab.experiments.theory import page as theory
from varreg.lab.report import charts
from varreg.lab.report.document import Page, svg
from varreg.lab.report.style import DASHES, FAR, band, new_figure, save, say_scales, scale
from varreg.noise.batch_plan import make_plan

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
    assert axes.get_xlabel() == "steps, ▲ far above: 1"


def contrasts(*rows: tuple[float, float, float]) -> list[dict[str, object]]:
    return [
        {"arm": f"arm {i}", "against": "SGD", "differences": {"test_loss": dict(zip(
            ("value", "low", "high"), row, strict=True))}}
        for i, row in enumerate(rows)
    ]  # fmt: skip


@pytest.mark.parametrize("broken", [(1.1e22, -1e22, 3e22), (1.1e22, -math.inf, math.inf)])
def test_one_run_that_broke_does_not_stretch_the_differences(broken):
    (axes,) = differences(contrasts((0.02, 0.01, 0.03), (-0.5, -0.6, -0.4), broken)).axes
    low, high = axes.get_xlim()
    assert -1 < low < -0.6
    assert 0.03 < high < 1
    assert axes.get_xlabel() == "far beyond this axis: 1"
    assert [line.get_marker() for line in axes.lines].count(">") == 1
    (whole,) = differences(contrasts((0.02, 0.01, 0.03), (-0.5, -0.6, -0.4))).axes
    assert whole.get_xlabel() == ""
    nothing = (math.nan,) * 3
    (lost,) = differences(contrasts((0.02, 0.01, 0.03), nothing)).axes
    assert lost.get_xlabel() == "without a difference, as runs diverged: 1"


def scaled(*medians: tuple[str, int, float]) -> dict[str, object]:
    return {
        "arms": [
            {"name": name, "scale": k, "batch": 8 * k, "test_loss": [loss] * 3}
            for name, k, loss in (("base", 1, 0.1), *medians)
        ]
    }


def test_one_arm_that_broke_does_not_stretch_the_losses_over_batches():
    arms = [("linear", 4, 0.11), ("linear", 16, 1.4e23), ("linear", 64, math.inf)]
    (axes,) = losses(scaled(*arms, ("none", 4, 0.2), ("none", 16, 0.3))).axes
    assert axes.get_ylim()[1] < 1e3
    assert axes.get_xlabel() == "batch, × broke: 1, ▲ far above: 1"
    assert [line.get_marker() for line in axes.lines].count("^") == 1
    assert losses(scaled(("linear", 4, 0.11))).axes[0].get_xlabel() == "batch"


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


def dashes_of(axes) -> list[str]:
    """The dashes of all lines with more than one point."""
    return [str(line._unscaled_dash_pattern) for line in axes.lines if len(line.get_xdata()) > 1
            and line.get_linestyle() != "None"]  # fmt: skip


def test_no_two_lines_of_a_figure_have_the_same_dashes():
    rows = [
        {**row, "optimizer": name, "s": s, "schedule": "constant"}
        for name, values in (("SGD", [None]), ("VRSGD", [0.5, 2.0]), ("Adam", [None]))
        for s in values
        for row in trials(0.5, 0.3, 0.4)
    ]
    drawn = {"sensitivity": sensitivity(rows).axes[0]}
    several = [(name, k, 0.1) for name in ("a", "b", "c") for k in (4, 16)]
    drawn["losses"] = losses(scaled(*several)).axes[0]
    many = {f"lambda/{name}.weight": [1.0, 1.0, 1.0] for name in "abcd"}
    runs = [{"statistics": {"step": [1, 2, 3], **many}}]
    drawn["per layer"] = charts.per_layer(runs).axes[0]
    points = {"T": [1, 2, 4], "x": [1.0, 1.0, 1.0], "y": [1.0, 1.0, 1.0], "z": [1.0, 1.0, 1.0]}
    drawn["start"] = theory_figures.start_terms(points).axes[0]
    forms = {"r": [1, 2, 4], "x": [1.0, 1.0, 1.0], "y": [1.0, 1.0, 1.0], "z": [1.0, 1.0, 1.0]}
    left, right = theory_figures.forms(forms, [[1.0, 1.0, 1.0], [2.0, 9.0, 9.0]]).axes
    left.lines[-1].remove()  # the axis through 0
    drawn |= {"forms": left, "errors": right}
    flat = {"SGD": [2.0, *[1.0] * 99], "VRSGD": [1.0, 2.0] * 50, "mean": [1.0, 2.0] * 50}
    drawn["rates"] = theory_figures.rates(flat).axes[0]
    for name, axes in drawn.items():
        if name == "losses":
            axes.lines[0].remove()  # the base
        dashes = dashes_of(axes)
        assert len(dashes) >= 2, name
        assert len(set(dashes)) == len(dashes), name
    one = [[1, 2, 4], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    (axes,) = theory_figures.trade_off({"0.3": one, "0.5": one}).axes
    assert [line.get_marker() for line in axes.lines].count("o") == 1


def written(figure: Figure) -> list[str]:
    """What a figure says about its axes, as it is written by any command."""
    file = io.StringIO()
    for _ in range(2):  # a page has an SVG and a PNG of the same figure
        file.seek(0)
        save(figure, file, format="svg")
    return re.findall(r"\((?:log|linear)\)", file.getvalue())


def test_every_command_says_which_axes_are_logarithmic(tmp_path):
    noise = SimpleNamespace(value=100.0, interval=(50.0, 200.0), text=lambda: "100")
    plan = make_plan(noise, [8, 64], 32)
    assert written(plan.plot()) == ["(log)"] * 4
    assert written(losses(scaled(("linear", 4, 0.11)))) == ["(log)"] * 2
    kept = json.loads(Path("benchmarks/results/growth.json").read_text())
    assert written(growth_figures.ratios(kept)) == ["(log)"] * 2 * len(kept["lines"])
    assert written(growth_figures.memories(kept)) == ["(log)"] * 2 * len(kept["memory"])
    truth = json.loads(Path("docs/results/noise-truth/results.json").read_text())
    noise_truth.figure(truth, tmp_path / "ratios.svg")
    text = (tmp_path / "ratios.svg").read_text()
    assert text.count("(log)") == text.count("(linear)") == len(truth["runs"])


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
