"""The check of one claim of the paper: the statement, its conditions, the measured value, and
whether the claim holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from varreg import regularizer
from varreg.theory.convergence import Measured

LAMBDA0 = regularizer.lambda0_of(regularizer.DEFAULTS["s"])


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    claim: str
    """Its place in the paper."""
    statement: str
    conditions: str
    measured: float
    relation: str
    """The claimed relation to the bound: `≤`, `<`, `=`."""
    bound: float
    holds: bool
    error: float = 0.0
    """The standard error of the measured value; 0 if nothing was random, or if an inequality was
    checked on every path.
    """
    expected: bool = True
    """Whether it should hold: False if the paper has an error, or if a condition is violated on
    purpose.
    """

    @property
    def slack(self) -> float:
        """Return the bound over the measured value; 1 is tight."""
        return self.bound / self.measured if self.measured else math.inf

    @property
    def verdict(self) -> str:
        """Return in words whether the claim holds, and whether that is unexpected."""
        word = "holds" if self.holds else "does not hold"
        return word if self.holds == self.expected else f"{word} – UNEXPECTED"


def check_of(
    claim: str,
    statement: str,
    conditions: str,
    m: Measured,
    relation: str = "≤",
    expected: bool = True,
) -> Check:
    """Return the check of a number that was measured over many runs."""
    holds = m.is_equal if relation == "=" else m.is_below
    return Check(
        claim, statement, conditions, m.value, relation, m.claimed, holds, m.error, expected
    )
