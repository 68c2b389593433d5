"""Theorems 1 and 2, and whether VR-SGD meets their condition: a step independent of its error."""

from __future__ import annotations

from typing import Any

import torch

from varreg.theory.claims.claim import Check, check_of
from varreg.theory.convergence import Measured, expectation, theorem1, theorem2
from varreg.theory.lemma1 import walk
from varreg.theory.problems import PROBLEMS, SHAPES, Noise, changing, quadratic, steady
from varreg.theory.same_batch import own_batch


def theorems_1_and_2() -> list[Check]:
    """Check expectation and variance of S_T, over many runs."""
    steps, runs, rows = 100, 4000, []
    gamma_of = torch.arange(1, steps + 1, dtype=torch.float64) ** -0.5
    for seed, make in enumerate(PROBLEMS.values()):
        problem = make()
        gamma = gamma_of / problem.L
        cases: list[tuple[str, Measured, Measured, Measured]] = []
        for word, series in (
            ("steady", steady(steps, 0.5)),
            ("changing", changing(steps, 0.5, 0.5)),
        ):
            for shape in SHAPES:
                noise = Noise(series, shape)
                paths = walk(problem, noise, gamma, problem.minimum + 0.5, runs, seed)
                three = (
                    expectation(paths, noise, gamma, problem.L),
                    theorem1(paths, gamma, float(series.max())),
                    theorem2(paths, problem, noise),
                )
                cases.append((f"{word}, {shape}", *three))
        where = f"{problem.name}, γ = 1/(L√t), E[ε] = 0; {{}} noise; {runs:,} runs"
        name, worst = max(
            ((n, e) for n, e, _, _ in cases),
            key=lambda x: abs(x[1].value - x[1].claimed) / x[1].error,
        )
        rows.append(
            check_of(
                "Theorem 1",
                "what noise adds to E[S_T] = (1/2T)Σγ(1+Lγ)σ²",
                where.format(name),
                worst,
                "=",
            )
        )
        name, worst = min(((n, e) for n, _, e, _ in cases), key=lambda x: x[1].slack)
        rows.append(
            check_of("Theorem 1", "what noise adds to E[S_T] ≤ σ₀²Σγ/T", where.format(name), worst)
        )
        name, worst = min(((n, e) for n, _, _, e in cases), key=lambda x: x[1].slack)
        rows.append(
            check_of("Theorem 2", "Var(S_T) ≤ (4M²σ̄² + η̄⁴/L²)/T", where.format(name), worst)
        )
    far, noise = quadratic(1, 1.0, 1.0), Noise(steady(steps, 0.01))
    paths = walk(
        far, noise, torch.full((steps,), 0.001, dtype=torch.float64), far.minimum + 10.0, runs
    )
    where = (
        f"quadratic, one dimension, far from x*, γ = 0.001/L; {runs:,} runs: as tight as we could "
        "make it"
    )
    rows.append(
        check_of("Theorem 2", "Var(S_T) ≤ (4M²σ̄² + η̄⁴/L²)/T", where, theorem2(paths, far, noise))
    )
    return rows


def independence() -> list[Check]:
    """Check whether λ is independent of the error of its batch."""
    rows = []
    for scale_free, shape, along, history, expected in (
        (False, "normal", True, "mean", True),
        (False, "exponential", True, "mean", False),
        (False, "exponential", False, "mean", False),
        (True, "normal", True, "mean", False),
        (True, "normal", True, "harmonic", False),
    ):
        kind: Any = history
        ratios = own_batch(scale_free, shape, along, 3.0 if scale_free else 1.0, history=kind)
        of = (
            "ρ = v²/ḡ², ḡ's standard error 3 times g"
            if scale_free
            else "v², ḡ's standard error as large as g"
        )
        tail = "" if shape == "normal" else f", the long tail {'along' if along else 'against'} g"
        where = f"λ of {of}; {shape} samples{tail}, 8 a batch; history: {history}"
        rows.append(
            check_of(
                "Theorem 1, for VR-SGD",
                "E[λḡ]/(E[λ]g) = 1: a step does not know its error",
                where,
                ratios.progress,
                "=",
                expected,
            )
        )
        rows.append(
            check_of(
                "Theorem 1, for VR-SGD", "E[λε²]/(E[λ]σ²) = 1", where, ratios.noise, "=", expected
            )
        )
    return rows
