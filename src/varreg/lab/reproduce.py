"""The paper's experiments, with the control that it lacks."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from varreg.lab.run import Config

Results = dict[str, dict[str, Any]]
"""Of runs, by their names."""

TASKS = {"fashion-mnist": "fashion-mnist:valid=0", "cifar10": "cifar10-lenet:valid=0"}
LR, BATCH, S = 0.01, 100, 2.0
"""The paper's."""


@dataclass(frozen=True)
class Reproduction:
    """Four arms, each with the same seeds: SGD, VR-SGD as Algorithm 1 prints it, VR-SGD as the text has it, and SGD with a longer step."""

    name: str
    epochs: int = 20
    seeds: int = 3

    kind = "reproduce"

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.seeds < 1:
            raise ValueError(f"varreg: at least one epoch and one seed are needed; got {self.epochs} and {self.seeds}.")

    def arguments(self) -> dict[str, Any]:
        return asdict(self)

    def _arm(self, optimizer: str, lr: float, **options: Any) -> list[Config]:
        task = TASKS[self.name]
        return [Config(task, optimizer, lr, seed, self.epochs, BATCH, options, 50, "epochs") for seed in range(self.seeds)]

    def arms(self, results: Results) -> dict[str, list[Config]]:
        """By name. The last one is known once VR-SGD has run: its learning rate is SGD's times the λ that VR-SGD had."""
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
        """All runs that are known to be needed, given those that are there; one seed after the other."""
        arms = self.arms(results).values()
        return [configs[seed] for seed in range(self.seeds) for configs in arms]


def effective_lambda(result: dict[str, Any]) -> float:
    """λ over a whole run: the mean over time of its means weighted by squared gradients. 1 for an optimizer that has none."""
    values = [x for x in result["statistics"].get("lambda", []) if x == x]
    return statistics.fmean(values) if values else 1.0
