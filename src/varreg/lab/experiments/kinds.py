"""The kinds of experiments, by their names in `experiment.json`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from varreg.lab import store
from varreg.lab.experiments.compare.plan import Comparison
from varreg.lab.experiments.experiment import Experiment
from varreg.lab.experiments.record import FILE, RESTORE
from varreg.lab.experiments.reproduce.plan import Reproduction
from varreg.lab.experiments.scaling.plan import Scaling
from varreg.lab.experiments.theory.plan import Theory

KINDS: dict[str, Callable[[dict[str, Any]], Experiment]] = {
    Comparison.kind: Comparison.of,
    Reproduction.kind: Reproduction.of,
    Scaling.kind: Scaling.of,
    Theory.kind: Theory.of,
}
"""Functions that make an experiment from its saved arguments."""


def restore(folder: Path, record: dict[str, Any]) -> Experiment:
    """Return the experiment that a record describes. Names in the record are not imported or
    run.
    """
    if record["kind"] not in KINDS:
        expected = f"one of the kinds {', '.join(KINDS)}"
        raise store.damaged(folder / FILE, expected, repr(record["kind"]), RESTORE)
    try:
        return KINDS[record["kind"]](record["arguments"])
    except ValueError as error:
        got = str(error).removeprefix("varreg: ")
        expected = "the arguments of an experiment"
        raise store.damaged(folder / FILE, expected, got, RESTORE) from error
