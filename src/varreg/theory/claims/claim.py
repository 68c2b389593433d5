"""One claim of the paper, checked: what is said, under which conditions, what was measured, and
whether it holds.
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
    """Where it stands in the paper."""
    statement: str
    conditions: str
    measured: float
    relation: str
    """How it is claimed to relate to the bound: `≤`, `<`, `=`."""
    bound: float
    holds: bool
    error: float = 0.0
    """The standard error of what was measured; 0 where nothing was drawn at random, or an
    inequality was checked on every path.
    """
    expected: bool = True
    """Return whether it holds, as far as we know: False where the paper has an error, or a
    condition is broken on purpose.
    """

    @property
    def slack(self) -> float:
        """Return how many times the measured value the bound is; 1 is tight."""
        return self.bound / self.measured if self.measured else math.inf

    @property
    def verdict(self) -> str:
        """Return whether it holds, in words; and if that is unexpected."""
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
