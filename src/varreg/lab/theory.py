"""`varreg theory`: all checks, the regularizers against the best one in hindsight, and what figures need, as one saved result."""

from __future__ import annotations

import functools
import statistics as st
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from varreg import regularizer
from varreg.lab import store
from varreg.lab.environment import environment
from varreg.lab.experiment import read_about
from varreg.lab.verdict import number
from varreg.theory import checks, hindsight, increments
from varreg.theory.problems import Noise, quadratic, steady
from varreg.theory.rates import distances

NOISES = (0.03, 0.1, 0.3, 1.0)


def parts() -> dict[str, Callable[[], Any]]:
    """What there is to do, by name; each gives plain numbers."""
    return {
        **{name: functools.partial(_checked, check) for name, check in checks.CHECKS.items()},
        "Hindsight": _hindsight,
        "Real batches": _still,
        "Increments": _increments,
        "Figures": _curves,
    }


def _checked(function: Callable[[], list[checks.Check]]) -> list[dict[str, Any]]:
    return [{**asdict(check), "slack": check.slack, "verdict": check.verdict} for check in function()]


def _hindsight() -> list[dict[str, Any]]:
    rows = []
    for series in hindsight.all_series():
        gain = st.median(hindsight.gain(x, checks.LAMBDA0) for x in series.sigma2.T)
        arms = {name: hindsight.judged(series, checks.LAMBDA0, **options) for name, options in hindsight.ARMS.items()}
        found = {name: {"share": c.share, "mean_lambda": c.mean_lambda} for name, c in arms.items()}
        rows.append({"series": series.name, "spread": series.spread, "gain": gain, "arms": found})
    return rows


def _still() -> list[dict[str, Any]]:
    rows = []
    for name, title in hindsight.RECORDED.items():
        told, columns = hindsight.still(name)
        shown = ("rational, mean", "rational, harmonic", "affine, harmonic", "rational of ρ, mean", "rational of ρ, harmonic")
        arms = {arm: hindsight.saved(columns, checks.LAMBDA0, **hindsight.ARMS[arm])._asdict() for arm in shown}
        rows.append({"series": title, **told._asdict(), "batches": len(columns["v2"]), "arms": arms})
    return rows


def _increments() -> list[dict[str, Any]]:
    found = [increments.measured(noise) for noise in NOISES]
    return [
        {"optimizer": case, "version": version, **{f"{n:g}": column[i][2] for n, column in zip(NOISES, found, strict=True)}}
        for i, (case, version, _) in enumerate(found[0])
    ]


def _curves() -> dict[str, Any]:
    """The points of the figures."""
    r = torch.logspace(-1, 1, 81, dtype=torch.float64)
    forms = {"Theorem 3": regularizer.affine, "sigmoid": regularizer.sigmoid, "rational": regularizer.rational}
    s = regularizer.DEFAULTS["s"]
    same = quadratic(5, 1.0, 1.0)
    fall = distances(same, Noise(steady(400)), same.minimum + 1.0, 2000)
    fallen = {"E[R_t]": fall.mean, "Var(R_t), whole runs": fall.variance, "Var(R_t), one step": fall.one_step}
    whole = [next(series for series in hindsight.recorded(name) if "whole" in series.name) for name in hindsight.RECORDED]
    return {
        "forms": {"r": r.tolist(), **{name: form(r, torch.ones_like(r), s).tolist() for name, form in forms.items()}},
        "start": {"T": checks.TIMES, **checks.first_terms()},
        "trade_off": {f"{alpha:g}": checks.trade_off_of(alpha) for alpha in checks.ALPHAS},
        "theorem_3": checks.theorem_3_errors(),
        "rates": {name: values.tolist() for name, values in fallen.items()},
        "series": {series.name.partition(",")[0]: series.sigma2[:, 0].tolist() for series in whole},
    }


def carry_out(folder: Path, command: list[str], told: Callable[[str, float], None]) -> dict[str, Any]:
    """Run everything, and save it as `theory.json`; `told` hears of each part that ends, and of its seconds."""
    store.check_writable(folder)
    with store.alone(folder, "varreg theory"):
        path = folder / "experiment.json"
        if path.exists() and read_about(path)["kind"] != "theory":
            raise ValueError(f"varreg: {folder} has another experiment in it. Choose another folder with --out.")
        found, threads = {}, torch.get_num_threads()
        torch.set_num_threads(1)  # tensors are small, and a second thread would be waited for more than it helps
        try:
            for name, part in parts().items():
                start = time.perf_counter()
                found[name] = part()
                told(name, time.perf_counter() - start)
        finally:
            torch.set_num_threads(threads)
        about = {"kind": "theory", "arguments": {}, "about": "", "command": command, "environment": environment()}
        store.write_json(folder / "theory.json", found)
        store.write_json(path, about)
    return found


def all_checks(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of one claim together."""
    rows = [check for name in checks.CHECKS for check in found[name]]
    claims = list(dict.fromkeys(check["claim"] for check in rows))
    return sorted(rows, key=lambda check: claims.index(check["claim"]))


def hindsight_table(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each series and regularizer."""
    return [
        {"series": h["series"], "spread": h["spread"], "gain": h["gain"], "regularizer": name, **arm}
        for h in found["Hindsight"]
        for name, arm in h["arms"].items()
    ]


def analyze(found: dict[str, Any]) -> dict[str, Any]:
    """In words. A pure function of what was saved."""
    rows = all_checks(found)
    wrong = [c for c in rows if c["holds"] != c["expected"]]
    broken = [c for c in rows if not c["holds"]]
    claims = list(dict.fromkeys(c["claim"] for c in broken))
    headline = f"{len(rows)} checks: {len(rows) - len(broken)} hold, {len(broken)} do not ({'; '.join(claims)})."
    real = [h for h in found["Hindsight"] if h["series"].endswith("whole model: batch to batch")]
    saves = " and ".join(f"{100 * h['gain']:.0f} % on {h['series'].partition(',')[0]}" for h in real)
    spreads = " and ".join(f"{h['spread']:.2f}" for h in real)
    why = (
        f"From batch to batch, the variance of real training changes little (standard deviation of log σ {spreads}): "
        f"the best regularizer in hindsight would save {saves} of the accumulated error at the same mean step."
    )
    warnings = [f"{c['claim']} ({c['conditions']}) {c['verdict'].lower()}: not what varreg's authors found." for c in wrong]
    verdict = [{"kind": "unexpected" if wrong else "theory", "headline": headline, "speed": "", "why": why}]
    kept = {name: found[name] for name in parts()}  # whatever else a file holds is not said
    return {"verdict": verdict, "warnings": warnings, "unexpected": len(wrong), **kept}


def slack(check: dict[str, Any]) -> str:
    """How far from the bound: times for an inequality, percent for an equation, the distance for an exponent.

    >>> slack({"relation": "=", "measured": 1.1, "bound": 1.0, "slack": 0.909})
    '+10 %'
    """
    measured, bound = check["measured"], check["bound"]
    if check["relation"] == "=":
        off = 100 * (measured / bound - 1)
        return f"{off:+,.{1 if abs(off) < 10 else 0}f} %".replace("-", "−")
    if measured < 0:
        return f"{bound - measured:+.2f}".replace("-", "−")
    return f"{number(check['slack'])}×" if measured else "–"


def measured(check: dict[str, Any]) -> str:
    """With two standard errors, where there are any."""
    error = check["error"]
    return number(check["measured"]) + (f" ± {2 * error:.1g}" if error else "")


HEAD = ["claim", "statement", "conditions", "measured", "", "bound", "slack", "verdict"]


def cells(check: dict[str, Any]) -> list[str]:
    said = (check["claim"], check["statement"], check["conditions"], measured(check), check["relation"], number(check["bound"]))
    return [*said, slack(check), check["verdict"]]


def shown(found: dict[str, Any]) -> Table:
    """The table, for a terminal."""
    made = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False)
    for name in HEAD:
        made.add_column(name, justify="right" if name in ("measured", "bound", "slack") else "left", no_wrap=name in HEAD[3:7])
    last = ""
    for check in all_checks(found):
        claim, *rest = cells(check)
        if last not in ("", claim):
            made.add_section()
        made.add_row(*map(Text, (claim if claim != last else "", *rest)), style=None if check["holds"] else "yellow")
        last = claim
    return made
