"""Trials: what is not known of a function is learned by running it with other values.

`apart` tries whether a function mixes samples, `calls` a call of a torch function, `rerun` the
forward of a model;
`sums` tries whether an output without a batch is a sum over samples. `verdicts` remembers the
answers.
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
