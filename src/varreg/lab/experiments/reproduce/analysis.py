"""Analyze a reproduction: its findings in numbers and in words. A pure function of saved
results.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from varreg.lab.experiments.compare.estimates import Estimate, fewest_pairs, median_difference
from varreg.lab.experiments.reproduce.paper import EPOCHS, LR
from varreg.lab.report.document import Findings
from varreg.lab.report.format import PARTIAL, count, number, percent
from varreg.lab.runs.config import Results
from varreg.lab.runs.metrics import effective_lambda

if TYPE_CHECKING:
    from varreg.lab.experiments.reproduce.plan import Reproduction

METRICS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
LEVEL = 0.95
"""The level of intervals."""
SEEDS = fewest_pairs(LEVEL)
"""The smallest number of seeds from which anything is concluded: fewer have no interval."""
ENOUGH = 2
"""The smallest number of epochs from which anything is concluded."""
ALL = 0.9
"""The share of the gain from which a longer step makes all of it."""


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
                    "curve": _medians([run["evaluations"]["train_loss"] for run in runs]),
                }
            )
    complete = len(arms) == 4 and all(len(arm["seeds"]) == reproduction.seeds for arm in arms)
    warnings = [] if complete else [PARTIAL]
    warnings += [
        f"{arm['name']} diverged in {arm['diverged']} of {len(arm['seeds'])} runs."
        for arm in arms
        if arm["diverged"]
    ]
    if reproduction.seeds < SEEDS:
        warnings.append(
            f"{count(reproduction.seeds, 'seed')} cannot show whether it reproduces: use --seeds "
            f"{SEEDS} or more."
        )
    return {
        "complete": complete,
        "arms": arms,
        "warnings": warnings,
        "verdict": [verdict(arms, EPOCHS[reproduction.name])] if complete else [],
    }


def _medians(curves: list[list[float]]) -> list[float]:
    """Return the median of curves at each epoch, as far as all of them go."""
    return [statistics.median(column) for column in zip(*curves, strict=False)]


def _numbers(arm: dict[str, Any]) -> str:
    """Return an arm's training loss and test accuracy, in words."""
    loss, accuracy = arm["train_loss"], 100 * statistics.fmean(arm["test_accuracy"])
    spread = f"{statistics.fmean(loss):.3f} ({min(loss):.3f}–{max(loss):.3f})"
    return f"{arm['name']}: training loss {spread}, test accuracy {accuracy:.1f} %"


def _epochs_to(arm: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the number of epochs that an arm needs for the training loss at which another one
    ends, in words: median over seeds.
    """
    goal, epochs = statistics.median(other["train_loss"]), len(other["curve"]) - 1
    at = next((i for i, x in enumerate(arm["curve"]) if x <= goal), None)
    return count(at, "epoch") if at is not None else f"more than {count(epochs, 'epoch')}"


def _difference(arm: dict[str, Any], other: dict[str, Any]) -> tuple[Estimate, str]:
    """Return the median of the paired differences in training loss, and the same in words."""
    a, b = arm["train_loss"], other["train_loss"]
    d = median_difference(a, b, LEVEL)
    lower = sum(x < y for x, y in zip(a, b, strict=True))
    interval = f"{percent(LEVEL)} interval {number(d.low)} to {number(d.high)}"
    return d, (
        f"{arm['name']} is lower on {lower} of {count(len(a), 'seed')}; median difference "
        f"{number(d.value)}, {interval if d.is_bounded else 'too few for an interval'}"
    )


def verdict(arms: list[dict[str, Any]], usual: int) -> dict[str, str]:
    """Return the verdict: whether the paper's claim reproduces, and what explains it.

    The paired differences in training loss decide, by the interval of their median: it can be told
    neither that VR-SGD is faster nor that it is not from fewer than `SEEDS` seeds. `usual` is the
    number of epochs of the whole experiment.
    """
    sgd, printed, averaged, control = arms
    if any(arm["diverged"] for arm in arms):
        counts = "; ".join(
            f"{arm['name']}: {arm['diverged']} of {len(arm['seeds'])}" for arm in arms
        )
        headline = f"Runs diverged ({counts}): nothing is concluded."
        return {"kind": "unknown", "headline": headline, "speed": "", "why": ""}
    seeds, epochs = len(sgd["seeds"]), len(sgd["curve"]) - 1
    gain, said = _difference(printed, sgd)
    why = (
        f"With the history averaged, as the text has it, λ was {averaged['lambda']:.2f}. "
        f"{_numbers(averaged)}."
    )
    matched = (
        f"The λ that it used was {printed['lambda']:.2f} on average. The control, with no variance "
        f"in it: {_numbers(control)}."
    )
    kind, claim = _claim(gain, seeds, epochs)
    if kind == "reproduced":
        kind, more = _explanation(sgd, printed, control)
        matched += more
        needed = _epochs_to(printed, sgd)
        claim = f"VR-SGD needs {needed} for what SGD reaches in {epochs}: {claim}"
    if epochs < usual and kind != "unknown":
        claim += f" This is about {epochs} of the experiment's {usual} epochs."
    headline = (
        f"At learning rate {LR:g} and the same seeds, after {count(epochs, 'epoch')}: "
        f"{_numbers(sgd)}; {_numbers(printed)}. {said}. {claim}"
    )
    return {"kind": kind, "headline": headline, "speed": matched, "why": why}


def _claim(gain: Estimate, seeds: int, epochs: int) -> tuple[str, str]:
    """Return the kind of the verdict on the paper's claim, and its sentence."""
    if seeds < SEEDS or epochs < ENOUGH:
        given = f"{count(seeds, 'seed')} and {count(epochs, 'epoch')}"
        return "unknown", (
            f"Whether VR-SGD is faster cannot be told from {given}: they are too few to say that "
            "the paper's claim reproduces, or that it does not."
        )
    if not gain.excludes(0):
        return "same", (
            "That VR-SGD is faster cannot be told from these seeds: no detectable difference."
        )
    if gain.value > 0:
        return "refuted", "That VR-SGD is faster does not reproduce here: it is slower."
    return "reproduced", "the paper's claim reproduces."


def _explanation(
    sgd: dict[str, Any], printed: dict[str, Any], control: dict[str, Any]
) -> tuple[str, str]:
    """Return whether the longer step alone explains that VR-SGD is faster, and the sentences."""
    gain, alone = (_difference(arm, sgd)[0] for arm in (printed, control))
    beyond, said = _difference(printed, control)
    share = alone.value / gain.value
    words = (
        f" It needs {_epochs_to(control, sgd)} for the same: the longer step alone makes "
        f"{100 * share:.0f} % of the gain in training loss. Against it, {said}."
    )
    if beyond.high < 0:
        return "reproduced", f"{words} So VR-SGD did more than a longer step does."
    if alone.high < 0 and share > ALL:
        return "explained", f"{words} So a longer step explains the gain."
    return "reproduced", f"{words} Whether a longer step explains all of the gain cannot be told."
