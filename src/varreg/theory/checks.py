"""All claims of the paper in one table: what is said, under which conditions, what was measured, and whether it holds.

A check says what it expects, too: that the claim holds, or, where the paper has an error, that it does not. `varreg theory` runs them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from varreg import regularizer
from varreg.theory import increments, minibatch
from varreg.theory.convergence import Measured, expectation, theorem1, theorem2
from varreg.theory.hindsight import at_mean_one, causal
from varreg.theory.lemma1 import Paths, bound, walk, weight
from varreg.theory.optimum import objective, optimal, unbounded
from varreg.theory.problems import PROBLEMS, SHAPES, Noise, changing, quadratic, steady
from varreg.theory.rates import distances, exponent, theorem_s0, trade_off
from varreg.theory.same_batch import own_batch

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

T, RUNS = 200, 200
_t = torch.arange(1, T + 1, dtype=torch.float64)
FALLING = {"constant": torch.ones(T, dtype=torch.float64), "1/√t": _t**-0.5, "1/t": 1 / _t}
_random = torch.rand(T, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(min=0.01)
GROWING = {"growing": _t / T, "random": _random}
NOISES = [Noise(series, shape) for series in (steady(T), changing(T, 1.0)) for shape in ("normal", "exponential")]


def _tightest(pairs: Iterator[tuple[Tensor, Tensor]]) -> tuple[float, float, bool]:
    """Of all paths: the value and the bound of the one whose bound is the fewest times its value, and whether all stay below."""
    value, above = (torch.cat(x) for x in zip(*pairs, strict=True))
    nearest = int((above / value).argmin())
    return float(value[nearest]), float(above[nearest]), bool((value <= above + 1e-12).all())


def _walks(steps: dict[str, Tensor]) -> Iterator[tuple[Paths, Tensor]]:
    for make in PROBLEMS.values():
        problem = make()
        for relative in steps.values():
            gamma = relative / problem.L
            for noise in NOISES:
                yield walk(problem, noise, gamma, problem.minimum + 2.0, RUNS), gamma


def lemma_1() -> list[Check]:
    cases = f"convex, M each path's reach; 3 problems, 4 kinds of noise, {RUNS} paths each; γ ≤ 1/L, "
    said = "mean regret ≤ S_T, on every path"
    rows = []
    found = _tightest((p.criterion, bound(p, gamma, as_printed=True)) for p, gamma in _walks(FALLING))
    rows.append(_path("Lemma 1", said, f"{cases}constant, ∝ 1/√t, ∝ 1/t", found))
    problem = quadratic(1, 1.0, 1.0)
    gamma = torch.full((T,), 1e-6, dtype=torch.float64)
    gamma[-1] = 1.0
    example = walk(problem, Noise(steady(T, 0.0)), gamma, problem.minimum + 1.0, 1)
    found = _tightest(iter([(example.criterion, bound(example, gamma, as_printed=True))]))
    rows.append(_path("Lemma 1", said, "steps that grow: 199 of 10⁻⁶/L and one of 1/L, no noise", found, expected=False))
    growing = list(_walks(GROWING))
    found = _tightest((p.criterion, bound(p, gamma)) for p, gamma in growing)
    mended = "the same, with 1/γ₀ + Σ max(0, 1/γ_t − 1/γ_{t−1}) for 1/γ_T"
    rows.append(_path("Lemma 1, mended", mended, f"{cases}growing, random", found))
    found = _tightest((p.weighted, p.weighted_bound) for p, gamma in growing)
    rows.append(_path("Lemma 1, weighted", "regret weighted by γ_t, on every path; no M", f"{cases}growing, random", found))
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
    said = "what the start costs falls at least as T^−½, as with γ ∝ 1/√t: exponent"
    where = f"VR-SGD, α = 1/(3L), spread of σ 0.5, T = {TIMES[0]} … {TIMES[-1]:,}"
    rows = []
    for name, expected in (("mended", False), ("weighted", True)):
        a = exponent(torch.tensor(terms[f"VR-SGD, {name}"]), 0, times)
        rows.append(Check(f"Lemma 1, {name}", said, where, a, "≤", -0.5, a <= -0.5, expected=expected))
    return rows


# Theorems 1 and 2 ------------------------------------------------------------------------------------------------------------------


def theorems_1_and_2() -> list[Check]:
    steps, runs, rows = 100, 4000, []
    gamma_of = torch.arange(1, steps + 1, dtype=torch.float64) ** -0.5
    for seed, make in enumerate(PROBLEMS.values()):
        problem = make()
        gamma = gamma_of / problem.L
        found: list[tuple[str, Measured, Measured, Measured]] = []
        for word, series in (("steady", steady(steps, 0.5)), ("changing", changing(steps, 0.5, 0.5))):
            for shape in SHAPES:
                noise = Noise(series, shape)
                paths = walk(problem, noise, gamma, problem.minimum + 0.5, runs, seed)
                three = (
                    expectation(paths, noise, gamma, problem.L),
                    theorem1(paths, gamma, float(series.max())),
                    theorem2(paths, problem, noise),
                )
                found.append((f"{word}, {shape}", *three))
        where = f"{problem.name}, γ = 1/(L√t), E[ε] = 0; {{}} noise; {runs:,} runs"
        name, worst = max(((n, e) for n, e, _, _ in found), key=lambda x: abs(x[1].value - x[1].claimed) / x[1].error)
        rows.append(_of("Theorem 1", "what noise adds to E[S_T] = (1/2T)Σγ(1+Lγ)σ²", where.format(name), worst, "="))
        name, worst = min(((n, e) for n, _, e, _ in found), key=lambda x: x[1].slack)
        rows.append(_of("Theorem 1", "what noise adds to E[S_T] ≤ σ₀²Σγ/T", where.format(name), worst))
        name, worst = min(((n, e) for n, _, _, e in found), key=lambda x: x[1].slack)
        rows.append(_of("Theorem 2", "Var(S_T) ≤ (4M²σ̄² + η̄⁴/L²)/T", where.format(name), worst))
    far, noise = quadratic(1, 1.0, 1.0), Noise(steady(steps, 0.01))
    paths = walk(far, noise, torch.full((steps,), 0.001, dtype=torch.float64), far.minimum + 10.0, runs)
    where = f"quadratic, one dimension, far from x*, γ = 0.001/L; {runs:,} runs: as tight as we could make it"
    rows.append(_of("Theorem 2", "Var(S_T) ≤ (4M²σ̄² + η̄⁴/L²)/T", where, theorem2(paths, far, noise)))
    return rows


def independence() -> list[Check]:
    rows = []
    for scale_free, shape, along, history, expected in (
        (False, "normal", True, "mean", True),
        (False, "exponential", True, "mean", False),
        (False, "exponential", False, "mean", False),
        (True, "normal", True, "mean", False),
        (True, "normal", True, "harmonic", False),
    ):
        found = own_batch(scale_free, shape, along, 3.0 if scale_free else 1.0, history=history)  # type: ignore[arg-type]
        of = "ρ = v²/ḡ², ḡ's standard error 3 times g" if scale_free else "v², ḡ's standard error as large as g"
        tail = "" if shape == "normal" else f", the long tail {'along' if along else 'against'} g"
        where = f"λ of {of}; {shape} samples{tail}, 8 a batch; history: {history}"
        rows.append(
            _of(
                "Theorem 1, for VR-SGD", "E[λḡ]/(E[λ]g) = 1: a step does not know its error", where, found.progress, "=", expected
            )
        )
        rows.append(_of("Theorem 1, for VR-SGD", "E[λε²]/(E[λ]σ²) = 1", where, found.noise, "=", expected))
    return rows


# S0, its corollary, the trade-off --------------------------------------------------------------------------------------------------


def rates() -> list[Check]:
    rows, steps, said = [], 400, "E[R_t] ≤ max{R₁, G²/l²}/t"
    problem = quadratic(5, 1.0, 0.5)
    found = distances(problem, Noise(changing(steps, 0.5)), problem.minimum + 1.0, 2000)
    at = 1 + int((theorem_s0(found, problem.l, as_printed=True) / found.mean)[1:].argmin())
    value, error = float(found.mean[at]), float(found.error[at])
    above = float(theorem_s0(found, problem.l, as_printed=True)[at])
    where = f"quadratic, σ² changing, γ = 1/(tl), 2,000 runs; t = {at + 1}, the tightest of 2 … {steps}"
    rows.append(Check("Theorem S0", said, where, value, "≤", above, value <= above + 3 * error, error))
    one = quadratic(1, 1.0, 1.0)
    once = distances(one, Noise(torch.tensor([1.0, *[0.0] * 9])), one.minimum, 20_000)
    value, error = float(once.mean[1]), float(once.error[1])
    above = float(theorem_s0(once, 1.0, as_printed=True)[1])
    where = "start at x*, noise at the first step only; t = 2"
    rows.append(Check("Theorem S0", said, where, value, "≤", above, value <= above + 3 * error, error, expected=False))
    rows.append(_mended_s0())
    exponents = [
        exponent(distances(problem, Noise(changing(steps, 0.5)), problem.minimum + 1.0, 500, seed).mean, 50) for seed in range(8)
    ]
    a = _mean(exponents)
    rows.append(
        _of("Theorem S0", "E[R_t] falls at least as 1/t: exponent", "the same quadratic, t = 50 … 400", replace(a, claimed=-1.0))
    )
    return rows + _corollary()


def _mended_s0() -> Check:
    """The tightest of many cases, at all t; G² is measured on other runs than E[R_t]."""
    cases: list[tuple[float, float, float]] = []
    for make in PROBLEMS.values():
        problem = make()
        for start in (0.0, 1.0):
            for series in (steady(40), changing(40, 1.0), torch.tensor([1.0, *[0.0] * 39])):
                for shape in SHAPES:
                    found, other = (
                        distances(problem, Noise(series, shape), problem.minimum + start, 1000, seed) for seed in (0, 1)
                    )
                    above = theorem_s0(other, problem.l)
                    for value, error, bound_ in zip(found.mean.tolist(), found.error.tolist(), above.tolist(), strict=True):
                        if value > 0:
                            cases.append((value, error, bound_))
    value, error, above_ = min(cases, key=lambda c: c[2] / c[0])
    where = "3 problems, 2 starts, 6 kinds of noise, t = 1 … 40, 1,000 runs each; the tightest"
    holds = all(v <= b * (1 + 0.1) + 3 * e for v, e, b in cases)  # G² has a standard error of its own
    return Check("Theorem S0, mended", "E[R_t] ≤ 2G²/(l²t)", where, value, "≤", above_, holds, error)


def _corollary() -> list[Check]:
    same, steps, rows = quadratic(5, 1.0, 1.0), 400, []
    runs = [distances(same, Noise(steady(steps)), same.minimum + 1.0, 500, seed) for seed in range(8)]
    before = torch.arange(
        0, steps, dtype=torch.float64
    )  # steps that were taken: for l = L, x_t − x* is the mean of so many errors
    said = "Var(R_t) falls faster than γ² ∝ t^−2: exponent"
    for word, which, expected in (("one step, given the last", "one_step", True), ("whole runs", "variance", False)):
        a = _mean([exponent(getattr(r, which), 50, before) for r in runs])
        where = f"quadratic with l = L, {word}; t = 50 … {steps}, 8 × 500 runs"
        rows.append(
            Check("Corollary of S0", said, where, a.value, "<", -2.0, a.value < -2 - 4 * a.error, a.error, expected=expected)
        )
    return rows


def _mean(values: list[float]) -> Measured:
    x = torch.tensor(values, dtype=torch.float64)
    return Measured(float(x.mean()), float(x.std() / len(x) ** 0.5), math.nan)


ALPHAS = (0.2, 0.35, 0.5, 0.65, 0.8)


def trade_off_of(alpha: float) -> tuple[list[int], list[float], list[float]]:
    """T, and the two terms of E[S_T]."""
    times = [10**k for k in range(2, 8)]
    start, noise = zip(*(trade_off(alpha, T) for T in times), strict=True)
    return times, list(start), list(noise)


def trade_offs() -> list[Check]:
    """The exponent of the noise's cost by its formula, for long runs; and the formula, for short ones, by many runs."""
    rows, steps, problem = [], 2000, quadratic(1, 1.0, 1.0)
    for alpha in ALPHAS:
        times, _, values = trade_off_of(alpha)
        a = exponent(torch.tensor(values), 2, torch.tensor(times))
        where = f"evaluated for γ = t^−{alpha:g}/L, steady noise, T = 10⁴ … 10⁷; the start's is α − 1 to the letter"
        rows.append(Check("Trade-off", "what noise costs falls as T^−α: exponent", where, a, "=", -alpha, abs(a + alpha) < 0.05))
    for alpha in ALPHAS:
        gamma = torch.arange(1, steps + 1, dtype=torch.float64) ** -alpha
        paths = walk(problem, Noise(steady(steps)), gamma, problem.minimum + 1.0, 1000)
        measured = expectation(paths, Noise(steady(steps)), gamma, problem.L)
        assert abs(measured.claimed - trade_off(alpha, steps)[1]) < 1e-9 * measured.claimed
        where = f"measured for γ = t^−{alpha:g}/L, T = {steps:,}, 1,000 runs of a quadratic"
        rows.append(_of("Trade-off", "what noise costs is what the formula says", where, measured, "="))
    return rows


# S2.2, S2.4 ------------------------------------------------------------------------------------------------------------------------


def mini_batches() -> list[Check]:
    rows = []
    for m, independent in ((2, True), (5, True), (16, True), (16, False)):
        found = minibatch.ratio(m, 1500, independent)
        how = "independent samples" if independent else "16 of 40 samples, without replacement"
        where = f"a small network, batches of {m}, {how}; measured by the engine"
        holds = abs(found.value - (m - 1)) <= 4 * found.error
        said = "E[v²]/σ² = m − 1"
        rows.append(Check("S2.2", said, where, found.value, "=", m - 1.0, holds, found.error, expected=independent))
    return rows


def increment_variances() -> list[Check]:
    runs, rows = 4000, []
    error = math.sqrt(2 / runs)  # of one step's observed variance; the mean over steps has less
    for case, version, noise, expected in (
        ("SGD, momentum 0.9", None, 1.0, True),
        ("SGD, Nesterov 0.9", None, 1.0, True),
        ("Adam", "direct", 0.03, True),
        ("Adam", "direct", 1.0, True),
        ("Adam, β₂ 0.9", "direct", 0.3, False),
        ("Adadelta", "direct", 0.03, False),
        ("Adam", "simplified", 0.03, False),
        ("Adam, β₂ 0.9", "simplified", 0.03, False),
    ):
        ratios = increments.predicted_over_observed(case, noise, version, runs=runs, steps=40)[20:]
        value = math.exp(sum(map(math.log, ratios)) / len(ratios))
        tolerance = 4 * error if version is None else 0.15
        kind = "exact" if version is None else f"{version} version"
        said = "predicted over true variance of the increment = 1" + ("" if version is None else ", to 15 %")
        where = f"{case}, {kind}; ḡ's standard error {noise:g} times g"
        rows.append(Check("S2.4", said, where, value, "=", 1.0, abs(value - 1) < tolerance, value * error, expected))
    return rows


# The problem in full ---------------------------------------------------------------------------------------------------------------

SPREADS = [0.01 * 10 ** (k / 4) for k in range(9)]


def theorem_3_errors() -> list[tuple[float, float, float]]:
    """For each spread of σ: mean λ − 1 of Theorem 3's solution; and how much larger than the optimum's its Q is at a mean λ of 1."""
    out = []
    for spread in SPREADS:
        sigma2 = changing(20_000, spread)
        lam = regularizer.affine(sigma2, sigma2.mean(), regularizer.DEFAULTS["s"])
        best = optimal(sigma2, LAMBDA0, high=LAMBDA0)
        kept = at_mean_one(lam.clamp(min=0), LAMBDA0)
        excess = float(objective(kept, sigma2, LAMBDA0) / objective(best, sigma2, LAMBDA0)) - 1
        out.append((spread, float(lam.mean()) - 1, excess))
    return out


def the_problem() -> list[Check]:
    rows = []
    sigma2, low, high = changing(1_000_000, 1.0), 0.1, 3.0
    lam = optimal(sigma2, LAMBDA0, low, high)
    where = "a million steps, spread of σ 1, λ in [0.1, 3]"
    off = abs(float(lam.sum()) - len(lam)) / len(lam)
    rows.append(Check("The problem in full", "the solver meets Σλ = T", where, off, "≤", 1e-12, off <= 1e-12))
    off = _kkt(lam, sigma2, low, high)
    rows.append(
        Check(
            "The problem in full",
            "its marginal costs are equal inside, and in order at the bounds",
            where,
            off,
            "≤",
            1e-12,
            off <= 1e-12,
        )
    )
    mild = changing(10_000, 0.05)
    gap = float((optimal(mild, LAMBDA0) - unbounded(mild, LAMBDA0)).abs().max())
    said = "without bounds, λ = (1+λ₀/2)σ̃²/σ_t² − λ₀/2"
    rows.append(Check("S1.5", said, "against the solver, spread 0.05", gap, "≤", 1e-12, gap <= 1e-12))
    errors = theorem_3_errors()
    spread, over, excess = (torch.tensor([e[i] for e in errors if e[0] <= 0.1 + 1e-9]) for i in range(3))
    for said, values, predicted in (
        ("with σ̄² for σ̃², mean λ − 1 is of second order in the spread of σ: exponent", over, 2.0),
        ("its Q at a mean λ of 1 is that of the optimum, but for sixth order: exponent", excess, 6.0),
    ):
        a = exponent(values, 2, spread)
        rows.append(Check("Theorem 3", said, "spread 0.03 … 0.1", a, "=", predicted, abs(a - predicted) < 0.1 * predicted))
    for at, mean in ((errors[0][0], errors[0][1]), (errors[-1][0], errors[-1][1])):
        said = "Σλ = T: mean λ"
        rows.append(Check("Theorem 3", said, f"spread {at:g}", 1 + mean, "=", 1.0, abs(mean) < 0.01, expected=at < 0.5))
    solution = _slope(regularizer.affine)
    for form in (regularizer.sigmoid, regularizer.rational):
        said = "to first order, the bounded form is the solution: ratio of slopes at σ² = σ̄²"
        share = _slope(form) / solution
        rows.append(Check("S2.1", said, f"{form.__name__}, s = 2", share, "=", 1.0, abs(share - 1) < 0.01, expected=False))
    return rows


def _kkt(lam: Tensor, sigma2: Tensor, low: float, high: float) -> float:
    """By how much, relative to ξ, the conditions for an optimum are missed: (1 + 2λ/λ₀)σ² = ξ inside, not less at λ_min, not more at λ_max."""
    marginal = (1 + 2 * lam / LAMBDA0) * sigma2
    inside = (lam > low) & (lam < high)
    if not inside.any():
        return math.inf
    xi = float(marginal[inside].median())
    wrong = torch.where(lam <= low, (xi - marginal).clamp(min=0), (marginal - xi).abs())
    wrong = torch.where(lam >= high, (marginal - xi).clamp(min=0), wrong)
    return float(wrong.max()) / xi


def _slope(form: Callable[[Tensor, Tensor, float], Tensor], h: float = 1e-5) -> float:
    """−dλ/dr at r = σ²/σ̄² = 1."""
    r = torch.tensor([1 - h, 1 + h], dtype=torch.float64)
    below, above = form(r, torch.ones_like(r), regularizer.DEFAULTS["s"]).tolist()
    return float(below - above) / (2 * h)


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
