"""The interface of experiments: a plan, an analysis of its results, and a page."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol

from varreg.lab import schema, store
from varreg.lab.experiments.saved_runs import read_results
from varreg.lab.report.csv_tables import curves_table, runs_table
from varreg.lab.report.document import Findings, Page
from varreg.lab.runs.config import Arms, Config, Results

Kept = dict[str, Any]
"""The results of an experiment, by the names of its planned work."""


class Planned(Protocol):
    """A piece of work whose result is kept by its name."""

    @property
    def name(self) -> str: ...


class Experiment(Protocol):
    """The base class of `varreg compare`, `varreg reproduce`, `varreg scaling` and `varreg
    theory`.
    """

    @property
    def kind(self) -> str: ...

    def plan(self, results: Kept) -> Sequence[Planned]:
        """Return all work that is known to be needed, given the results so far. Pure."""
        ...

    def read(self, folder: Path) -> Kept:
        """Return the results in a folder, by name. Raise a DamagedError if one is damaged."""
        ...

    def analyze(self, results: Kept) -> Findings:
        """Return the findings from the results, in plain values. Pure."""
        ...

    def page(self, results: Kept, findings: Findings, about: str) -> Page:
        """Return the page that shows them; `about` is the task, in words. Pure."""
        ...

    def guard(self, folder: Path) -> AbstractContextManager[None]:
        """Turn errors of analysis and page about damaged results into a `DamagedError`."""
        ...


class TrainingExperiment(ABC):
    """An experiment that consists of training runs."""

    kind: ClassVar[str]
    growing: ClassVar[tuple[str, ...]] = ("seeds",)
    """Arguments that may grow: with larger values, a saved experiment is extended."""

    def extending(self, saved: dict[str, Any]) -> TrainingExperiment:
        """Return this experiment with all runs that were saved with smaller arguments."""
        return self

    def extends(self, saved: dict[str, Any]) -> bool:
        """Return whether this experiment equals or extends one with the saved arguments."""
        now = store.as_saved(self.arguments())
        free = (*self.growing, "tried")
        same = all(saved.get(key) == now.get(key) for key in {*saved, *now} if key not in free)
        return same and all(
            schema.is_number(saved.get(key)) and saved[key] <= now[key] for key in self.growing
        )

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Return all arguments that the plan depends on, as in `experiment.json`."""

    @abstractmethod
    def about(self) -> str:
        """Return the task, in words."""

    @abstractmethod
    def plan(self, results: Results) -> list[Config]:
        """Return all runs that are known to be needed, given the results so far. Pure."""

    @abstractmethod
    def configs_by_arm(self, results: Results) -> dict[str, list[Config]]:
        """Return the runs of each arm that is known, given the results so far."""

    def read(self, folder: Path) -> Results:
        """Return the results of runs in a folder, by their names."""
        return read_results(self.plan, folder)

    def guard(self, folder: Path) -> AbstractContextManager[None]:
        """Do nothing: results of runs are checked one by one when they are read."""
        return contextlib.nullcontext()

    def terminal_table(self, findings: Findings) -> str:
        """Return the table of arms for the terminal; an empty text if there is none."""
        return ""

    def runs_by_arm(self, results: Results) -> Arms:
        """Return the results of each arm's runs that have ended; arms without any are left out."""
        arms = {
            name: [results[config.name] for config in configs if config.name in results]
            for name, configs in self.configs_by_arm(results).items()
        }
        return {name: runs for name, runs in arms.items() if runs}

    def new_page(self, results: Results, title: str, about: str) -> Page:
        """Return an empty page with the tables that every experiment of runs has."""
        arms = self.runs_by_arm(results)
        return Page(title, about, {"runs": runs_table(arms), "curves": curves_table(arms)})
