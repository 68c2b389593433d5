"""The paper's experiments, with the control that it lacks."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from varreg.lab import names, saved, tasks
from varreg.lab.run import Config, Results

TASKS = {"fashion-mnist": "fashion-mnist:valid=0", "cifar10": "cifar10-lenet:valid=0"}
EPOCHS = {"fashion-mnist": 20, "cifar10": 60}
"""For about the first 30 epochs on CIFAR-10, nothing is learned: images of unit norm and this learning rate begin on a plateau."""
LR, BATCH, S = 0.01, 100, 2.0
"""The paper's."""


_SAVED = {"name": saved.is_text, "epochs": saved.is_positive, "seeds": saved.is_positive}
"""Its arguments in a file."""


@dataclass(frozen=True)
class Reproduction:
    """Four arms, each with the same seeds: SGD, VR-SGD as Algorithm 1 prints it, VR-SGD as the text has it, and SGD with a longer step."""

    name: str
    epochs: int = 0
    """0: `EPOCHS`."""
    seeds: int = 3

    kind = "reproduce"

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            raise names.unknown("experiment", self.name, TASKS)
        object.__setattr__(self, "epochs", self.epochs or EPOCHS[self.name])
        if self.epochs < 1 or self.seeds < 1:
            raise ValueError(f"varreg: at least one epoch and one seed are needed; got {self.epochs} and {self.seeds}.")

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Reproduction:
        """From what `arguments` gave, as it comes back from a file, which may be someone else's."""
        if fault := saved.table_fault(arguments, _SAVED, only=True):
            raise ValueError(f"varreg: a reproduction has {fault}.")
        if 4 * arguments["seeds"] > saved.RUNS:
            raise ValueError(f"varreg: a reproduction has more than {saved.RUNS:,} runs.")
        return cls(**arguments)

    def arguments(self) -> dict[str, Any]:
        return asdict(self)

    def about(self) -> str:
        return tasks.task(TASKS[self.name]).about

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


# What it says ------------------------------------------------------------------------------------------------------------------------

METRICS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")


def analyze(experiment: Reproduction, results: Results) -> dict[str, Any]:
    """All that the report shows, in plain values: `results.json`. A pure function of saved results."""
    arms = []
    for name, configs in experiment.arms(results).items():
        runs = [results[config.name] for config in configs if config.name in results]
        if runs:
            arms.append(
                {
                    "name": name,
                    "optimizer": configs[0].optimizer,
                    "lr": configs[0].lr,
                    "options": configs[0].options,
                    "seeds": [run["config"]["seed"] for run in runs],
                    "diverged": sum(run["diverged"] for run in runs),
                    "lambda": statistics.fmean(effective_lambda(run) for run in runs),
                    **{metric: [run["evaluations"][metric][-1] for run in runs] for metric in METRICS},
                    "curve": _mean([run["evaluations"]["train_loss"] for run in runs]),
                }
            )
    complete = len(arms) == 4 and all(len(arm["seeds"]) == experiment.seeds for arm in arms)
    warnings = [] if complete else ["This report is partial: not all runs have ended. The same command goes on."]
    warnings += [f"{arm['name']} diverged in {arm['diverged']} of {len(arm['seeds'])} runs." for arm in arms if arm["diverged"]]
    if experiment.seeds < 2:
        warnings.append("One seed shows nothing: use --seeds 3 or more.")
    return {"complete": complete, "arms": arms, "warnings": warnings, "verdict": _sentences(arms) if complete else []}


def _mean(curves: list[list[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*curves, strict=False)]


def _said(arm: dict[str, Any]) -> str:
    loss, accuracy = arm["train_loss"], 100 * statistics.fmean(arm["test_accuracy"])
    return f"{arm['name']}: training loss {statistics.fmean(loss):.3f} ({min(loss):.3f}–{max(loss):.3f}), test accuracy {accuracy:.1f} %"


def _epochs_to(arm: dict[str, Any], goal: float, epochs: int) -> str:
    at = next((i for i, x in enumerate(arm["curve"]) if x <= goal), None)
    return f"{at} epochs" if at is not None else f"more than {epochs} epochs"


def _sentences(arms: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What reproduces, and what explains it."""
    sgd, printed, averaged, control = arms
    if any(arm["diverged"] for arm in arms):
        counts = "; ".join(f"{arm['name']}: {arm['diverged']} of {len(arm['seeds'])}" for arm in arms)
        return [{"kind": "unknown", "headline": f"Runs diverged ({counts}): nothing is concluded.", "speed": "", "why": ""}]
    goal, epochs = statistics.fmean(sgd["train_loss"]), len(sgd["curve"]) - 1
    gain, longer = (goal - statistics.fmean(arm["train_loss"]) for arm in (printed, control))
    faster = max(printed["train_loss"]) < min(sgd["train_loss"])
    headline = f"At learning rate {LR:g} and the same seeds, after {epochs} epochs: {_said(sgd)}; {_said(printed)}."
    also = f"With the history averaged, as the text has it, λ was {averaged['lambda']:.2f}. {_said(averaged)}."
    matched = f"The λ that it used was {printed['lambda']:.2f} on average. The control, with no variance in it: {_said(control)}."
    if not faster:
        return [
            {
                "kind": "refuted",
                "headline": f"{headline} That VR-SGD is faster does not reproduce here.",
                "speed": matched,
                "why": also,
            }
        ]
    headline += (
        f" VR-SGD needs {_epochs_to(printed, goal, epochs)} for what SGD reaches in {epochs}: the paper's claim reproduces."
    )
    matched += f" It needs {_epochs_to(control, goal, epochs)} for the same: "
    matched += f"the longer step alone makes {100 * longer / gain:.0f} % of the gain in training loss."
    return [{"kind": "explained" if longer > 0.9 * gain else "reproduced", "headline": headline, "speed": matched, "why": also}]
