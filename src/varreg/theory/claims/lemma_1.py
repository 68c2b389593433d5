"""Checks of Lemma 1 as printed, corrected and weighted, along many paths of SGD.
(`theory/lemma1.py` computes the bounds.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from varreg.theory.claims.claim import Check
from varreg.theory.hindsight import causal
from varreg.theory.lemma1 import Paths, bound, walk, weight
from varreg.theory.problems import PROBLEMS, Noise, changing, quadratic, steady
from varreg.theory.rates import exponent

T, RUNS = 200, 200
_t = torch.arange(1, T + 1, dtype=torch.float64)
FALLING = {"constant": torch.ones(T, dtype=torch.float64), "1/√t": _t**-0.5, "1/t": 1 / _t}
_random = torch.rand(T, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(
    min=0.01
)
GROWING = {"growing": _t / T, "random": _random}
NOISES = [
    Noise(series, shape)
    for series in (steady(T), changing(T, 1.0))
    for shape in ("normal", "exponential")
]


def _tightest(pairs: Iterator[tuple[Tensor, Tensor]]) -> tuple[float, float, bool]:
    """Return value and bound of the path with the smallest ratio of bound to value, and whether all
    paths are below their bounds.
    """
    value, above = (torch.cat(x) for x in zip(*pairs, strict=True))
    nearest = int((above / value).argmin())
    return float(value[nearest]), float(above[nearest]), bool((value <= above + 1e-12).all())


def _walks(steps: dict[str, Tensor]) -> Iterator[tuple[Paths, Tensor]]:
    """Yield the paths of every problem, step size and noise, with the steps."""
    for make in PROBLEMS.values():
        problem = make()
        for relative in steps.values():
            gamma = relative / problem.L
            for noise in NOISES:
                yield walk(problem, noise, gamma, problem.minimum + 2.0, RUNS), gamma


def lemma_1() -> list[Check]:
    """Check the lemma as printed, where it fails, and the two versions that hold."""
    cases = (
        f"convex, M each path's reach; 3 problems, 4 kinds of noise, {RUNS} paths each; γ ≤ 1/L, "
    )
    said = "mean regret ≤ S_T, on every path"
    rows = []
    tightest = _tightest(
        (p.criterion, bound(p, gamma, as_printed=True)) for p, gamma in _walks(FALLING)
    )
    rows.append(_path("Lemma 1", said, f"{cases}constant, ∝ 1/√t, ∝ 1/t", tightest))
    problem = quadratic(1, 1.0, 1.0)
    gamma = torch.full((T,), 1e-6, dtype=torch.float64)
    gamma[-1] = 1.0
    example = walk(problem, Noise(steady(T, 0.0)), gamma, problem.minimum + 1.0, 1)
    tightest = _tightest(iter([(example.criterion, bound(example, gamma, as_printed=True))]))
    rows.append(
        _path(
            "Lemma 1",
            said,
            "steps that grow: 199 of 10⁻⁶/L and one of 1/L, no noise",
            tightest,
            expected=False,
        )
    )
    growing = list(_walks(GROWING))
    tightest = _tightest((p.criterion, bound(p, gamma)) for p, gamma in growing)
    mended = "the same, with 1/γ₀ + Σ max(0, 1/γ_t − 1/γ_{t−1}) for 1/γ_T"
    rows.append(_path("Lemma 1, mended", mended, f"{cases}growing, random", tightest))
    tightest = _tightest((p.weighted, p.weighted_bound) for p, gamma in growing)
    rows.append(
        _path(
            "Lemma 1, weighted",
            "regret weighted by γ_t, on every path; no M",
            f"{cases}growing, random",
            tightest,
        )
    )
    rows += _of_vr_sgd()
    return rows


def _path(
    claim: str,
    statement: str,
    conditions: str,
    tightest: tuple[float, float, bool],
    expected: bool = True,
) -> Check:
    """Return the check of an inequality on every path."""
    value, above, holds = tightest
    return Check(claim, statement, conditions, value, "≤", above, holds, expected=expected)


TIMES = [2**k for k in range(5, 13)]


def first_terms() -> dict[str, list[float]]:
    """Return the term of the start in each version, over T, in units of M²/2 and 1/L: for γ ∝ 1/√t,
    and for VR-SGD with α = 1/(3L).
    """
    lam = causal(changing(TIMES[-1], 0.5)) / 3
    falling = torch.arange(1, TIMES[-1] + 1, dtype=torch.float64) ** -0.5
    return {
        "γ ∝ 1/√t, as printed": [weight(falling[:T]) / T for T in TIMES],
        "VR-SGD, mended": [weight(lam[:T]) / T for T in TIMES],
        "VR-SGD, weighted": [1 / float(lam[:T].sum()) for T in TIMES],
    }


def _of_vr_sgd() -> list[Check]:
    """Check how the term of the start falls for VR-SGD, whose steps grow at times."""
    terms, times = first_terms(), torch.tensor(TIMES)
    said = "what the start costs falls at least as T^−½, as with γ ∝ 1/√t: exponent"
    where = f"VR-SGD, α = 1/(3L), spread of σ 0.5, T = {TIMES[0]} … {TIMES[-1]:,}"
    rows = []
    for name, expected in (("mended", False), ("weighted", True)):
        a = exponent(torch.tensor(terms[f"VR-SGD, {name}"]), 0, times)
        rows.append(
            Check(f"Lemma 1, {name}", said, where, a, "≤", -0.5, a <= -0.5, expected=expected)
        )
    return rows
