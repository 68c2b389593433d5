"""Trials: run a function with other values, to see whether it keeps samples apart.

`try_separation` tries any function, `try_call` one call of a torch function, `rerun` the forward of
a model, and `alone` one sample of a forward. `sums` tries whether an output without a batch is a
sum over samples. `trial_values` makes the values, `runners` makes functions of calls, and
`verdicts` stores the results.
"""

from varreg.engine.trace.trial.trial_values import FAILURES, Verdict, undisturbed
from varreg.engine.trace.trial.try_separation import keeps_apart
from varreg.engine.trace.trial.verdicts import Escape, Range, Verdicts, has_rows_for_samples

__all__ = [
    "FAILURES",
    "Escape",
    "Range",
    "Verdict",
    "Verdicts",
    "has_rows_for_samples",
    "keeps_apart",
    "undisturbed",
]
