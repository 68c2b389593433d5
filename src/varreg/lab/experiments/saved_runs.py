"""Read the results of an experiment's runs from its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from varreg.lab import store
from varreg.lab.runs.config import Config, Results
from varreg.lab.runs.resume import read_result


def read_results(plan: Callable[[Results], list[Config]], folder: Path) -> Results:
    """Return the saved results, by name.

    Raise a DamagedError if a result is damaged or of another configuration. The plan depends on the
    results so far, so results are read until the plan has no new ones.
    """
    store.check_inside(folder, folder / "runs")
    results: Results = {}
    while True:
        new = {}
        for config in plan(results):
            if config.name not in results:
                result = read_result(config.folder_in(folder / "runs"), config)
                if result is not None:
                    new[config.name] = result
        if not new:
            return results
        results |= new
