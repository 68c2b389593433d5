"""The results of `varreg theory`: tables of docs/understand/theory.md and increments.md."""

from __future__ import annotations

from typing import Any

from tools.tables.cells import markdown, once

Saved = dict[str, Any]
FORMS = ("rational, mean", "rational, harmonic", "affine, harmonic", "rational of ρ, mean")


def increments(saved: Saved) -> str:
    """Return the predicted over the observed variance of each optimizer's increment."""
    noises = [key for key in saved["Increments"][0] if key not in ("optimizer", "version")]
    rows = [
        [row["optimizer"], row["version"], *(f"{row[noise]:.2f}" for noise in noises)]
        for row in saved["Increments"]
    ]
    return markdown(["optimizer", "version", *noises], rows)


def hindsight(saved: Saved) -> str:
    """Return the share of the optimum's gain that each λ catches, and its mean before scaling. A
    synthetic series has no ρ.
    """
    rows = []
    for row in saved["Hindsight"]:
        if "weight tensors" in row["series"] or row["series"].endswith("elements: drift and all"):
            continue  # much as the whole model
        arms = [row["arms"][form] for form in FORMS]
        cells = [f"{arm['share']:.2f} ({arm['mean_lambda']:.2f})" for arm in arms]
        shares = [f"{row['spread']:.2f}", f"{100 * row['gain']:.0f} %"]
        said = [cell.replace("-", "−").replace("nan (nan)", "") for cell in cells]
        rows.append([row["series"], *shares, *said])
    return markdown(["series", "spread", "gain", *FORMS], rows)


def _percent(row: Saved, name: str) -> str:
    """Return a share in percent, with two standard errors if there are any."""
    error = f" ± {200 * row[f'{name}_error']:.1f}" if f"{name}_error" in row else ""
    return f"{100 * row[name]:+.1f}{error} %".replace("-", "−")


def real_batches(saved: Saved) -> str:
    """Return what λ saves on real batches: as v² has it, in truth, and at equal progress."""
    rows = []
    for row in saved["Real batches"]:
        slope = f"{row['slope']:.2f} ± {2 * row['slope_error']:.2f}"
        about = f"{row['series']}: spread of $v$ {row['spread']:.3f}, slope {slope}"
        for form in FORMS[1:]:
            arm = row["arms"][form]
            cells = [_percent(arm, name) for name in ("apparent", "real", "at_equal_progress")]
            rows.append([about, form, *cells])
    head = ["", "λ", "at equal mean λ, as $v^2$ has it", "in truth"]
    return markdown([*head, "at equal progress, in truth"], once(rows))


def _find(saved: Saved, claim: str, *parts: str) -> Saved:
    """Return the first check of a claim whose statement or conditions have all parts."""
    for rows in saved.values():
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict) and row.get("claim") == claim:
                about = f"{row['statement']}; {row['conditions']}"
                if all(part in about for part in parts):
                    return row
    raise LookupError(f"no check of {claim} has {', '.join(parts)}")


def _bound(saved: Saved, claim: str, *parts: str) -> list[str]:
    """Return what was measured, the bound, and how far it is from it."""
    row = _find(saved, claim, *parts)
    slack = row["bound"] / row["measured"]
    times = f"{slack:.0f}×" if slack >= 10 else f"{slack:.1f}×" if slack > 0.1 else f"{slack:.3f}×"
    return [_three(row["measured"]), _three(row["bound"]), times]


def _three(value: float) -> str:
    """Return a number with up to three significant digits."""
    return f"{float(f'{value:.3g}'):g}"


def _times_ten(value: float) -> str:
    """Return a tiny number as a power of ten, in LaTeX."""
    digits, _, power = f"{value:.0e}".partition("e")
    return f"$10^{{{int(power)}}}$" if digits == "1" else f"${digits}\\cdot10^{{{int(power)}}}$"


def claims(saved: Saved) -> str:
    """Return the paper's claims: in words, as measured, and whether they hold."""

    def number(claim: str, *parts: str) -> float:
        return float(_find(saved, claim, *parts)["measured"])

    equal = _find(saved, "Theorem 1", "= (1/2T)", "quadratic")
    gap = equal["measured"] / equal["bound"] - 1
    theorem_1 = f"{equal['measured']:.4f} ± {2 * equal['error']:.4f}"
    loose = min(
        row["slack"]
        for row in saved["Theorems 1 and 2"]
        if row["claim"] == "Theorem 2" and "as tight as" not in row["conditions"]
    )
    tight = _bound(saved, "Theorem 2", "as tight as we could make it")
    runs = _find(saved, "Corollary of S0", "whole runs")
    one = number("Corollary of S0", "one step")
    corollary = f"$t^{{{one:.2f}}}$; $t^{{{runs['measured']:.2f} \\pm {2 * runs['error']:.2f}}}$"
    noise = f"{number('Trade-off', 't^−0.5/', 'exponent'):.3f}".replace("-", "−")
    v2 = _find(saved, "S2.2", "batches of 16, independent")
    s22 = [
        f"{v2['measured']:.1f} ± {2 * v2['error']:.1f} at $m = 16$",
        f"{v2['bound']:.0f}",
        f"{100 * (v2['measured'] / v2['bound'] - 1):+.0f} %",
    ]
    direct, simple = (
        number("S2.4", f"Adam, {name} version; ", "0.03") for name in ("direct", "simplified")
    )
    short = number("S2.4", "Adam, β₂ 0.9, direct")
    solved = _find(saved, "S1.5")
    means = [number("Theorem 3", "mean λ; ", f"spread {spread}") for spread in ("0.01", "1")]
    rows = [
        ["Lemma 1", "on every path, the averaged regret is below $S_T$",
         *_bound(saved, "Lemma 1", "3 problems"), "holds, for steps that never grow"],
        ["Lemma 1", "the same, where steps grow",
         *_bound(saved, "Lemma 1", "steps that grow"), "**does not hold**"],
        ["Lemma 1, mended", "with the sum below for $1/\\gamma_T$",
         *_bound(saved, "Lemma 1, mended", "3 problems"), "holds for any steps up to $1/L$"],
        ["Lemma 1, weighted", "regret weighted by $\\gamma_t$; no bounded region needed",
         *_bound(saved, "Lemma 1, weighted", "3 problems"), "holds for any steps up to $1/L$"],
        ["Theorem 1",
         "what noise adds to $E[S_T]$ is $\\frac{1}{2T}\\sum\\gamma(1+L\\gamma)\\sigma^2$",
         theorem_1, f"{equal['bound']:.4f}", f"{100 * gap:+.1f} %", "holds, to sampling error"],
        ["Theorem 1", "… and at most $\\sigma_0^2\\sum\\gamma/T$",
         *_bound(saved, "Theorem 1", "≤", "quadratic"), "holds"],
        ["Theorem 1, for VR-SGD", "$\\lambda$ is independent of the error that it multiplies",
         "see below", "", "", "**holds only** for $\\lambda$ of $v^2$ and normal samples"],
        ["Theorem 2", "$\\mathrm{Var}(S_T) \\le (4M^2\\bar\\sigma^2 + \\bar\\eta^4/L^2)/T$", *tight,
         f"holds; {tight[2]} where it is tightest, {loose:.0f}× and more on our other problems"],
        ["Theorem S0", "$E[R_t] \\le \\max\\lbrace R_1, G^2/l^2\\rbrace /t$",
         *_bound(saved, "Theorem S0", "first step only"), "**does not hold** at $t = 2$"],
        ["Theorem S0, mended", "$E[R_t] \\le 2G^2/(l^2t)$",
         *_bound(saved, "Theorem S0, mended"), "holds"],
        ["Corollary of S0", "$\\mathrm{Var}(R_t)$ falls faster than $\\gamma_t^2 \\propto t^{-2}$",
         corollary, "$t^{-2}$", "", "true of one step; **not of whole runs**"],
        ["Trade-off", "$E[S_T] \\sim T^{\\alpha-1} + T^{-\\alpha}$",
         f"what noise costs has the exponent {noise} at $\\alpha = \\frac12$", "−0.5", "", "holds"],
        ["S2.2", "$E[v^2] = (m-1)\\sigma^2$", *s22, "holds for independent samples"],
        ["S2.4", "the variance of momentum",
         f"{number('S2.4', 'SGD, momentum'):.3f} of the true one", "1", "", "holds"],
        ["S2.4", "the variance of Adam's increment, direct; simplified",
         f"{direct:.2f}; {simple:.2f} of the true one", "1", "",
         f"to 15 % (not with $\\beta_2 = 0.9$: {short:.2f}); **not the simplified one**"],
        ["S1.5", "the unbounded solution, with the harmonic mean",
         f"off by {_times_ten(solved['measured'])}", _times_ten(solved["bound"]), "", "holds"],
        ["Theorem 3",
         "with $\\bar\\sigma^2$ for it, $\\sum\\lambda = T$ to second order in $\\sigma$'s spread",
         f"mean $\\lambda$ {means[0]:.3f} at a spread of 0.01; {means[1]:.0f} at 1", "1", "",
         "holds **only where $\\sigma$ hardly changes**"],
        ["S2.1", "the bounded forms are the solution, to first order",
         f"{number('S2.1', 'rational'):.3f} of its slope", "1", "", "**does not hold**"],
    ]  # fmt: skip
    rows = [[*row[:2], row[-1], *row[2:-1]] for row in rows]  # the verdict first, then numbers
    table = markdown(["claim", "in words", "verdict", "measured", "bound", "slack"], rows)
    return table.replace("---:", "---")  # some cells are sentences, whose lines must break


SAMPLES = {
    "normal samples": "normal",
    "exponential samples, the long tail along g": "exponential, the long tail along $g$",
    "exponential samples, the long tail against g": "exponential, the long tail against $g$",
}


def own_error(saved: Saved) -> str:
    """Return how far λ depends on the error of its own batch: its progress, and its noise."""
    found: dict[str, dict[str, Saved]] = {}
    for row in saved["λ and its batch"]:
        what = "progress" if row["statement"].startswith("E[λḡ]") else "noise"
        found.setdefault(row["conditions"], {})[what] = row
    rows = []
    for about, pair in found.items():
        samples = next(said for name, said in SAMPLES.items() if f"{name}, 8" in about)
        if "of ρ" in about:
            history = about.rpartition("history: ")[2]
            first, samples = (
                f"$\\rho$, history: {history}",
                f"{samples}, standard error of $\\bar g$ 3 times $g$",
            )
        else:
            first = "$v^2$"
        cells = []
        for what in ("progress", "noise"):
            row = pair[what]
            cells.append(f"{row['measured']:.2f} ± {2 * row['error']:.2f}")
        rows.append([first, samples, *cells])
    head = ["$\\lambda$ from", "samples", "progress $\\frac{E[\\lambda\\bar g]}{E[\\lambda]g}$"]
    return markdown([*head, "noise $\\frac{E[\\lambda\\epsilon^2]}{E[\\lambda]\\sigma^2}$"], rows)
