"""The findings of the checks in words and as tables. Pure functions of saved results."""

from __future__ import annotations

from typing import Any

from varreg.lab.experiments.theory.computations import PARTS, Computed
from varreg.lab.report.document import Findings
from varreg.theory.claims import CHECKS


def all_checks(results: Computed) -> list[dict[str, Any]]:
    """Return all checks, those of one claim together."""
    rows = [check for name in CHECKS for check in results[name]]
    claims = list(dict.fromkeys(check["claim"] for check in rows))
    return sorted(rows, key=lambda check: claims.index(check["claim"]))


def hindsight_table(results: Computed) -> list[dict[str, Any]]:
    """Return one row for each series and regularizer."""
    return [
        {
            "series": h["series"],
            "spread": h["spread"],
            "gain": h["gain"],
            "regularizer": name,
            **arm,
        }
        for h in results["Hindsight"]
        for name, arm in h["arms"].items()
    ]


def analyze(results: Computed) -> Findings:
    """Return the saved results, with the verdict and warnings in words."""
    rows = all_checks(results)
    wrong = [c for c in rows if c["holds"] != c["expected"]]
    broken = [c for c in rows if not c["holds"]]
    claims = "; ".join(dict.fromkeys(c["claim"] for c in broken))
    headline = (
        f"{len(rows)} checks: {len(rows) - len(broken)} hold, {len(broken)} do not ({claims})."
    )
    real = [h for h in results["Hindsight"] if h["series"].endswith("whole model: batch to batch")]
    saves = " and ".join(
        f"{100 * h['gain']:.0f} % on {h['series'].partition(',')[0]}" for h in real
    )
    spreads = " and ".join(f"{h['spread']:.2f}" for h in real)
    why = (
        "From batch to batch, the variance of real training changes little (standard deviation of "
        f"log σ {spreads}): "
        f"the best regularizer in hindsight would save {saves} of the accumulated error at the "
        "same mean step."
    )
    warnings = [
        f"{c['claim']} ({c['conditions']}) {c['verdict'].lower()}: not what varreg's authors found."
        for c in wrong
    ]
    kind = "unexpected" if wrong else "theory"
    return {
        "verdict": [{"kind": kind, "headline": headline, "speed": "", "why": why}],
        "warnings": warnings,
        "unexpected": len(wrong),
        **{part.name: results[part.name] for part in PARTS},  # leave out anything else in the file
    }
