"""All claims of the paper in one table: what is said, under which conditions, what was measured, and whether it holds.

A check says what it expects, too: that the claim holds, or, where the paper has an error, that it does not. `varreg theory` runs them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from varreg import regularizer
from varreg.theory import increments, minibatch
from varreg.theory.convergence import Measured, expectation, theorem1, theorem2
from varreg.theory.hindsight import causal
from varreg.theory.lemma1 import Paths, bound, walk, weight
from varreg.theory.optimum import objective, optimal, unbounded
from varreg.theory.problems import PROBLEMS, Noise, changing, quadratic, steady
from varreg.theory.rates import distances, exponent, theorem_s0, trade_off
from varreg.theory.same_batch import share_of_error

LAMBDA0 = regularizer.lambda0_of(regularizer.DEFAULTS["s"])


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    claim: str
    """Where it stands in the paper."""
    statement: str
    conditions: str
    measured: float
    relation: str
    """How it is claimed to relate to the bound: `≤`, `<`, `=`."""
    bound: float
    holds: bool
    error: float = 0.0
    """The standard error of what was measured; 0 where nothing was drawn at random, or an inequality was checked on every path."""
    expected: bool = True
    """Does it hold, as far as we know? False where the paper has an error, or a condition is broken on purpose."""

    @property
    def slack(self) -> float:
        """How many times the measured value the bound is; 1 is tight."""
        return self.bound / self.measured if self.measured else math.inf

    @property
    def verdict(self) -> str:
        word = "holds" if self.holds else "does not hold"
        return word if self.holds == self.expected else f"{word} – UNEXPECTED"


def _of(claim: str, statement: str, conditions: str, m: Measured, relation: str = "≤", expected: bool = True) -> Check:
    holds = m.is_equal if relation == "=" else m.is_below
    return Check(claim, statement, conditions, m.value, relation, m.claimed, holds, m.error, expected)


# Lemma 1 ---------------------------------------------------------------------------------------------------------------------------

T, RUNS = 200, 500
_t = torch.arange(1, T + 1, dtype=torch.float64)
FALLING = {"constant": torch.ones(T, dtype=torch.float64), "1/√t": _t**-0.5, "1/t": 1 / _t}
_random = torch.rand(T, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(min=0.01)
GROWING = {"growing": _t / T, "random": _random}
NOISES = [Noise(series, shape) for series in (steady(T), changing(T, 1.0)) for shape in ("normal", "exponential")]


def _tightest(pairs: Iterator[tuple[Tensor, Tensor]]) -> tuple[float, float, bool]:
    """Of all paths: the value and the bound of the one that comes nearest to its bound, and whether all stay below."""
    value, above = (torch.cat(x) for x in zip(*pairs, strict=True))
    nearest = int((above - value).argmin())
    return float(value[nearest]), float(above[nearest]), bool((value <= above + 1e-12).all())


def _walks(steps: dict[str, Tensor]) -> Iterator[tuple[Paths, Tensor]]:
    for make in PROBLEMS.values():
        problem = make()
        for relative in steps.values():
            gamma = relative / problem.L
            for noise in NOISES:
                yield walk(problem, noise, gamma, problem.minimum + 2.0, RUNS), gamma


def lemma_1() -> list[Check]:
    cases = f"3 problems, 4 kinds of noise, {RUNS} paths each; "
    said = "mean regret ≤ S_T, on every path"
    rows = []
    found = _tightest((p.criterion, bound(p, gamma, as_printed=True)) for p, gamma in _walks(FALLING))
    rows.append(_path("Lemma 1", said, f"{cases}γ constant, ∝ 1/√t, ∝ 1/t", found))
    problem = quadratic(1, 1.0, 1.0)
    gamma = torch.full((T,), 1e-6, dtype=torch.float64)
    gamma[-1] = 1.0
    example = walk(problem, Noise(steady(T, 0.0)), gamma, problem.minimum + 1.0, 1)
    found = _tightest(iter([(example.criterion, bound(example, gamma, as_printed=True))]))
    rows.append(_path("Lemma 1", said, "steps that grow: 199 of 10⁻⁶/L and one of 1/L, no noise", found, expected=False))
    growing = list(_walks(GROWING))
    found = _tightest((p.criterion, bound(p, gamma)) for p, gamma in growing)
    mended = "the same, with 1/γ₀ + Σ max(0, 1/γ_t − 1/γ_{t−1}) for 1/γ_T"
    rows.append(_path("Lemma 1, mended", mended, f"{cases}γ growing, γ random", found))
    found = _tightest((p.weighted, p.weighted_bound) for p, gamma in growing)
    rows.append(_path("Lemma 1, weighted", "regret weighted by γ_t, on every path; no M", f"{cases}γ growing, γ random", found))
    rows += _of_vr_sgd()
    return rows


def _path(claim: str, statement: str, conditions: str, found: tuple[float, float, bool], expected: bool = True) -> Check:
    value, above, holds = found
    return Check(claim, statement, conditions, value, "≤", above, holds, expected=expected)


TIMES = [2**k for k in range(5, 13)]


def first_terms() -> dict[str, list[float]]:
    """What the start costs in each version, as T grows, in units of M²/2 and 1/L: for γ ∝ 1/√t, and for VR-SGD with α = 1/(3L)."""
    lam = causal(changing(TIMES[-1], 0.5)) / 3
    falling = torch.arange(1, TIMES[-1] + 1, dtype=torch.float64) ** -0.5
    return {
        "γ ∝ 1/√t, as printed": [weight(falling[:T]) / T for T in TIMES],
        "VR-SGD, mended": [weight(lam[:T]) / T for T in TIMES],
        "VR-SGD, weighted": [1 / float(lam[:T].sum()) for T in TIMES],
    }


def _of_vr_sgd() -> list[Check]:
    terms, times = first_terms(), torch.tensor(TIMES)
    said = "what the start costs falls with T: exponent < 0"
    where = f"VR-SGD, spread of σ 0.5, T = {TIMES[0]} … {TIMES[-1]:,}"
    rows = []
    for name, expected in (("mended", False), ("weighted", True)):
        a = exponent(torch.tensor(terms[f"VR-SGD, {name}"]), 0, times)
        rows.append(Check(f"Lemma 1, {name}", said, where, a, "<", 0.0, a < -0.1, expected=expected))
    return rows


# Theorems 1 and 2 ------------------------------------------------------------------------------------------------------------------


def theorems_1_and_2() -> list[Check]:
    steps, runs, rows = 100, 4000, []
    gamma_of = torch.arange(1, steps + 1, dtype=torch.float64) ** -0.5
    for make in PROBLEMS.values():
        problem = make()
        gamma = gamma_of / problem.L
        found: list[tuple[str, Measured, Measured, Measured]] = []
        for word, series in (("steady", steady(steps, 0.5)), ("changing", changing(steps, 0.5, 0.5))):
            for shape in ("normal", "exponential"):
                noise = Noise(series, shape)
                paths = walk(problem, noise, gamma, problem.minimum + 0.5, runs)
                top = float(series.max())
                three = expectation(paths, noise, gamma, problem.L), theorem1(paths, gamma, top), theorem2(paths, problem, noise)
                found.append((f"{word}, {shape}", *three))
        where = f"{problem.name}; γ ∝ 1/√t; {{}} noise; {runs:,} runs"
        name, worst = max(((n, e) for n, e, _, _ in found), key=lambda x: abs(x[1].value - x[1].claimed) / x[1].error)
        rows.append(_of("Theorem 1", "what noise adds to E[S_T] = (1/2T)Σγ(1+Lγ)σ²", where.format(name), worst, "="))
        name, worst = min(((n, e) for n, _, e, _ in found), key=lambda x: x[1].slack)
        rows.append(_of("Theorem 1", "E[S_T] ≤ M²/(2γ_T T) + σ₀²Σγ/T", where.format(name), worst))
        name, worst = min(((n, e) for n, _, _, e in found), key=lambda x: x[1].slack)
        rows.append(_of("Theorem 2", "Var(S_T) ≤ (4M²σ̄² + η̄⁴/L²)/T", where.format(name), worst))
    return rows


def independence() -> list[Check]:
    said = "E[λε²] = E[λ]σ²: a step does not know its error"
    rows = []
    for scale_free, shape, history, expected in (
        (False, "normal", "mean", True),
        (False, "exponential", "mean", False),
        (True, "normal", "mean", False),
        (True, "normal", "harmonic", False),
    ):
        found = share_of_error(scale_free, shape, 3.0 if scale_free else 1.0, history=history)  # type: ignore[arg-type]
        of = "ρ = v²/ḡ², standard error of ḡ 3 times the gradient" if scale_free else "v²"
        where = f"λ of {of}; {shape} samples, 8 a batch; history: {history}"
        rows.append(_of("Theorem 1, for VR-SGD", said, where, found, "=", expected))
    return rows


# S0, its corollary, the trade-off --------------------------------------------------------------------------------------------------


def rates() -> list[Check]:
    rows, steps = [], 400
    problem = quadratic(5, 1.0, 0.5)
    found = distances(problem, Noise(changing(steps, 0.5)), problem.minimum + 1.0, 2000)
    at = 1 + int((theorem_s0(found, problem.l, as_printed=True) / found.mean)[1:].argmin())
    value, error = float(found.mean[at]), float(found.error[at])
    above = float(theorem_s0(found, problem.l, as_printed=True)[at])
    said = "E[R_t] ≤ max{R₁, G²/l²}/t"
    where = f"quadratic, σ² changing, γ = 1/(tl), 2,000 runs; t = {at + 1}, the tightest of 2 … {steps}"
    rows.append(Check("Theorem S0", said, where, value, "≤", above, value <= above + 3 * error, error))
    one = quadratic(1, 1.0, 1.0)
    once = distances(one, Noise(torch.tensor([1.0, *[0.0] * 9])), one.minimum, 20_000)
    value, error = float(once.mean[1]), float(once.error[1])
    for as_printed in (True, False):
        above = float(theorem_s0(once, 1.0, as_printed)[1])
        claim, words = ("Theorem S0", said) if as_printed else ("Theorem S0, mended", "E[R_t] ≤ max{R₁, 2G²/l²}/t")
        where = "start at x*, noise at the first step only; t = 2"
        rows.append(Check(claim, words, where, value, "≤", above, value <= above + 3 * error, error, expected=not as_printed))
    a = exponent(found.mean, 50)
    rows.append(Check("Theorem S0", "E[R_t] falls as 1/t: exponent", "the same quadratic", a, "=", -1.0, abs(a + 1) < 0.25))
    same = quadratic(5, 1.0, 1.0)
    found = distances(same, Noise(steady(steps)), same.minimum + 1.0, 2000)
    for word, series, expected in (("one step, given the last", found.one_step, True), ("whole runs", found.variance, False)):
        a = exponent(series, 50)
        said = "Var(R_t) falls faster than γ² ∝ t^−2: exponent"
        rows.append(Check("Corollary of S0", said, f"quadratic, {word}", a, "<", -2.0, a < -2.3, expected=expected))
    return rows


ALPHAS = (0.2, 0.35, 0.5, 0.65, 0.8)


def trade_off_of(alpha: float) -> tuple[list[int], list[float], list[float]]:
    """T, and the two terms of E[S_T]."""
    times = [10**k for k in range(2, 8)]
    start, noise = zip(*(trade_off(alpha, T) for T in times), strict=True)
    return times, list(start), list(noise)


def trade_offs() -> list[Check]:
    rows = []
    for alpha in ALPHAS:
        times, *terms = trade_off_of(alpha)
        t = torch.tensor(times)
        for which, values, predicted in zip(("start", "noise"), terms, (alpha - 1, -alpha), strict=True):
            a = exponent(torch.tensor(values), 2, t)
            where = f"γ = t^−{alpha:g}/L, T = 10⁴ … 10⁷"
            said = f"what the {which} costs falls as T^{'(α−1)' if which == 'start' else '−α'}: exponent"
            rows.append(Check("Trade-off", said, where, a, "=", predicted, abs(a - predicted) < 0.05))
    return rows


# S2.2, S2.4 ------------------------------------------------------------------------------------------------------------------------


def mini_batches() -> list[Check]:
    rows = []
    for m, replace in ((2, True), (5, True), (16, True), (16, False)):
        found = minibatch.ratio(m, 1500, replace)
        how = "independent samples" if replace else "16 of 40 samples, without replacement"
        where = f"a small network, batches of {m}, {how}; measured by the engine"
        holds = abs(found.value - (m - 1)) <= 4 * found.error
        said = "E[v²]/σ² = m − 1"
        rows.append(Check("S2.2", said, where, found.value, "=", m - 1.0, holds, found.error, expected=replace))
    return rows


def increment_variances() -> list[Check]:
    said = "predicted over true variance of the increment"
    rows = []
    for case, version, noise, tolerance, expected in (
        ("SGD, momentum 0.9", None, 1.0, 0.06, True),
        ("SGD, Nesterov 0.9", None, 1.0, 0.06, True),
        ("Adam", "direct", 0.03, 0.08, True),
        ("Adam", "direct", 1.0, 0.15, True),
        ("Adam", "simplified", 0.03, 0.08, False),
        ("Adam, β₂ 0.9", "simplified", 0.03, 0.08, False),
    ):
        ratios = increments.predicted_over_observed(case, noise, version, runs=4000, steps=40)[20:]
        value = math.exp(sum(map(math.log, ratios)) / len(ratios))
        kind = "exact" if version is None else f"{version} version"
        where = f"{case}, {kind}; standard error of ḡ {noise:g} times the gradient"
        rows.append(Check("S2.4", said, where, value, "=", 1.0, abs(value - 1) < tolerance, 0.01, expected))
    return rows


# The problem in full ---------------------------------------------------------------------------------------------------------------

SPREADS = [0.01 * 10 ** (k / 4) for k in range(9)]


def theorem_3_errors() -> list[tuple[float, float, float]]:
    """For each spread of σ: mean λ − 1 of Theorem 3's solution, and how much larger its Q is than the optimum's at the same mean λ."""
    out = []
    for spread in SPREADS:
        sigma2 = changing(20_000, spread)
        lam = regularizer.affine(sigma2, sigma2.mean(), regularizer.DEFAULTS["s"])
        mean = float(lam.mean())
        scaled, best = ((x.clamp(min=0)) for x in (lam / mean, optimal(sigma2, LAMBDA0)))
        scaled = scaled / scaled.mean()
        out.append((spread, mean - 1, float(objective(scaled, sigma2, LAMBDA0) / objective(best, sigma2, LAMBDA0)) - 1))
    return out


def the_problem() -> list[Check]:
    rows = []
    sigma2 = changing(1_000_000, 1.0)
    lam = optimal(sigma2, LAMBDA0, 0.1, 3.0)
    off = abs(float(lam.sum()) - len(lam)) / len(lam)
    where = "a million steps, spread of σ 1, λ in [0.1, 3]"
    rows.append(Check("The problem in full", "the solver meets Σλ = T", where, off, "≤", 1e-12, off <= 1e-12))
    mild = changing(10_000, 0.05)
    gap = float((optimal(mild, LAMBDA0) - unbounded(mild, LAMBDA0)).abs().max())
    said = "without bounds, λ = (1+λ₀/2)σ̃²/σ_t² − λ₀/2"
    rows.append(Check("S1.5", said, "against the solver, spread 0.05", gap, "≤", 1e-12, gap <= 1e-12))
    errors = theorem_3_errors()
    spread, over = (torch.tensor([e[i] for e in errors if e[0] <= 0.1 + 1e-9]) for i in (0, 1))
    a = exponent(over, 0, spread)
    said = "with σ̄² for σ̃², mean λ − 1 is of second order in the spread of σ: exponent"
    rows.append(Check("Theorem 3", said, "spread 0.01 … 0.1", a, "=", 2.0, abs(a - 2) < 0.1))
    for at, mean in ((errors[0][0], errors[0][1]), (errors[-1][0], errors[-1][1])):
        said = "Σλ = T: mean λ"
        rows.append(Check("Theorem 3", said, f"spread {at:g}", 1 + mean, "=", 1.0, abs(mean) < 0.01, expected=at < 0.5))
    for form in ("sigmoid", "rational"):
        slopes = [_slope(f) for f in (form, "affine")]
        said = "to first order, the bounded form is the solution: ratio of slopes at σ² = σ̄²"
        share = slopes[0] / slopes[1]
        rows.append(Check("S2.1", said, f"{form}, s = 2", share, "=", 1.0, abs(share - 1) < 0.01, expected=False))
    return rows


def _slope(form: str) -> float:
    """−dλ/dr at r = σ²/σ̄² = 1."""
    r = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    function = {"rational": regularizer.rational, "sigmoid": _sigmoid, "affine": _affine}[form]
    (slope,) = torch.autograd.grad(function(r, torch.ones_like(r), regularizer.DEFAULTS["s"]).sum(), r)
    return -float(slope)


def _affine(rho: Tensor, rho_bar: Tensor, s: float) -> Tensor:
    half = regularizer.lambda0_of(s) / 2
    return (1 + half) * rho_bar / rho - half


def _sigmoid(rho: Tensor, rho_bar: Tensor, s: float) -> Tensor:
    return (1 + 1 / math.e) * torch.sigmoid(_affine(rho, rho_bar, s))


CHECKS: dict[str, Callable[[], list[Check]]] = {
    "Lemma 1": lemma_1,
    "Theorems 1 and 2": theorems_1_and_2,
    "λ and its batch": independence,
    "Theorem S0 and its corollary": rates,
    "The trade-off": trade_offs,
    "S2.2": mini_batches,
    "S2.4": increment_variances,
    "The problem in full": the_problem,
}
