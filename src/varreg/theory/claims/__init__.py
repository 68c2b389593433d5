"""All claims of the paper in one table: the statement, its conditions, the measured value, and
whether the claim holds.

A check also has the expected result: that the claim holds, or, for an error in the paper, that it
does not. `varreg theory` runs all checks.
"""

from __future__ import annotations

from collections.abc import Callable

from varreg.theory.claims import (
    full_problem,
    lemma_1,
    section_s2,
    theorem_s0,
    theorems_1_and_2,
)
from varreg.theory.claims.claim import LAMBDA0, Check

__all__ = ["CHECKS", "LAMBDA0", "Check"]

CHECKS: dict[str, Callable[[], list[Check]]] = {
    "Lemma 1": lemma_1.lemma_1,
    "Theorems 1 and 2": theorems_1_and_2.theorems_1_and_2,
    "λ and its batch": theorems_1_and_2.independence,
    "Theorem S0 and its corollary": theorem_s0.rates,
    "The trade-off": theorem_s0.trade_offs,
    "S2.2": section_s2.mini_batches,
    "S2.4": section_s2.increment_variances,
    "The problem in full": full_problem.the_problem,
}
