"""The paper's experiments, with the control that it lacks."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from varreg.errors import VarregError
from varreg.lab import schema, specs
from varreg.lab.experiments.experiment import TrainingExperiment
from varreg.lab.experiments.reproduce import analysis, page
from varreg.lab.experiments.reproduce.paper import BATCH, EPOCHS, LOG_EVERY, LR, TASKS, S
from varreg.lab.report.document import Findings, Page
from varreg.lab.runs.config import Config, Results
from varreg.lab.runs.metrics import effective_lambda
from varreg.lab.tasks import lookup

SAVED = {"name": schema.is_text, "epochs": schema.is_positive, "seeds": schema.is_positive}
"""The types of the arguments of a reproduction in a file."""


@dataclass(frozen=True)
class Reproduction(TrainingExperiment):
    """Four arms, each with the same seeds: SGD, VR-SGD as Algorithm 1 prints it, VR-SGD as the text
    has it, and SGD with a longer step.
    """

    name: str
    epochs: int = 0
    """0: `EPOCHS`."""
    seeds: int = analysis.SEEDS

    kind = "reproduce"

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            raise specs.unknown_name("experiment", self.name, TASKS)
        object.__setattr__(self, "epochs", self.epochs or EPOCHS[self.name])
        if self.epochs < 1 or self.seeds < 1:
            raise VarregError(
                f"varreg: at least one epoch and one seed are needed; got {self.epochs} and "
                f"{self.seeds}."
            )

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Reproduction:
        """Return the reproduction of saved arguments, from a file that may be someone else's."""
        if fault := schema.table_fault(saved, SAVED, only=True):
            raise VarregError(f"varreg: a reproduction has {fault}.")
        if 4 * saved["seeds"] > schema.RUNS:
            raise VarregError(f"varreg: a reproduction has more than {schema.RUNS:,} runs.")
        return cls(**saved)

    def arguments(self) -> dict[str, Any]:
        """Return all arguments that the plan depends on."""
        return asdict(self)

    def about(self) -> str:
        """Return the task, in words."""
        return lookup.task(TASKS[self.name]).about

    # ---- the plan

    def _arm(self, optimizer: str, lr: float, **options: Any) -> list[Config]:
        """Return one run for each seed."""
        task = TASKS[self.name]
        return [
            Config(task, optimizer, lr, seed, self.epochs, BATCH, options, LOG_EVERY, "epochs")
            for seed in range(self.seeds)
        ]

    def configs_by_arm(self, results: Results) -> dict[str, list[Config]]:
        """Return the runs of each arm.

        The last one is known once VR-SGD has run: its learning rate is SGD's times the λ that
        VR-SGD had.
        """
        arms = {
            "SGD": self._arm("SGD", LR),
            "VR-SGD, as printed": self._arm("VRSGD", LR, s=S, history="sum"),
            "VR-SGD, averaged history": self._arm("VRSGD", LR, s=S, history="mean"),
        }
        printed = [results.get(config.name) for config in arms["VR-SGD, as printed"]]
        lambdas = [effective_lambda(result) for result in printed if result is not None]
        if len(lambdas) == self.seeds:
            factor = statistics.fmean(lambdas)
            arms[f"SGD, lr × {factor:.2f}"] = self._arm("SGD", float(f"{LR * factor:.3g}"))
        return arms

    def plan(self, results: Results) -> list[Config]:
        """Return all runs that are known to be needed; one seed after the other."""
        arms = self.configs_by_arm(results).values()
        return [configs[seed] for seed in range(self.seeds) for configs in arms]

    # ---- the report

    def terminal_table(self, findings: Findings) -> str:
        """Return the table of arms for the terminal."""
        return page.terminal_table(findings)

    def analyze(self, results: Results) -> Findings:
        """Return the findings from the results."""
        return analysis.analyze(self, results)

    def page(self, results: Results, findings: Findings, about: str) -> Page:
        """Return the page that shows the findings."""
        return page.page_of(self, results, findings)
