"""Analyze a reproduction: its findings in numbers and in words. A pure function of saved
results.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from varreg.lab.experiments.reproduce.paper import LR
from varreg.lab.report.document import Findings
from varreg.lab.report.format import PARTIAL
from varreg.lab.runs.config import Results
from varreg.lab.runs.metrics import effective_lambda

if TYPE_CHECKING:
    from varreg.lab.experiments.reproduce.plan import Reproduction

METRICS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")


ENOUGH = 2
"""The smallest number of seeds, and of epochs, from which a reproduction is concluded."""


def analyze(reproduction: Reproduction, results: Results) -> Findings:
    """Return the findings that the report shows, in plain values, as in `results.json`."""
    arms = []
    for name, configs in reproduction.configs_by_arm(results).items():
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
                    **{
                        metric: [run["evaluations"][metric][-1] for run in runs]
                        for metric in METRICS
                    },
                    "curve": _mean([run["evaluations"]["train_loss"] for run in runs]),
                }
            )
    complete = len(arms) == 4 and all(len(arm["seeds"]) == reproduction.seeds for arm in arms)
    warnings = [] if complete else [PARTIAL]
    warnings += [
        f"{arm['name']} diverged in {arm['diverged']} of {len(arm['seeds'])} runs."
        for arm in arms
        if arm["diverged"]
    ]
    if reproduction.seeds < 2:
        warnings.append("One seed shows nothing: use --seeds 3 or more.")
    return {
        "complete": complete,
        "arms": arms,
        "warnings": warnings,
        "verdict": [verdict(arms)] if complete else [],
    }


def _mean(curves: list[list[float]]) -> list[float]:
    """Return the mean curve, as far as all of them go."""
    return [statistics.fmean(column) for column in zip(*curves, strict=False)]


def _numbers(arm: dict[str, Any]) -> str:
    """Return an arm's training loss and test accuracy, in words."""
    loss, accuracy = arm["train_loss"], 100 * statistics.fmean(arm["test_accuracy"])
    spread = f"{statistics.fmean(loss):.3f} ({min(loss):.3f}–{max(loss):.3f})"
    return f"{arm['name']}: training loss {spread}, test accuracy {accuracy:.1f} %"


def _epochs_to(arm: dict[str, Any], goal: float, epochs: int) -> str:
    """Return the number of epochs that an arm needs to reach a training loss, in words."""
    at = next((i for i, x in enumerate(arm["curve"]) if x <= goal), None)
    return f"{at} epochs" if at is not None else f"more than {epochs} epochs"


def _count(n: int, what: str) -> str:
    """Return a number of things, in words."""
    return f"{n} {what}{'s' * (n != 1)}"


def verdict(arms: list[dict[str, Any]]) -> dict[str, str]:
    """Return the verdict: whether the paper's claim reproduces, and what explains it."""
    sgd, printed, averaged, control = arms
    if any(arm["diverged"] for arm in arms):
        counts = "; ".join(
            f"{arm['name']}: {arm['diverged']} of {len(arm['seeds'])}" for arm in arms
        )
        headline = f"Runs diverged ({counts}): nothing is concluded."
        return {"kind": "unknown", "headline": headline, "speed": "", "why": ""}
    goal, epochs = statistics.fmean(sgd["train_loss"]), len(sgd["curve"]) - 1
    gain, longer = (goal - statistics.fmean(arm["train_loss"]) for arm in (printed, control))
    faster = max(printed["train_loss"]) < min(sgd["train_loss"])
    headline = (
        f"At learning rate {LR:g} and the same seeds, after {epochs} epochs: {_numbers(sgd)}; "
        f"{_numbers(printed)}."
    )
    why = (
        f"With the history averaged, as the text has it, λ was {averaged['lambda']:.2f}. "
        f"{_numbers(averaged)}."
    )
    matched = (
        f"The λ that it used was {printed['lambda']:.2f} on average. The control, with no variance "
        f"in it: {_numbers(control)}."
    )
    if not faster:
        headline += " That VR-SGD is faster does not reproduce here."
        return {"kind": "refuted", "headline": headline, "speed": matched, "why": why}
    if min(len(sgd["seeds"]), epochs) < ENOUGH:
        headline += (
            f" VR-SGD is ahead, but {_count(len(sgd['seeds']), 'seed')} and "
            f"{_count(epochs, 'epoch')} are too few to say that the paper's claim reproduces."
        )
        return {"kind": "unknown", "headline": headline, "speed": matched, "why": why}
    headline += (
        f" VR-SGD needs {_epochs_to(printed, goal, epochs)} for what SGD reaches in {epochs}: the "
        "paper's claim reproduces."
    )
    matched += (
        f" It needs {_epochs_to(control, goal, epochs)} for the same: the longer step alone makes "
        f"{100 * longer / gain:.0f} % of the gain in training loss."
    )
    kind = "explained" if longer > 0.9 * gain else "reproduced"
    return {"kind": kind, "headline": headline, "speed": matched, "why": why}
