"""A fair comparison: all optimizers have an equal budget, fixed in advance. They are tuned on one
split with some seeds, and judged on another split with other seeds.

Every optimizer gets the same number of trials on a logarithmic grid of learning rates, and of s if
it has one. The best trial has the lowest validation loss at the end, averaged over the tuning
seeds. It is run again with fresh seeds, the same for all optimizers, so that differences are
paired. The test split is read once, at the end of these runs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass, field
from typing import Any

from varreg.errors import VarregError
from varreg.lab import optimizers, schema
from varreg.lab.experiments.compare import analysis, budget, page
from varreg.lab.experiments.compare.learning_rates import best, extras_of, grid, trials_of
from varreg.lab.experiments.compare.trials import (
    FRESH,
    LOG_EVERY,
    Arm,
    ablations_of,
    distinct,
)
from varreg.lab.experiments.experiment import TrainingExperiment
from varreg.lab.report.document import Findings, Page
from varreg.lab.runs.config import Config, Results
from varreg.lab.tasks import lookup


@dataclass(frozen=True)
class Comparison(TrainingExperiment):
    """The arguments of a comparison: optimizers and budget, on which the plan depends. The first
    optimizer is the base.
    """

    task: str = "digits"
    optimizers: tuple[str, ...] = ("SGD", "VRSGD")
    trials: int = 12
    lr: tuple[float, float] | None = None
    s: tuple[float, ...] = (0.5, 2.0)
    tuning_seeds: int = 2
    seeds: int = 10
    epochs: int = 0
    """0: the task's own number; so for `batch`."""
    batch: int = 0
    ablations: bool = True
    recipe: dict[str, Any] = field(default_factory=dict)
    """Options of all optimizers that do not have their own: those of a `Recipe`, and others that
    all optimizers take, such as weight_decay.
    """
    schedules: tuple[str, ...] = ()
    """Schedules that are tuned with the learning rate, in the same budget; if empty, the recipe's
    schedule is used.
    """
    tried: tuple[int, ...] = ()
    """Earlier numbers of trials in the same folder: all their trials are kept."""

    kind = "compare"
    growing = ("seeds", "tuning_seeds", "trials")

    def __post_init__(self) -> None:
        """Check arguments that a person gave. They may name a user's task, which is imported."""
        budget.check_budget(self)
        object.__setattr__(self, "recipe", {**lookup.task(self.task).recipe, **self.recipe})
        # Saved arguments have both numbers, and so do not depend on the task's code.
        if not self.epochs or not self.batch:
            task = lookup.task(self.task)
            object.__setattr__(self, "epochs", self.epochs or task.epochs)
            object.__setattr__(self, "batch", self.batch or task.batch)
        for spec in self.optimizers:
            name, options = optimizers.parse(spec)
            optimizers.check(name, options)
            if len(extras_of(self, spec)) > self.trials:
                what = f"{len(self.s)} values of s"
                if self.schedules:
                    what = f"{len(extras_of(self, spec))} schedules and values of s"
                raise VarregError(f"varreg: trials={self.trials} is too few for {what}.")
            for _, options in grid(self, spec):
                optimizers.check(name, options)

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Comparison:
        """Return the comparison of saved arguments, from a file that may be someone else's.

        Nothing is imported, built or called: `__post_init__` does not run.
        """
        saved = {**budget.LATER, **saved}
        if fault := schema.table_fault(saved, budget.SAVED, only=True):
            raise VarregError(f"varreg: a comparison has {fault}.")
        made = object.__new__(cls)
        for key, value in saved.items():
            object.__setattr__(made, key, tuple(value) if isinstance(value, list) else value)
        for spec in made.optimizers:
            budget.check_saved_optimizer(spec)
        budget.check_saved_options(made.recipe, "the recipe")
        budget.check_saved_numbers(made.tried)
        trials = max(made.trials, len(made.s)) + sum(made.tried)
        runs_of_each = trials * made.tuning_seeds + 4 * made.seeds
        if runs_of_each * len(made.optimizers) > schema.RUNS:
            raise VarregError(f"varreg: a comparison has more than {schema.RUNS:,} runs.")
        budget.check_budget(made)
        return made

    def arguments(self) -> dict[str, Any]:
        """Return all arguments that the plan depends on. Leave out arguments that earlier versions
        did not have, if they are empty.
        """
        saved = asdict(self)
        return {k: v for k, v in saved.items() if v or k not in budget.LATER}

    def extending(self, saved: dict[str, Any]) -> Comparison:
        """Return this comparison with all trials of the saved one, if it has more trials."""
        before = {*saved.get("tried", ()), saved["trials"]} - {self.trials}
        return dataclasses.replace(self, tried=tuple(sorted(before)))

    def about(self) -> str:
        """Return the task, in words."""
        return lookup.task(self.task).about

    # ---- the plan

    def configs_of(
        self, spec: str, lr: float, options: dict[str, Any], seeds: range, test: Any
    ) -> list[Config]:
        """Return one run for each seed."""
        name = optimizers.parse(spec)[0]
        return [
            Config(self.task, name, lr, seed, self.epochs, self.batch, options, LOG_EVERY, test)
            for seed in seeds
        ]

    def arms(self, results: Results) -> list[Arm]:
        """Return the arms that are known, given the results so far."""
        arms = []
        for i, spec in enumerate(self.optimizers):
            tuned = best(self, spec, results)
            if tuned is None:
                continue

            def fresh(
                options: dict[str, Any], spec: str = spec, lr: float = tuned.lr
            ) -> list[Config]:
                return self.configs_of(spec, lr, options, range(FRESH, FRESH + self.seeds), "end")

            arms.append(Arm(spec, "candidate" if i else "base", spec, fresh(tuned.options)))
            regularized = optimizers.entry(optimizers.parse(spec)[0]).regularized
            if self.ablations and regularized and "ablation" not in tuned.options:
                arms += [
                    Arm(f"{spec}, {word}", "ablation", spec, fresh(options))
                    for word, options in ablations_of(tuned.options).items()
                ]
        return arms

    def configs_by_arm(self, results: Results) -> dict[str, list[Config]]:
        """Return the runs of each arm that is known, given the results so far."""
        return {arm.name: arm.configs for arm in self.arms(results)}

    def plan(self, results: Results) -> list[Config]:
        """Return all runs that are known to be needed: first the trials of all, then the arms."""
        trials = [
            config
            for spec in self.optimizers
            for trial in trials_of(self, spec)
            for config in trial.configs
        ]
        if any(config.name not in results for config in trials):
            return distinct(trials)
        arms = [arm.configs for arm in self.arms(results)]
        return distinct(trials + [configs[i] for i in range(self.seeds) for configs in arms])

    def size(self) -> int:
        """Return the number of runs."""
        ablated = (
            sum(optimizers.entry(optimizers.parse(spec)[0]).regularized for spec in self.optimizers)
            * 3
            * self.ablations
        )
        return (
            sum(len(grid(self, spec)) for spec in self.optimizers) * self.tuning_seeds
            + (len(self.optimizers) + ablated) * self.seeds
        )

    # ---- the report

    def analyze(self, results: Results) -> Findings:
        """Return the findings from the results."""
        return analysis.analyze(self, results)

    def terminal_table(self, findings: Findings) -> str:
        """Return the table of arms for the terminal."""
        return page.terminal_table(findings)

    def page(self, results: Results, findings: Findings, about: str) -> Page:
        """Return the page that shows the findings."""
        return page.page_of(self, results, findings, about or f"Task {self.task}")
