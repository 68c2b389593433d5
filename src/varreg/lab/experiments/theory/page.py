"""The page of `varreg theory`: the claims, figures, and the best regularizer in hindsight."""

from __future__ import annotations

import math
from typing import Any

from varreg.lab.experiments.theory import figures
from varreg.lab.experiments.theory.analysis import all_checks, hindsight_table
from varreg.lab.experiments.theory.rows import HEAD, cells
from varreg.lab.report.document import Findings, Page
from varreg.theory.claims import LAMBDA0

ABOUT = "Every claim of the paper as a check that runs, on problems whose constants are known."
CLAIMS = (
    "Of each, the tightest or the worst case that was looked at. Slack: how many times the "
    "measured value the bound is; "
    "for an equation, how far off; for an exponent, its distance. ± is two standard errors."
)
START = (
    "What the start costs in Lemma 1's bound, in units of LM²/2. For VR-SGD the mended version "
    "stays where it is, and promises no convergence; "
    "the weighted one falls."
)
RATES = (
    "SGD with γ = 1/(tl) on a quadratic. The variance of one step falls as t^−3; that of whole "
    "runs as t^−2, no faster than γ²."
)
TRADE_OFF = (
    "E[S_T] for γ ∝ t^−α. Dashed: what the start costs; dotted: what noise costs. The larger "
    "rules, and α = ½ is best."
)
FORMS = (
    "Left: λ over the relative variance, s = 2. At σ² = σ̄² the bounded forms react 3.7 times less "
    "than the solution that they stand for. "
    "Right: how far mean λ of Theorem 3's solution is from 1, and its Q from the optimum's at a "
    "mean λ of 1."
)
HINDSIGHT = (
    f"Judged by Q = Σ λ(1+λ/λ₀)σ² at a mean λ of 1 and λ ≤ λ₀ = {LAMBDA0:.2f}, that of s = 2, so "
    "that a longer step is no gain. 1 is the "
    "optimum that knows the future, 0 a constant λ. Mean λ, before it is scaled to 1, stands in "
    "brackets. Real series are shown twice: as they "
    "are, where drift, above all the quiet beginning, makes the optimum's gain; and with the trend "
    "over 51 records divided out, which leaves what "
    "changes from batch to batch. Tensors and elements: medians, each with a λ of its own."
)
CAUGHT = (
    "Share of the hindsight optimum's gain (mean λ). Spread: standard deviation of log σ. Gain: "
    "what the optimum saves of Q."
)
STILL = (
    "At the end of the recorded runs, with parameters held: σ² stays, and only the batch changes. "
    "One λ for the model. What it saves of Q at a "
    "mean λ of 1, as v² has it; the same in truth, with the error ε of the batch's mean gradient "
    "measured against that of all samples; and in "
    "truth where λ is scaled to go as far along the gradient as without it. ± is two standard "
    "errors."
)
INCREMENTS = (
    "Predicted over observed, by the standard error of the mean gradient over the gradient."
)


def page_of(findings: Findings) -> Page:
    """Return the page of `varreg theory`."""
    tables = {"checks": all_checks(findings), "hindsight": hindsight_table(findings)}
    page = Page("What the theory says", ABOUT, tables)
    _pictures(page, findings["Figures"])
    page.section("The claims", CLAIMS)
    rows = [("" if c["holds"] else "broken", cells(c)) for c in all_checks(findings)]
    page.table(list(HEAD), rows, prose=True)
    _hindsight(page, findings)
    page.section("Does v² of a batch say how large the error of that batch is?", STILL)
    head = ["", "λ", "as v² has it", "in truth", "at equal progress"]
    page.table(head, [("", line) for row in findings["Real batches"] for line in _saved(row)])
    page.section("The variance of an increment (S2.4)", INCREMENTS)
    rows = findings["Increments"]
    page.table(
        list(rows[0]),
        [("", [v if isinstance(v, str) else f"{v:.2f}" for v in row.values()]) for row in rows],
    )
    return page


def _pictures(page: Page, points: dict[str, Any]) -> None:
    """Add the figures of the claims."""
    page.section("In pictures")
    page.figure("lemma-1", figures.start_terms(points["start"]), START, "Lemma 1")
    page.figure("rates", figures.rates(points["rates"]), RATES, "Theorem S0 and its corollary")
    page.figure("trade-off", figures.trade_off(points["trade_off"]), TRADE_OFF, "the trade-off")
    forms = figures.forms(points["forms"], points["theorem_3"])
    page.figure("forms", forms, FORMS, "Theorem 3 and the bounded forms")


def _hindsight(page: Page, findings: Findings) -> None:
    """Add what each regularizer catches of the hindsight optimum's gain."""
    page.section("What the best regularizer in hindsight would gain, and who catches it", HINDSIGHT)
    for tab, real in (("synthetic series", False), ("real training", True)):
        chosen = [h for h in findings["Hindsight"] if real == (":" in h["series"])]
        name = f"hindsight-{'real' if real else 'synthetic'}"
        page.figure(name, figures.hindsight(chosen), CAUGHT, tab)
    page.figure(
        "series",
        figures.series(findings["Figures"]["series"]),
        "The noise of plain SGD's gradient, of the whole model.",
        "σ in real training",
    )
    head = ["series", "spread of σ", "gain in hindsight", *findings["Hindsight"][0]["arms"]]
    lines = [("", _caught(h)) for h in findings["Hindsight"]]
    page.table(head, lines, "As a table: share caught (mean λ)")


def _caught(h: dict[str, Any]) -> list[str]:
    """Return the cells of a series: what each regularizer caught."""
    arms = (
        "–" if math.isnan(a["share"]) else figures.share_and_mean(a["share"], a["mean_lambda"])
        for a in h["arms"].values()
    )
    return [h["series"], f"{h['spread']:.2f}", f"{h['gain']:.0%}", *arms]


def _saved(row: dict[str, Any]) -> list[list[str]]:
    """Return one line for each regularizer: what it saves at fixed parameters."""

    def share(value: float, error: float = 0.0) -> str:
        return (f"{100 * value:+.1f} %" + (f" ± {200 * error:.1f} %" if error else "")).replace(
            "-", "−"
        )

    slope = f"{row['slope']:.2f} ± {2 * row['slope_error']:.2f}"
    where = f"{row['series']}: spread of v {row['spread']:.3f}, slope of log ε² over log v² {slope}"
    lines = []
    for i, (name, a) in enumerate(row["arms"].items()):
        real, equal = (
            share(a["real"], a["real_error"]),
            share(a["at_equal_progress"], a["at_equal_progress_error"]),
        )
        lines.append([where if i == 0 else "", name, share(a["apparent"]), real, equal])
    return lines
